"""Clients that leave, steps that raise, too many requests: nothing leaks and the rest goes on."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
import uvicorn

from engine import SamplingParams
from engine.api_stream import EventStream
from engine.serve import DrainingServer
from tests.engine.server_fixture import (
    FACTS,
    NAME,
    RunningServer,
    cold_llm,
    eventually,
    long_answer,
)

SHORT = {"model": NAME, "prompt": FACTS, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
COMPLETE = "/v1/completions"


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "overlap"])
def server(request):
    with RunningServer(config={"overlap": request.param}) as running:
        yield running
        running.assert_idle()


@pytest.fixture(scope="module")
def cold():
    return cold_llm()


@pytest.fixture(scope="module")
def short_text(cold):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return cold.generate(FACTS, params)[0].text


def assert_right_again(server, short_text):
    server.assert_idle()
    status, _, body = server.request("POST", COMPLETE, SHORT)
    assert status == 200 and json.loads(body)["choices"][0]["text"] == short_text


def outcomes(server):
    return [record["outcome"] for record in server.stats()["recent"]]


# ---- clients that leave


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(server, short_text, stream, n, caplog):
    aborted = outcomes(server).count("abort")
    connection = server.connection()
    body = json.dumps(long_answer(stream=stream, n=n)).encode()
    connection.request("POST", COMPLETE, body, {"Content-Type": "application/json"})
    if stream:
        assert connection.getresponse().readline().startswith(b"data: {")
    eventually(lambda: server.stats()["engine"]["requests_running"] == n)
    connection.close()
    assert_right_again(server, short_text)
    assert outcomes(server).count("abort") == aborted + n
    assert caplog.records == [], "a client that leaves is no error"


def test_a_client_that_leaves_while_its_prompt_waits_ends_it_too(server, short_text):
    """More requests than may run: the last ones have not begun when everybody leaves."""
    connections = [server.connection() for _ in range(12)]
    body = json.dumps(long_answer()).encode()
    for connection in connections:
        connection.request("POST", COMPLETE, body, {"Content-Type": "application/json"})
    eventually(lambda: server.stats()["engine"]["requests_waiting"] == 4)
    for connection in connections:
        connection.close()
    assert_right_again(server, short_text)


def test_a_client_that_stops_reading_holds_no_more_than_its_answer(server, short_text):
    connection = server.connection()
    body = json.dumps(long_answer(stream=True, max_tokens=300)).encode()
    connection.request("POST", COMPLETE, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    server.assert_idle()
    assert response.read().endswith(b"data: [DONE]\n\n")
    connection.close()
    assert_right_again(server, short_text)


def test_a_stream_that_is_not_read_closes_its_events_when_the_client_leaves():
    """Without waiting for the garbage collector: the test still holds the generator."""
    closed, blocked = [], asyncio.Event()

    async def events():
        try:
            while True:
                yield "data: {}\n\n"
        finally:
            closed.append(True)

    async def receive():
        await blocked.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message.get("body") == b"data: {}\n\n":
            blocked.set()
            await asyncio.Event().wait()

    async def main():
        rest = events()
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        await EventStream("data: first\n\n", rest)(scope, receive, send)
        assert closed == [True]
        await rest.aclose()

    asyncio.run(main())


# ---- steps that raise


def fail_once(server, monkeypatch, *, after=0):
    """Some step from now raises out of the worker."""
    issue, steps = server.llm.worker.issue, iter(range(after))

    def failing(batch, *before):
        if next(steps, None) is not None:
            return issue(batch, *before)
        monkeypatch.undo()
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(server.llm.worker, "issue", failing)


def test_a_step_that_raises_is_a_500_and_the_server_goes_on(
    server, short_text, monkeypatch, caplog
):
    fail_once(server, monkeypatch)
    status, _, body = server.request("POST", COMPLETE, SHORT)
    error = json.loads(body)["error"]
    assert status == 500 and (error["type"], error["code"]) == ("server_error", "engine_fault")
    assert "the device is gone" not in error["message"], "what failed is in the log"
    assert "the device is gone" in caplog.text and "Traceback" in caplog.text
    assert outcomes(server)[0] == "fault"
    assert_right_again(server, short_text)
    assert b"warmstate_engine_faults_total 1.0" in server.request("GET", "/metrics")[2]


def test_a_step_that_raises_before_the_first_token_gives_a_stream_its_status(server, monkeypatch):
    fail_once(server, monkeypatch)
    assert server.request("POST", COMPLETE, SHORT | {"stream": True})[0] == 500


def test_a_step_that_raises_in_a_stream_is_its_last_event(server, short_text, monkeypatch):
    fail_once(server, monkeypatch, after=4)
    status, _, body = server.request("POST", COMPLETE, SHORT | {"stream": True})
    *events, last = body.decode().strip().split("\n\n")
    assert status == 200 and len(events) >= 1
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_fault"
    assert_right_again(server, short_text)


def test_the_openai_client_sees_an_error_in_a_stream(server, monkeypatch):
    fail_once(server, monkeypatch, after=4)
    extra = {"ignore_eos": True}
    stream = server.client().completions.create(
        model=NAME, prompt=FACTS, stream=True, max_tokens=20, extra_body=extra
    )
    with pytest.raises(openai.APIError, match="engine failed"):
        list(stream)


def test_requests_that_were_not_in_the_step_that_raised_go_on(server, short_text, monkeypatch):
    """Eight run and raise; four wait and are answered."""
    with ThreadPoolExecutor(12) as pool:
        running = [pool.submit(server.request, "POST", COMPLETE, long_answer()) for _ in range(8)]
        eventually(lambda: server.stats()["engine"]["requests_running"] == 8)
        waiting = [pool.submit(server.request, "POST", COMPLETE, SHORT) for _ in range(4)]
        eventually(lambda: server.stats()["engine"]["requests_waiting"] == 4)
        fail_once(server, monkeypatch)
        assert [each.result()[0] for each in running] == [500] * 8
        for each in waiting:
            status, _, body = each.result()
            assert status == 200 and json.loads(body)["choices"][0]["text"] == short_text
    server.assert_idle()


def test_logits_that_are_not_finite_are_a_500(server, short_text, monkeypatch):
    forward = server.llm.worker.model.forward

    def spoiling(*inputs):
        monkeypatch.undo()
        return torch.full_like(forward(*inputs), torch.nan)

    monkeypatch.setattr(server.llm.worker.model, "forward", spoiling)
    status, _, body = server.request("POST", COMPLETE, SHORT)
    assert status == 500 and "finite" in json.loads(body)["error"]["message"]
    assert outcomes(server)[0] == "error"
    assert_right_again(server, short_text)


def test_a_bug_in_the_server_is_a_500_that_tells_no_details(server, monkeypatch):
    def broken(*_):
        raise KeyError("secret")

    monkeypatch.setattr(server.app.state.engine, "check_room", broken)
    status, _, body = server.request("POST", COMPLETE, SHORT)
    error = json.loads(body)["error"]
    assert status == 500 and error["code"] == "internal_error" and "secret" not in error["message"]


def test_an_engine_that_can_not_go_on_answers_503(monkeypatch):
    monkeypatch.setattr(DrainingServer, "on_tick", uvicorn.Server.on_tick)  # it would end
    with RunningServer() as server:

        def broken():
            raise AssertionError("bookkeeping is broken")

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.request, "POST", COMPLETE, long_answer())
            eventually(lambda: server.stats()["engine"]["requests_running"] == 1)
            server.engine._engine.commands.put(broken)
            replies = [running.result()]
        replies += [server.request("POST", COMPLETE, SHORT), server.request("GET", "/health")]
        for status, _, body in replies:
            error = json.loads(body)["error"]
            assert (status, error["code"]) == (503, "engine_failed")
            assert error["message"] == "the engine has failed; restart the server"
        assert server.stats()["engine"]["requests_running"] == 0
        assert server.engine.num_unfinished == 0


# ---- more requests than places


def test_two_hundred_at_once_are_right_or_told_to_come_again(cold):
    """A pool for 16 sequences, places for 64 requests."""
    prompts = [f"{FACTS[: 60 * (i % 5)]} Who is number {i % 20}?" for i in range(200)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = {prompt: cold.generate(prompt, params)[0].text for prompt in set(prompts)}

    async def ask_all(url):
        async def ask(prompt):
            fields = {"max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
            try:
                reply = await client.completions.create(model=NAME, prompt=prompt, **fields)
            except openai.RateLimitError:
                return prompt, None
            return prompt, reply.choices[0].text

        options = {"api_key": "none", "max_retries": 0, "timeout": 60}
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", **options) as client:
            return await asyncio.gather(*map(ask, prompts))

    pools = {"max_num_seqs": 16, "num_slots": 24, "num_blocks": 60}
    with RunningServer(config=pools, max_queued_requests=64) as server:
        replies = asyncio.run(ask_all(server.url))
        server.assert_idle()
        metrics = server.request("GET", "/metrics")[2].decode()
    answered = [(prompt, text) for prompt, text in replies if text is not None]
    assert 64 <= len(answered) < 200
    assert all(text == expected[prompt] for prompt, text in answered)
    assert f'outcome="queue_full"}} {200 - len(answered)}.0' in metrics
