"""An interrupt or an error at any line of a step: nothing is lost or leaks, no token changes."""

import sys

import pytest

from engine import LLM, EngineConfig, SamplingParams
from engine.answer_text import AnswerText
from tests.engine.real_model import make_engine, tokens
from tests.oracle import OracleModel, expected_output

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
PROMPTS = [[7] * 200, [7] * 130 + [3] * 40, [2] * 66]
ENGINE_FILES = ("/engine/", "/cache/")


def engine(**options):
    config = {"num_slots": 12, "num_blocks": 40, "max_num_seqs": 3, "checkpoint_every": 64}
    return LLM.from_model(OracleModel(), EngineConfig(**(config | options)))


def start(llm):
    for i, prompt in enumerate(PROMPTS):
        llm.add_request(prompt, GREEDY, request_id=str(i))


def finish(llm):
    done = {}
    for _ in range(200):
        for output in llm.step():
            if output.finished:
                done[output.request_id] = output.token_ids
        llm.scheduler.check()
        if not llm.has_unfinished() and not llm._requests:
            return done
    raise AssertionError("no progress")


EXPECTED = {str(i): expected_output(prompt, 4) for i, prompt in enumerate(PROMPTS)}


def interrupt_at(llm, event_number):
    """Run one step that is interrupted at the nth line of the engine; False if it has fewer."""
    seen = 0

    def trace(frame, event, arg):
        nonlocal seen
        if not any(part in frame.f_code.co_filename for part in ENGINE_FILES):
            return None
        if event == "line":
            seen += 1
            if seen == event_number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        llm.step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_an_interrupt_at_any_line_of_a_step_changes_no_token_and_leaks_nothing(steps_before):
    number, stride = 1, 3
    while True:
        llm = engine(max_num_batched_tokens=192)
        start(llm)
        done = {}
        for _ in range(steps_before):
            done |= {o.request_id: o.token_ids for o in llm.step() if o.finished}
        if not interrupt_at(llm, number):
            break
        done |= finish(llm)
        assert done == EXPECTED, f"interrupted at line event {number}"
        stats = llm.stats()
        assert stats.blocks_in_use == stats.slots_live == 0
        number += stride
    assert number > 100


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("stops", [False, True])
def test_an_interrupt_in_the_last_step_of_an_answer_makes_it_no_longer(stops, drafts):
    """All lines of the step in which it ends. The output itself may go down with the call."""
    want = expected_output(PROMPTS[2], 6)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=40 if stops else 6,
        stop_token_ids=(want[-1],) if stops else (),
    )
    number = 1
    while True:
        llm = engine(num_slots=24, num_speculative_tokens=drafts)
        llm.add_request(PROMPTS[2], params, request_id="r")
        [seq] = llm._requests.values()
        while seq.num_generated + 1 + drafts < 6:
            llm.step()
        interrupted = interrupt_at(llm, number)
        done = {}
        while llm.has_unfinished():
            done |= {o.request_id: o for o in llm.step() if o.finished}
            llm.scheduler.check()
        assert seq.generated_token_ids == want, f"interrupted at line event {number}"
        assert seq.finish_reason == ("stop" if stops else "length")
        assert all(output.token_ids == want for output in done.values())
        assert llm.stats().blocks_in_use == llm.stats().slots_live == 0
        if not interrupted:
            break
        number += 3
    assert number > 100


def test_an_answer_that_ends_in_an_interrupted_step_keeps_its_text(monkeypatch):
    """Its last token holds bytes back, which become U+FFFD."""
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=5, ignore_eos=True)
    [expected] = make_engine().generate([tokens(0, 70)], params)
    llm = make_engine()
    llm.add_request(tokens(0, 70), params)
    commit = llm.scheduler.commit

    def interrupted(*args, **options):
        if next(iter(llm._requests.values())).end_reason is not None:
            monkeypatch.setattr(llm.scheduler, "commit", commit)
            raise KeyboardInterrupt
        commit(*args, **options)

    monkeypatch.setattr(llm.scheduler, "commit", interrupted)
    outputs = []
    while llm.has_unfinished():
        try:
            outputs += llm.step()
        except KeyboardInterrupt:
            outputs.append("interrupted")
    assert "interrupted" in outputs
    assert (outputs[-1].token_ids, outputs[-1].text) == (expected.token_ids, expected.text)
    assert outputs[-1].finish_reason == "length"


def test_a_schedule_that_raises_leaves_nothing_half_applied(monkeypatch):
    llm = engine()
    start(llm)
    admit = llm.scheduler._admit

    def failing(*args):
        admit(*args)
        monkeypatch.setattr(llm.scheduler, "_admit", admit)
        raise RuntimeError("after the rows were laid out")

    monkeypatch.setattr(llm.scheduler, "_admit", failing)
    with pytest.raises(RuntimeError):
        llm.step()
    llm.scheduler.check()
    assert finish(llm) == EXPECTED


def test_a_request_that_ended_in_an_interrupted_step_is_still_told(monkeypatch):
    llm = engine()
    llm.add_request([1] * 20, SamplingParams(temperature=0.0, max_tokens=1), request_id="short")
    outputs = llm._outputs

    def interrupted(rows):
        monkeypatch.setattr(llm, "_outputs", outputs)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "_outputs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    [output] = llm.step()
    assert output.finished and output.token_ids == expected_output([1] * 20, 1)


class InfiniteLogits(OracleModel):
    """Gives +inf at position 6 of any request."""

    def forward(self, inputs, pool, kv_cache):
        logits = super().forward(inputs, pool, kv_cache)
        for i, row in enumerate(inputs.logit_rows.tolist()):
            if inputs.positions[row] == 6:
                logits[i, 5] = float("inf")
        return logits


def test_infinite_logits_end_only_their_request():
    config = EngineConfig(num_slots=20, num_blocks=200)
    llm = LLM.from_model(InfiniteLogits(), config)
    llm.add_request([1] * 7, SamplingParams(temperature=1.0), request_id="bad")
    llm.add_request([2] * 20, GREEDY, request_id="good")
    done = {o.request_id: o for _ in range(10) for o in llm.step() if o.finished}
    assert done["bad"].finish_reason == "error"
    assert done["good"].token_ids == expected_output([2] * 20, 4)


def test_an_interrupted_answer_has_the_text_reports_and_end_of_an_undisturbed_one(monkeypatch):
    params = SamplingParams(
        temperature=1.5, seed=3, max_tokens=12, logprobs=2, stop="zz", ignore_eos=True
    )
    prompt = tokens(0, 70)
    [expected] = make_engine().generate([prompt], params)
    llm = make_engine()
    llm.add_request(prompt, params)
    append, calls = AnswerText.append, []

    def interrupted(answer, token_id, *, last):
        append(answer, token_id, last=last)
        calls.append(token_id)
        if len(calls) in (3, 7):
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(AnswerText, "append", interrupted)
    outputs = []
    while llm.has_unfinished():
        try:
            outputs += llm.step()
        except KeyboardInterrupt:
            llm.scheduler.check()
    assert len(calls) > 12
    final = outputs[-1]
    assert (final.token_ids, final.text) == (expected.token_ids, expected.text)
    assert final.logprobs == expected.logprobs and final.finish_reason == "length"
