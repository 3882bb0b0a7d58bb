"""A real server in a thread of this process, and what its tests ask of it."""

import http.client
import json
import queue
import threading
import time
from urllib.parse import urlsplit

import openai
import uvicorn

from engine import LLM
from engine.api import create_app
from engine.builtin import BUILTIN_MODEL_DIR
from engine.chat_template import ChatTemplate
from engine.serve import DrainingServer

NAME = "small"
POOLS = {"num_slots": 40, "num_blocks": 300, "max_num_seqs": 8, "checkpoint_every": 64}
FACTS = "Ada lives in Paris. Bob lives in Rome. Carl lives in Oslo. " * 6
WAIT_SECONDS = 20


def cold_llm():
    """The reference: no cache, one request at a time."""
    return LLM(BUILTIN_MODEL_DIR, enable_prefix_caching=False, num_slots=17, num_blocks=300)


class RunningServer:
    """The built-in model behind uvicorn on a free port; `with` starts and stops it."""

    def __init__(self, *, config=None, **options):
        self.llm = LLM(BUILTIN_MODEL_DIR, **(POOLS | (config or {})))
        template = ChatTemplate.from_directory(BUILTIN_MODEL_DIR)
        self.app = create_app(self.llm, model=NAME, chat_template=template, **options)
        settings = uvicorn.Config(
            self.app, port=0, log_level="critical", access_log=False, timeout_graceful_shutdown=3
        )
        self.engine = self.app.state.engine
        self.server = DrainingServer(settings, self.engine, name=NAME, drain_seconds=5)
        self._thread = threading.Thread(target=self.server.run)

    def __enter__(self):
        self._thread.start()
        eventually(lambda: self.server.started)
        host, port = self.server.servers[0].sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        self.server.should_exit = True
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()

    def client(self):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def connection(self):
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=WAIT_SECONDS)

    def request(self, method, path, body=None, headers=None):
        """(status, headers, body) of one request; a body that is no bytes is sent as JSON."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        connection = self.connection()
        try:
            headers = {"Content-Type": "application/json"} | (headers or {})
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def get(self, path):
        """The JSON at a path."""
        status, _, body = self.request("GET", path)
        assert status == 200, body
        return json.loads(body)

    def post(self, path, **body):
        """(status, JSON) of a request to the model."""
        status, _, reply = self.request("POST", path, {"model": NAME} | body)
        return status, json.loads(reply)

    def stats(self):
        return self.get("/stats")

    def on_engine(self, call):
        """What a call returns on the engine's thread, between two steps."""
        results = queue.SimpleQueue()
        self.engine._engine.commands.put(lambda: results.put(call()))
        return results.get(timeout=WAIT_SECONDS)

    def assert_idle(self):
        """In a moment nothing is held and nothing is queued, by the engine's own books too."""
        eventually(lambda: not self.app.state.service.num_preparing)
        eventually(lambda: held(self.stats()["engine"]) == [0] * 5)
        eventually(lambda: not self.on_engine(self.llm.has_unfinished))
        self.on_engine(self.llm.scheduler.check)
        assert self.engine.num_unfinished == 0


def held(stats):
    names = "slots_live blocks_in_use requests_waiting requests_running requests_background"
    return [stats[name] for name in names.split()]


def eventually(condition, *, seconds=WAIT_SECONDS):
    """Wait until a condition holds; fail if it does not."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
    return value


def long_answer(**fields):
    """The fields of a request that decodes for seconds unless somebody ends it."""
    extra = {"prompt": FACTS, "max_tokens": 3000, "ignore_eos": True, "temperature": 0}
    return {"model": NAME} | extra | fields
