"""Everything that is refused: with the right status, in OpenAI's shape, naming the field."""

import json
import socket

import pytest

from engine.api_errors import api_error
from engine.requests import check_text
from tests.engine.server_fixture import NAME, RunningServer, long_answer

LIMIT = 20_000
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server():
    with RunningServer(max_body_bytes=LIMIT) as running:
        yield running
        running.assert_idle()


def error_of(body, status):
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    kind = "server_error" if status >= 500 else "invalid_request_error"
    assert isinstance(error["message"], str) and error["type"] == kind
    return error


def refused(server, path, fields, status=400):
    fields = (
        {"model": NAME} | ({"prompt": "x"} if path == COMPLETE else {"messages": HELLO}) | fields
    )
    got, _, body = server.request("POST", path, fields)
    assert got == status, body
    return error_of(body, status)


@pytest.mark.parametrize(
    "body",
    [b"{", b"no", b"\xff\xfe", b'{"a": 1}}', b"[" * 5000, b'"text"', b"[]", b"1" * 5000],
    ids=repr,
)
def test_a_body_that_is_no_json_object_is_refused(server, body):
    status, _, reply = server.request("POST", COMPLETE, body)
    assert status == 400
    error_of(reply, 400)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_no_json_are_refused(server, number):
    for field in (b'"temperature"', b'"metadata": {"a": 1, "b"'):
        end = b"}}" if b"{" in field else b"}"
        body = b'{"model": "small", "prompt": "x", ' + field + b": " + number.encode() + end
        status, _, reply = server.request("POST", COMPLETE, body)
        assert status == 400
        error_of(reply, 400)


def test_lone_surrogates_are_refused_and_pairs_are_characters(server):
    for path, field in (
        (COMPLETE, '"prompt": "%s"'),
        (CHAT, '"tools": [{"%s": 1}], "messages": []'),
    ):
        body = f'{{"model": "{NAME}", {field}}}'
        status, _, reply = server.request("POST", path, (body % "\\ud800").encode())
        assert status == 400 and "UTF-8" in error_of(reply, 400)["message"]
    pair = f'{{"model": "{NAME}", "prompt": "\\ud83d\\ude42", "max_tokens": 1}}'.encode()
    assert server.request("POST", COMPLETE, pair)[0] == 200


@pytest.mark.parametrize(
    "body",
    [b'{"model": "\xed\xa0\x80"}', b'{"\xed\xa0\x80": 1}', '{"model": "x"}'.encode("utf-16")],
    ids=repr,
)
def test_a_body_that_is_not_utf8_is_refused(server, body):
    status, _, reply = server.request("POST", COMPLETE, body)
    assert status == 400 and "UTF-8" in error_of(reply, 400)["message"]


def test_an_empty_body_is_called_empty(server):
    status, _, reply = server.request("POST", COMPLETE, b"")
    assert status == 400 and "the body is empty" in error_of(reply, 400)["message"]


def test_a_request_without_a_model_is_told_where_to_find_its_name(server):
    status, _, reply = server.request("POST", COMPLETE, {"prompt": "x"})
    error = error_of(reply, 400)
    assert status == 400 and error["param"] == "model"
    assert error["message"] == "model: is missing; /v1/models says which one is served"


@pytest.mark.parametrize("key", ["max_tokens", "\\ud800"])
def test_a_key_that_occurs_twice_is_refused_by_name(server, key):
    for text in ('{"%s": 1, "%s": 2}', '{"metadata": {"%s": 1, "a": 1, "%s": 1}}'):
        status, _, reply = server.request("POST", COMPLETE, (text % (key, key)).encode())
        message = error_of(reply, 400)["message"]
        assert status == 400 and repr(key).replace("\\\\", "\\") in message and "once" in message


@pytest.mark.parametrize("kind", ["text/plain", "", "application/xml", "application/jsonx"])
def test_a_content_type_that_is_not_json_is_refused(server, kind):
    body = {"model": NAME, "prompt": "x", "max_tokens": 1}
    status, _, reply = server.request("POST", COMPLETE, body, {"Content-Type": kind})
    message = error_of(reply, 400)["message"]
    assert status == 400 and "Content-Type" in message and repr(kind) in message


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_a_content_type_may_have_parameters(server, kind):
    body = {"model": NAME, "prompt": "x", "max_tokens": 1}
    assert server.request("POST", COMPLETE, body, {"Content-Type": kind})[0] == 200


