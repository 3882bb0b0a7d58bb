"""`python -m engine.serve`: its options, its refusals, and how it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import fields

import pytest

from engine.config import EngineConfig
from engine.serve import _field_help, _parser, main
from tests.engine.server_fixture import FACTS, eventually

SMALL = ["--num-slots", "20", "--num-blocks", "200", "--max-num-seqs", "4", "--threads", "1"]


class Command:
    """A server process; `with` waits until it is ready and ends it."""

    def __init__(self, *options, command=None):
        command = command or [sys.executable, "-m", "engine.serve", "--port", "0", *SMALL, *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self):
        self.ready_line = self.process.stdout.readline()
        self.url = self.ready_line.split()[-1]
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def post(self, **fields):
        """An open response."""
        body = {"model": "builtin_model", "prompt": FACTS, "ignore_eos": True, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body | fields).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", data, headers)
        return urllib.request.urlopen(request, timeout=60)

    def end(self):
        """The exit code once it has ended."""
        return self.process.wait(30)


def read_all(response, into):
    into.append(response.read().decode())


def status_of(call):
    try:
        return call().status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_after_a_sigterm_streams_are_completed_and_new_requests_refused():
    with Command() as server:
        assert server.ready_line.startswith("warmstate: serving builtin_model at http://127.0.0.1:")
        streams, texts = [server.post(max_tokens=150, stream=True) for _ in range(3)], []
        readers = [threading.Thread(target=read_all, args=(each, texts)) for each in streams]
        for reader in readers:
            reader.start()
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: status_of(lambda: server.post(max_tokens=1)) == 503, seconds=1)
        health = lambda: urllib.request.urlopen(f"{server.url}/health")  # noqa: E731
        assert status_of(health) == 503
        for reader in readers:
            reader.join(60)
        assert server.end() == 0
        assert len(texts) == 3
        for text in texts:
            *events, last = text.strip().split("\n\n")
            assert last == "data: [DONE]"
            final = json.loads(events[-1].removeprefix("data: "))
            assert final["choices"][0]["finish_reason"] == "length"
        assert server.process.stderr.read() == ""


def test_what_is_not_answered_within_the_drain_time_is_aborted():
    with Command("--drain-seconds", "0.3") as server:
        stream = server.post(max_tokens=8000, stream=True)
        first = stream.readline()
        assert first.startswith(b"data: {")
        server.process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        *_, last = stream.read().decode().strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert server.end() == 0
        assert time.monotonic() - begin < 10


def test_an_idle_server_ends_at_once():
    with Command("--served-model-name", "mine") as server:
        assert "serving mine at" in server.ready_line
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 0


def test_every_setting_of_the_engine_is_an_option_with_a_text():
    options = _parser().parse_args([])
    for field in fields(EngineConfig):
        assert getattr(options, field.name) == field.default
        assert len(_field_help()[field.name]) > 5


def test_options_reach_their_fields():
    given = ["--no-enable-prefix-caching", "--num-slots", "7", "--dtype", "bfloat16"]
    options = _parser().parse_args([*given, "--restore", "copy", "--max-model-len", "100"])
    assert options.enable_prefix_caching is False and options.num_slots == 7
    assert (options.dtype, options.restore, options.max_model_len) == ("bfloat16", "copy", 100)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--chunk-stride", "65"], "chunk_stride=65"),
        (["--model", "/nowhere"], "nowhere"),
        (["--dtype", "int3"], "dtype='int3'"),
        (["--max-queued-requests", "0"], "max_queued_requests=0"),
        (["--max-body-bytes", "0"], "max_body_bytes=0"),
        (["--recent-requests", "-1"], "recent_requests=-1"),
        (["--drain-seconds", "-1"], "drain_seconds=-1"),
        (["--drain-seconds", "nan"], "drain_seconds=nan"),
        (["--drain-seconds", "inf"], "drain_seconds=inf"),
        (["--host", "no.such.host.invalid"], "can't listen at no.such.host.invalid"),
    ],
)
def test_a_refused_value_is_told_in_a_line_and_exits_with_2(capsys, options, message):
    assert main(options) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("warmstate: ") and message in told.err
    assert told.err.count("\n") == 1


def test_a_port_in_use_is_told_in_a_line_and_exits_with_2(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main([*SMALL, "--port", str(port)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"warmstate: can't listen at 127.0.0.1 port {port}: ")


def test_a_dead_engine_ends_the_process_with_1():
    script = f"""
import sys
from engine.engine_loop import EngineLoop
from engine.serve import main
def broken(self): raise AssertionError("bookkeeping is broken")
EngineLoop._step = broken
sys.exit(main({["--port", "0", *SMALL]}))
"""
    with Command(command=[sys.executable, "-c", script]) as server:
        assert status_of(lambda: server.post(max_tokens=5)) == 503
        assert server.end() == 1
        assert "warmstate: the engine has failed" in server.process.stderr.read()


MALFORMED = [["--port", "x"], ["--port", "65536"], ["--port", "-1"], ["--restore", "magic"]]
MALFORMED += [["--threads", value] for value in ("0", "1025", str(1 << 70))]


@pytest.mark.parametrize("options", MALFORMED)
def test_a_malformed_option_exits_with_2(capsys, options):
    with pytest.raises(SystemExit, match="2"):
        main(options)
    assert options[0] in capsys.readouterr().err


def test_the_engine_alone_imports_no_web_framework():
    script = "import sys, engine; print(*sorted({'fastapi', 'uvicorn', 'pydantic', "
    script += "'prometheus_client', 'starlette'} & set(sys.modules)))"
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == ""
