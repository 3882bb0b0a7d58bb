"""/v1/completions, as the openai client sees it, against the engine without a server or a cache."""

import itertools
import math

import pytest

from engine import SamplingParams
from tests.engine.server_fixture import FACTS, NAME, RunningServer, cold_llm

QUESTION = " Where does Bob live?"
ASKED = FACTS + "Ada"  # the model goes on with a sentence
salts = map(str, itertools.count())


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "overlap"])
def server(request):
    with RunningServer(config={"overlap": request.param}) as running:
        yield running
        running.assert_idle()


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def cold():
    return cold_llm()


def complete(client, prompt, **fields):
    extra = {name: fields.pop(name) for name in list(fields) if name in EXTRA}
    return client.completions.create(model=NAME, prompt=prompt, extra_body=extra, **fields)


EXTRA = {"top_k", "ignore_eos", "stop_token_ids", "warmstate"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_is_that_of_the_engine_cold_and_warm(client, cold, temperature):
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=24, ignore_eos=True)
    [expected] = cold.generate(FACTS + QUESTION, params)
    fields = {"temperature": temperature, "seed": 7, "max_tokens": 24, "ignore_eos": True}
    for _ in range(3):
        answer = complete(client, FACTS + QUESTION, **fields)
        assert answer.choices[0].text == expected.text
        assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