def test_a_part_that_is_no_text_is_refused_by_its_type(server):
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]
    error = refused(server, CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert "'text'" in error["message"] and "'image_url'" in error["message"]
    assert error["param"] == "messages.0.content"


@pytest.mark.parametrize("value", [5, "\ud800"])
def test_an_option_of_ours_is_named_by_its_path(server, value):
    """By the types, and by the engine, whose refusals begin with the name alone."""
    if value == 5:
        param = refused(server, COMPLETE, {"warmstate": {"cache_salt": value}})["param"]
    else:
        with pytest.raises(ValueError) as refusal:
            check_text("cache_salt", value)
        param = api_error(refusal.value).param
    assert param == "warmstate.cache_salt"


@pytest.mark.parametrize("stop", [["x"] * 17, "x" * 257, ["a", "x" * 257]], ids=len)
def test_more_or_longer_stop_strings_than_allowed_are_refused(server, stop):
    assert refused(server, COMPLETE, {"stop": stop})["param"] == "stop"
    most = [chr(ord("a") + i) * 256 for i in range(16)]
    assert server.post(COMPLETE, prompt="x", max_tokens=1, stop=most)[0] == 200


WRONG_TYPES = [
    ("max_tokens", "5"), ("max_tokens", 5.5), ("max_tokens", True), ("max_tokens", 0),
    ("temperature", "hot"), ("temperature", -1), ("top_p", 0), ("top_p", 1.5), ("n", 0),
    ("n", 129), ("seed", -1), ("seed", 1 << 63), ("stop", ""), ("stop", [1]), ("stream", "yes"),
    ("stop_token_ids", [-1]), ("stop_token_ids", "a"), ("top_k", -1), ("user", 5), ("model", 5),
    ("warmstate", 5), ("stream_options", []),
]  # fmt: skip


@pytest.mark.parametrize("field, value", WRONG_TYPES)
@pytest.mark.parametrize("path", [COMPLETE, CHAT])
def test_wrong_types_and_ranges_are_refused_by_name(server, path, field, value):
    error = refused(server, path, {field: value})
    assert error["param"] == field and error["message"].startswith(field)


WRONG_PROMPTS = [None, 5, "", [], [""], [[]], [1.5], [True], ["a", 1], [[1], "a"], [-1], [[1, "a"]]]


@pytest.mark.parametrize("prompt", WRONG_PROMPTS, ids=repr)
def test_prompts_of_no_known_kind_are_refused(server, prompt):
    assert refused(server, COMPLETE, {"prompt": prompt})["param"] == "prompt"


def test_what_the_engine_refuses_is_told_in_its_words(server):
    assert "not an id in" in refused(server, COMPLETE, {"prompt": [99999]})["message"]
    assert "K/V blocks" in refused(server, COMPLETE, {"max_tokens": 30_000})["message"]
    assert "answers" in refused(server, COMPLETE, {"prompt": ["x"] * 100, "n": 100})["message"]
    assert "answers" in refused(server, COMPLETE, {"prompt": ["x"] * 257})["message"]


def test_a_prompt_that_can_never_fit_is_refused_before_a_stream_begins(server):
    fields = {"prompt": [1] * 9000, "max_tokens": 32_000, "stream": True}
    server.app.state.max_body_bytes = 1 << 20
    try:
        message = refused(server, COMPLETE, fields)["message"]
        assert message.startswith("9000 prompt tokens and max_tokens=32000 need")
    finally:
        server.app.state.max_body_bytes = LIMIT


UNSUPPORTED = [
    ("frequency_penalty", 0.5, 0), ("presence_penalty", -1, 0), ("logit_bias", {"1": 5}, {}),
    ("best_of", 2, 1), ("echo", True, False), ("suffix", "end", ""),
]  # fmt: skip
UNSUPPORTED_IN_CHAT = [
    ("frequency_penalty", 0.5, 0.0), ("presence_penalty", 1, None), ("logit_bias", {"1": 5}, {}),
    ("tool_choice", "required", "auto"), ("tool_choice", {"type": "function"}, "none"),
    ("response_format", {"type": "json_object"}, {"type": "text"}),
    ("parallel_tool_calls", False, True), ("modalities", ["audio"], ["text"]),
    ("reasoning_effort", "high", None), ("functions", [{"name": "f"}], []),
]  # fmt: skip
OPTIONS = [(COMPLETE, *option) for option in UNSUPPORTED]
OPTIONS += [(CHAT, *option) for option in UNSUPPORTED_IN_CHAT]


@pytest.mark.parametrize("path, field, value, neutral", OPTIONS)
def test_options_without_effect_are_taken_at_their_neutral_value_only(
    server, path, field, value, neutral
):
    error = refused(server, path, {field: value})
    assert error["param"] == field and "not supported" in error["message"]
    prompt = {"prompt": "x"} if path == COMPLETE else {"messages": HELLO}
    status, reply = server.post(path, max_tokens=1, **prompt, **{field: neutral})
    assert status == 200, reply


def test_options_that_change_nothing_are_ignored(server):
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": True}
    for path, prompt in ((COMPLETE, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
        assert server.post(path, max_tokens=1, **prompt, **ignored)[0] == 200


@pytest.mark.parametrize("path", [COMPLETE, CHAT])
def test_unknown_fields_are_refused_by_name(server, path):
    assert refused(server, path, {"tempreature": 1})["param"] == "tempreature"
    error = refused(server, path, {"warmstate": {"salt": "x"}})
    assert error["param"] == "warmstate.salt"


def test_fields_that_do_not_go_together_are_refused(server):
    assert "stream" in refused(server, COMPLETE, {"stream_options": {}})["message"]
    assert "logprobs" in refused(server, CHAT, {"top_logprobs": 3})["message"]
    both = {"max_tokens": 1, "max_completion_tokens": 1}
    assert "not both" in refused(server, CHAT, both)["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "robot", "content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        {"role": "user", "content": "x", "mood": "good"},
        {"content": "x"},
        "x",
    ],
    ids=repr,
)
def test_messages_of_no_known_kind_are_refused(server, message):
    error = refused(server, CHAT, {"messages": [message]})
    assert error["param"].startswith("messages.0")


def test_no_messages_are_refused(server):
    assert refused(server, CHAT, {"messages": []})["param"] == "messages"


def test_an_unknown_model_is_not_found(server):
    for path in (COMPLETE, CHAT):
        error = refused(server, path, {"model": "gpt"}, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    status, _, body = server.request("GET", "/v1/models/a/b")
    assert status == 404 and error_of(body, 404)["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/nothing", "/requests/nobody", "/docs", "/v1"])
def test_unknown_paths_are_not_found(server, path):
    status, _, body = server.request("GET", path)
    assert status == 404
    error_of(body, 404)


@pytest.mark.parametrize("method, path", [("GET", COMPLETE), ("GET", CHAT), ("POST", "/stats")])
def test_other_methods_are_not_allowed(server, method, path):
    status, headers, body = server.request(method, path)
    assert status == 405 and headers["allow"]
    error_of(body, 405)


def test_a_body_at_the_limit_is_read_and_one_byte_more_is_not(server):
    short = json.dumps({"model": NAME, "prompt": "x", "max_tokens": 1}).encode()
    assert server.request("POST", COMPLETE, short.ljust(LIMIT))[0] == 200
    status, _, body = server.request("POST", COMPLETE, short.ljust(LIMIT + 1))
    assert status == 413
    assert str(LIMIT) in error_of(body, 413)["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_answered_before_it_has_come(server, chunked):
    """Announced: not a byte of it is needed. Chunked: the answer comes while it is on its way."""
    size = "Transfer-Encoding: chunked" if chunked else "Content-Length: 1000000000"
    head = (
        f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{size}\r\n\r\n"
    )
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode())
        if chunked:
            connection.sendall(b"%x\r\n" % (LIMIT + 1) + b" " * (LIMIT + 1) + b"\r\n")
        answer = b""
        while part := connection.recv(65536):  # until the server closes
            answer += part
    assert answer.startswith(b"HTTP/1.1 413") and b"request_too_large" in answer


def test_a_server_that_is_over_its_queue_says_when_to_try_again():
    with RunningServer(max_queued_requests=1) as server:
        client = server.client()
        fields = long_answer()
        extra = {"ignore_eos": fields.pop("ignore_eos")}
        stream = client.completions.create(stream=True, extra_body=extra, **fields)
        next(stream)
        status, headers, body = server.request("POST", COMPLETE, {"model": NAME, "prompt": "x"})
        assert status == 429 and int(headers["retry-after"]) >= 1
        assert json.loads(body)["error"]["type"] == "rate_limit_error"
        stream.close()
        server.assert_idle()
        assert server.post(COMPLETE, prompt="x")[0] == 200
