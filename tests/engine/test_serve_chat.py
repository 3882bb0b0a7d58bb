"""/v1/chat/completions: the template, OpenAI's shapes, and the turns that follow."""

import itertools

import pytest

from engine import SamplingParams
from engine.builtin import BUILTIN_MODEL_DIR
from engine.chat_template import ChatTemplate
from tests.engine.server_fixture import FACTS, NAME, RunningServer, cold_llm, eventually

ASK = [{"role": "user", "content": FACTS + "Where does Bob live?"}]
salts = map(str, itertools.count())


@pytest.fixture(scope="module")
def server():
    with RunningServer() as running:
        yield running
        running.assert_idle()


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def cold():
    return cold_llm()


@pytest.fixture(scope="module")
def template():
    return ChatTemplate.from_directory(BUILTIN_MODEL_DIR)


def chat(client, messages=ASK, *, warmstate=None, **fields):
    fields = {"temperature": 0, "max_tokens": 12} | fields
    extra = {"warmstate": warmstate or {}}
    return client.chat.completions.create(model=NAME, messages=messages, extra_body=extra, **fields)


def expected(cold, template, messages=ASK, **params):
    params = {"temperature": 0, "max_tokens": 12} | params
    return cold.generate(template.render(messages), SamplingParams(**params))[0]


def test_an_answer_is_that_of_the_engine_to_the_rendered_messages(client, cold, template):
    answer = chat(client)
    choice = answer.choices[0]
    output = expected(cold, template)
    assert choice.message.content == output.text and choice.message.role == "assistant"
    assert choice.finish_reason == output.finish_reason
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    assert answer.usage.completion_tokens == len(output.token_ids)


def test_a_stream_opens_with_the_role_and_joins_to_the_same_text(client, cold, template):
    events = list(chat(client, stream=True, stream_options={"include_usage": True}))
    first, *rest, last, usage = events
    assert first.choices[0].delta.role == "assistant"
    assert all(event.choices[0].delta.role is None for event in [*rest, last])
    text = "".join(event.choices[0].delta.content or "" for event in events[:-1])
    output = expected(cold, template)
    assert text == output.text and last.choices[0].finish_reason == output.finish_reason
    assert last.warmstate["request_id"] == last.id
    assert usage.choices == [] and usage.usage.completion_tokens == len(output.token_ids)


def test_text_may_come_in_parts(client):
    parts = [{"type": "text", "text": FACTS}, {"type": "text", "text": "Where does Bob live?"}]
    whole = chat(client).choices[0].message.content
    in_parts = chat(client, [{"role": "user", "content": parts}])
    assert in_parts.choices[0].message.content == whole


def test_without_a_limit_an_answer_ends_by_itself_or_at_the_models_end(client):
    answer = client.chat.completions.create(model=NAME, messages=ASK, temperature=0)
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_the_newer_name_of_the_limit_is_known(client):
    fields = {"max_completion_tokens": 2, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(model=NAME, messages=ASK, **fields)
    assert answer.usage.completion_tokens == 2
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 3])
def test_logprobs_are_those_of_the_engine(client, cold, template, stream, top):
    output = expected(cold, template, max_tokens=4, logprobs=top)
    answer = chat(client, max_tokens=4, logprobs=True, top_logprobs=top, stream=stream)
    pieces = list(answer)[1:] if stream else [answer]
    told = [token for piece in pieces for token in piece.choices[0].logprobs.content]
    values = [logprobs[i] for i, logprobs in zip(output.token_ids, output.logprobs, strict=True)]
    assert [token.logprob for token in told] == values
    raw = [cold.tokenizer.token_bytes(i) for i in output.token_ids]
    assert [bytes(token.bytes) for token in told] == raw
    for token, logprobs in zip(told, output.logprobs, strict=True):
        likeliest = sorted(logprobs.values(), reverse=True)[:top]
        assert [other.logprob for other in token.top_logprobs] == likeliest


def test_without_logprobs_there_are_none(client):
    assert chat(client).choices[0].logprobs is None


def test_tools_go_to_the_template_and_what_it_refuses_is_told(server):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    status, reply = server.post("/v1/chat/completions", messages=ASK, tools=[tool], max_tokens=2)
    assert status in (200, 400)
    system_last = [*ASK, {"role": "assistant", "content": "x"}, {"role": "tool", "content": "y"}]
    template = ChatTemplate.from_directory(BUILTIN_MODEL_DIR)
    try:
        template.render(system_last)
    except ValueError as error:
        status, reply = server.post("/v1/chat/completions", messages=system_last)
        assert status == 400 and reply["error"]["message"] == str(error)


def test_every_turn_resumes_within_a_stride_of_the_history_before_it(server, client):
    messages, turns, salt = [], [], {"cache_salt": next(salts)}
    for turn in range(4):
        messages.append({"role": "user", "content": f"{FACTS} Turn {turn}: where does Ada live?"})
        answer = chat(client, messages, warmstate=salt)
        turns.append((answer.warmstate["boundary"], answer.usage.prompt_tokens))
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        server.assert_idle()
    for (_, history), (boundary, _) in itertools.pairwise(turns):
        assert history - 64 <= boundary


def test_idle_prefill_is_no_request_of_anybody(server, client):
    server.assert_idle()
    before = server.stats()
    chat(client, warmstate={"cache_salt": next(salts)})

    def idle():
        return server.stats()["engine"]["tokens_prefilled_idle"]

    eventually(lambda: idle() > before["engine"]["tokens_prefilled_idle"])
    after = server.stats()
    assert after["engine"]["queries"] == before["engine"]["queries"] + 1
    assert not any(record["request_id"].startswith("next-") for record in after["recent"])


@pytest.mark.parametrize("exact", [True, False])
def test_idle_prefill_follows_exact_chats_alone(server, client, exact):
    server.assert_idle()
    before = server.stats()["engine"]["tokens_prefilled_idle"]
    chat(client, warmstate={"cache_salt": next(salts), "exact": exact})
    if exact:
        eventually(lambda: server.stats()["engine"]["tokens_prefilled_idle"] > before)
    else:
        server.assert_idle()
        assert server.stats()["engine"]["tokens_prefilled_idle"] == before


def test_an_inexact_conversation_reuses_its_answers_and_says_so(client):
    salt = next(salts)
    messages = list(ASK)
    extra = {"cache_salt": salt, "exact": False}
    fields = {"max_tokens": 100, "extra_body": {"warmstate": extra, "ignore_eos": True}}
    first = client.chat.completions.create(model=NAME, messages=messages, temperature=0, **fields)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "And Ada?"}]
    second = client.chat.completions.create(model=NAME, messages=messages, temperature=0, **fields)
    assert first.warmstate["exact"] is True
    assert second.warmstate["boundary"] > 0


def test_idle_prefill_can_be_switched_off():
    with RunningServer(idle_prefill=False) as server:
        chat(server.client())
        server.assert_idle()
        assert server.stats()["engine"]["tokens_prefilled_idle"] == 0


def test_nothing_is_prefilled_for_later_where_nothing_is_kept():
    with RunningServer(config={"enable_prefix_caching": False}) as server:
        chat(server.client())
        server.assert_idle()
        assert server.stats()["engine"]["tokens_prefilled_idle"] == 0


def test_the_usage_so_far_is_in_every_event_if_that_is_asked_for(client):
    """`stream_options.continuous_usage_stats`, as vLLM's clients send it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = list(chat(client, stream=True, stream_options=options))
    counts = [event.usage.completion_tokens for event in events]
    assert counts == sorted(counts) and counts[-1] == counts[-2] > 0
    assert len({event.usage.prompt_tokens for event in events}) == 1