def test_a_stream_joins_to_the_same_text_and_ends_with_its_reason(client, cold):
    [expected] = cold.generate(FACTS + QUESTION, SamplingParams(temperature=0, max_tokens=24))
    stream = complete(client, FACTS + QUESTION, temperature=0, max_tokens=24, stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == expected.text
    reasons = [chunk.finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [expected.finish_reason]


def test_sixteen_tokens_are_the_default(client):
    answer = complete(client, FACTS, ignore_eos=True)
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16


@pytest.mark.parametrize("as_ids", [False, True])
def test_several_prompts_are_answered_in_their_order(client, cold, as_ids):
    texts = [FACTS + QUESTION, "Bob", FACTS + " Where does Ada live?"]
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = [output.text for output in cold.generate(texts, params)]
    prompts = [cold.tokenizer.encode(text) for text in texts] if as_ids else texts
    answer = complete(client, prompts, temperature=0, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage.prompt_tokens == sum(len(cold.tokenizer.encode(text)) for text in texts)


def test_a_prompt_of_token_ids_is_taken_as_it_is(client, cold):
    ids = cold.tokenizer.encode(FACTS)
    [expected] = cold.generate([ids], SamplingParams(temperature=0, max_tokens=8))
    assert complete(client, ids, temperature=0, max_tokens=8).choices[0].text == expected.text


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_use_seed_plus_index_and_reuse_the_first_ones_prompt(client, cold, stream):
    salt = {"cache_salt": next(salts)}
    fields = {"n": 3, "seed": 5, "max_tokens": 12, "ignore_eos": True, "warmstate": salt}
    if stream:
        options = {"include_usage": True}
        events = list(complete(client, FACTS, stream=True, stream_options=options, **fields))
        texts, usage = ["", "", ""], events[-1].usage
        for event in events[:-1]:
            texts[event.choices[0].index] += event.choices[0].text
        facts = [event.warmstate for event in events[:-1] if event.choices[0].finish_reason]
        assert sorted(each["boundary"] > 0 for each in facts) == [False, True, True]
    else:
        answer = complete(client, FACTS, **fields)
        texts, usage = [choice.text for choice in answer.choices], answer.usage
    for choice, text in enumerate(texts):
        params = SamplingParams(seed=5 + choice, max_tokens=12, ignore_eos=True)
        assert text == cold.generate(FACTS, params)[0].text
    assert usage.prompt_tokens == len(cold.tokenizer.encode(FACTS))
    assert usage.completion_tokens == 36
    assert usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("stop", [" in", ["xyz", " in"]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text(client, cold, stop, stream):
    params = SamplingParams(temperature=0, max_tokens=24)
    [whole] = cold.generate(ASKED, params)
    assert " in" in whole.text
    answer = complete(client, ASKED, temperature=0, max_tokens=24, stop=stop, stream=stream)
    pieces = answer if stream else [answer]
    text = "".join(piece.choices[0].text for piece in pieces)
    assert text == whole.text[: whole.text.index(" in")]


def test_a_stop_token_ends_the_answer(client, cold):
    [whole] = cold.generate(ASKED, SamplingParams(temperature=0, max_tokens=8))
    fields = {"temperature": 0, "max_tokens": 8, "stop_token_ids": [whole.token_ids[1]]}
    answer = complete(client, ASKED, **fields)
    assert answer.usage.completion_tokens == 2
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-9}, {"top_p": 5e-324}])
def test_the_narrowest_choice_is_greedy(client, cold, narrow):
    [greedy] = cold.generate(FACTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    answer = complete(client, FACTS, temperature=3, max_tokens=12, ignore_eos=True, **narrow)
    assert answer.choices[0].text == greedy.text


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_engine(client, cold, stream):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    [expected] = cold.generate(ASKED, params)
    fields = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 2}
    answer = complete(client, ASKED, stream=stream, **fields)
    pieces = list(answer) if stream else [answer]
    told = [piece.choices[0].logprobs for piece in pieces]
    tokens = [token for each in told for token in each.tokens]
    values = [value for each in told for value in each.token_logprobs]
    tops = [top for each in told for top in each.top_logprobs]
    offsets = [offset for each in told for offset in each.text_offset]
    assert tokens == [cold.tokenizer.decode([i]) for i in expected.token_ids]
    assert values == [top[i] for i, top in zip(expected.token_ids, expected.logprobs, strict=True)]
    assert [len(top) for top in tops] == [2] * 6
    assert all(
        expected.text[offset:].startswith(token)
        for offset, token in zip(offsets, tokens, strict=True)
    )
    assert offsets[0] == 0 and offsets == sorted(set(offsets))
    assert all(math.isfinite(value) for value in values)


def test_bytes_that_are_no_text_are_spelt_out(client, cold):
    half = cold.tokenizer.encode("☃")[:1]
    [expected] = cold.generate([half], SamplingParams(temperature=0, max_tokens=1, logprobs=20))
    answer = complete(client, half, temperature=0, max_tokens=1, logprobs=20)
    spelt = {
        cold.tokenizer.token_bytes(i).decode()
        if _is_text(cold.tokenizer.token_bytes(i))
        else "bytes:" + "".join(f"\\x{b:02x}" for b in cold.tokenizer.token_bytes(i))
        for i in expected.logprobs[0]
        if cold.tokenizer.token_bytes(i)
    }
    assert spelt <= answer.choices[0].logprobs.top_logprobs[0].keys()


def _is_text(raw):
    try:
        return bool(raw.decode())
    except UnicodeDecodeError:
        return False


def test_the_second_request_tells_what_it_reused(server, client):
    salt = {"cache_salt": next(salts)}
    first = complete(client, FACTS + QUESTION, warmstate=salt)
    second = complete(client, FACTS + QUESTION, warmstate=salt)
    assert first.warmstate["boundary"] == 0 and first.warmstate["miss_reason"] is not None
    assert second.warmstate["boundary"] == second.usage.prompt_tokens_details.cached_tokens > 0
    assert second.warmstate["miss_reason"] is None and second.warmstate["exact"] is True
    assert second.warmstate["request_id"] == second.id
    record = server.get(f"/requests/{second.id}")
    assert record["boundary"] == second.warmstate["boundary"]
    assert record["ttft_ms"] == second.warmstate["ttft_ms"] > 0


def test_another_salt_shares_nothing(client):
    complete(client, FACTS + QUESTION)
    other = complete(client, FACTS + QUESTION, warmstate={"cache_salt": next(salts)})
    assert other.usage.prompt_tokens_details.cached_tokens == 0
    assert other.warmstate["miss_reason"] == "namespace"


def test_facts_come_with_the_last_event_only(client):
    stream = list(complete(client, FACTS, max_tokens=4, ignore_eos=True, stream=True))
    assert [hasattr(event, "warmstate") for event in stream] == [False] * (len(stream) - 1) + [True]


def test_usage_comes_in_a_stream_only_when_it_is_asked_for(client):
    fields = {"max_tokens": 4, "ignore_eos": True, "stream": True}
    assert all(event.usage is None for event in complete(client, FACTS, **fields))
    *_, last = complete(client, FACTS, stream_options={"include_usage": True}, **fields)
    assert last.choices == [] and last.usage.completion_tokens == 4


def test_the_model_is_listed_under_its_name(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "warmstate"
