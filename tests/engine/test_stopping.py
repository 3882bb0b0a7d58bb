"""When a request ends, what its text is then, and what it says about the reason."""

import pytest

import engine.issued
from engine import SamplingParams
from engine.sampler import Choice
from tests.engine.real_model import assert_idle, make_engine, tokens

END = 256  # the model's own end token


def chosen(token_id):
    return Choice(token_id, None, None)


@pytest.fixture
def say(monkeypatch):
    """Make every request answer with the bytes of a text (or with ids), over and over."""

    def run(answer, *, llm=None, **params):
        ids = list(answer.encode()) if isinstance(answer, str) else list(answer)

        def scripted(seqs, *_):
            return [[chosen(ids[seq.num_generated % len(ids)])] for seq in seqs]

        monkeypatch.setattr(engine.issued, "sample", scripted)
        llm = llm or make_engine()
        params = {"max_tokens": len(ids)} | params
        [output] = llm.generate([tokens(0, 70)], SamplingParams(**params))
        assert_idle(llm)
        return output

    return run


def test_max_tokens_ends_a_request_with_reason_length(say):
    output = say("abcdefgh", max_tokens=5)
    assert (output.text, output.finish_reason) == ("abcde", "length")
    assert output.token_ids == list(b"abcde")


def test_the_model_length_ends_a_request_with_reason_length(say):
    output = say("abcdefgh", llm=make_engine(max_model_len=73), max_tokens=8)
    assert (output.text, output.finish_reason) == ("abc", "length")


def test_a_stop_string_is_cut_from_the_text_with_all_that_follows(say):
    output = say("hello world", stop="o w")
    assert (output.text, output.finish_reason) == ("hell", "stop")
    assert output.token_ids == list(b"hello w"), "the tokens are kept"


def test_a_stop_string_may_span_many_tokens_and_begin_anywhere(say):
    assert say("aaaaab", stop="aaab").text == "aa"
    assert say("xyz", stop="xyz").text == ""
    assert say("ab-ab-abc", stop="ab-abc").text == "ab-"


def test_the_first_occurrence_of_any_stop_string_wins(say):
    assert say("one two one", stop=("two", "one")).text == ""
    assert say("x-y-x-y", stop=("y", "-y")).text == "x"
    assert say("abcd", stop=("bcd", "c")).text == "ab"


def test_a_stop_string_in_characters_of_many_bytes_is_found(say):
    output = say("naïve 日本 🙂 end", stop="本")
    assert (output.text, output.finish_reason) == ("naïve 日", "stop")
    assert say("a🙂b", stop="🙂").text == "a"


def test_a_stop_string_that_never_comes_changes_nothing(say):
    output = say("hello", stop=("xyz", "ll0"))
    assert (output.text, output.finish_reason) == ("hello", "length")


def test_a_stop_string_on_the_last_token_counts_as_stop(say):
    output = say("hello", stop="lo")
    assert (output.text, output.finish_reason) == ("hel", "stop")


def test_a_stop_string_in_the_prompt_does_not_stop_the_answer(say, monkeypatch):
    monkeypatch.setattr(
        engine.issued, "sample", lambda seqs, *_: [[chosen(ord("z"))] for _ in seqs]
    )
    [output] = make_engine().generate("stop here", SamplingParams(stop="here", max_tokens=3))
    assert (output.text, output.finish_reason) == ("zzz", "length")


def test_bytes_without_a_character_are_replaced_at_the_end(say):
    assert say(b"ok\xf0\x9f").text == "ok�"
    assert say(b"a\xffb").text == "a�b"


def test_bytes_without_a_character_are_replaced_before_a_stop_token_too(say):
    output = say(b"ok\xf0\x9fB", stop_token_ids=(66,))
    assert output.text.startswith("ok�") and output.finish_reason == "stop"


def test_the_models_end_token_stops_and_is_kept(say):
    output = say([65, 66, END, 67], max_tokens=4)
    assert output.token_ids == [65, 66, END]
    assert output.finish_reason == "stop"


def test_the_models_end_token_can_be_ignored(say):
    output = say([65, END, 67, END], max_tokens=4, ignore_eos=True)
    assert output.token_ids == [65, END, 67, END]
    assert output.finish_reason == "length"


def test_a_stop_token_stops_even_where_the_end_token_is_ignored(say):
    output = say([65, END, 66, 67], stop_token_ids=(66, 300), ignore_eos=True, max_tokens=4)
    assert output.token_ids == [65, END, 66]
    assert output.finish_reason == "stop"


def test_a_stop_token_on_the_last_allowed_token_counts_as_stop(say):
    assert say([65, 66], stop_token_ids=[66], max_tokens=2).finish_reason == "stop"
    assert say([65, END], max_tokens=2).finish_reason == "stop"


def test_the_first_token_can_be_the_last(say):
    for params in ({"stop_token_ids": (65,)}, {"stop": "A"}, {"max_tokens": 1}):
        output = say([65, 66, 67], **params)
        assert output.token_ids == [65]


def test_ids_without_a_token_add_no_text(say):
    assert say([65, 400, 66]).text == "AB"


def test_stopped_requests_leave_the_others_running(monkeypatch):
    answers = {1: "ab.", 2: "abcd.", 3: "abcdefgh"}

    def scripted(seqs, *_):
        texts = [answers[seq.num_prompt_tokens] for seq in seqs]
        return [[chosen(ord(text[s.num_generated]))] for s, text in zip(seqs, texts, strict=True)]

    monkeypatch.setattr(engine.issued, "sample", scripted)
    llm = make_engine()
    outputs = llm.generate([[1], [1, 2], [1, 2, 3]], SamplingParams(stop=".", max_tokens=8))
    assert [output.text for output in outputs] == ["ab", "abcd", "abcdefgh"]
    assert [output.finish_reason for output in outputs] == ["stop", "stop", "length"]
    assert_idle(llm)
