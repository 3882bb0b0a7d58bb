"""The next turn of a conversation: where it resumes, at what price in bits, and why not later."""

import pytest
import torch

from engine import LLM, RequestOutput, SamplingParams
from engine.requests import grid_boundaries
from tests.engine.real_model import assert_idle, make_engine, tokens

POOLS = {"num_slots": 40, "num_blocks": 200}
GREEDY = SamplingParams(temperature=0, max_tokens=45, ignore_eos=True, return_logits=True)
PROMPT = tokens(0, 150)


def finish(
    llm: LLM, prompt: list[int], params: SamplingParams = GREEDY, **options
) -> RequestOutput:
    request_id = llm.add_request(prompt, params, **options)
    while llm.has_unfinished():
        for output in llm.step():
            if output.finished and output.request_id == request_id:
                last = output
        llm.scheduler.check()
    assert_idle(llm)
    return last


def next_prompt(first: RequestOutput) -> list[int]:
    return [*PROMPT, *first.token_ids, *tokens(3, 20)]


def cold(prompt: list[int]) -> RequestOutput:
    return finish(make_engine(enable_prefix_caching=False, owner="cold", **POOLS), prompt)


def assert_bits(output: RequestOutput, prompt: list[int]) -> None:
    reference = cold(prompt)
    assert output.token_ids == reference.token_ids
    for got, expected in zip(output.logits, reference.logits, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("restore", ["copy", "redirect"])
def test_an_exact_turn_resumes_at_the_end_of_the_prompt_before_it(restore: str):
    llm = make_engine(restore=restore, **POOLS)
    first = finish(llm, PROMPT, exact=False)
    second = finish(llm, next_prompt(first))
    assert (second.boundary, second.limit_reason) == (128, "decode_only")
    assert second.exact
    assert_bits(second, next_prompt(first))


@pytest.mark.parametrize("restore", ["copy", "redirect"])
def test_a_turn_that_is_not_exact_resumes_in_the_answer_and_says_so(restore: str):
    llm = make_engine(restore=restore, **POOLS)
    first = finish(llm, PROMPT, exact=False)
    assert first.exact  # it reused nothing
    second = finish(llm, next_prompt(first), exact=False)
    assert (second.boundary, second.limit_reason, second.exact) == (192, None, False)
    reference = cold(next_prompt(first))
    assert torch.allclose(second.logits[0], reference.logits[0], atol=1e-4)


def test_an_idle_prefill_of_the_answer_makes_the_next_turn_late_and_exact():
    """trap 30"""
    llm = make_engine(**POOLS)
    first = finish(llm, PROMPT)
    said = [*PROMPT, *first.token_ids]
    one = SamplingParams(temperature=0, max_tokens=1)
    finish(llm, said, one, background=True, save_points=[len(said)])
    second = finish(llm, next_prompt(first))
    assert (second.boundary, second.limit_reason, second.exact) == (192, None, True)
    assert_bits(second, next_prompt(first))


def test_a_save_point_serves_the_prompts_that_go_on_from_it():
    llm = make_engine(**POOLS)
    finish(llm, tokens(0, 300), save_points=[130, 5_000])
    branch = [*tokens(0, 130), *tokens(9, 60)]
    second = finish(llm, branch)
    assert second.boundary == 128
    assert_bits(second, branch)


def test_a_save_point_is_the_boundary_at_or_below_it():
    assert grid_boundaries([0, 63, 64, 130, 5_000], 64) == {0, 64, 128, 4_992}
    assert grid_boundaries((), 64) == set()


def test_the_requests_of_a_step_that_failed_are_named(monkeypatch):
    llm = make_engine(max_num_seqs=1, num_slots=10, num_blocks=50)
    llm.add_request(PROMPT, GREEDY, request_id="in the step")
    llm.add_request(PROMPT, GREEDY, request_id="waiting")

    def broken(*_args):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(llm.worker.model, "forward", broken)
        with pytest.raises(RuntimeError, match="the device is gone"):
            llm.step()
    assert llm.failed_request_ids == ("in the step",)
    llm.step()
    assert llm.failed_request_ids == ()


def test_the_time_of_a_restore_is_reported_for_the_step_that_had_one():
    llm = make_engine(**POOLS)
    one = SamplingParams(temperature=0, max_tokens=1)
    llm.add_request(PROMPT, one)
    llm.step()
    assert llm.last_restore_seconds is None
    llm.add_request(PROMPT, one)
    llm.step()
    assert llm.last_restore_seconds > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exact": 1}, "exact=1: must be a bool"),
        ({"background": None}, "background=None: must be a bool"),
        ({"save_points": [64, -1]}, "save_points: -1 is no token count"),
        ({"save_points": [True]}, "save_points: True is no token count"),
        ({"save_points": "64"}, "save_points are a list of token counts, got str"),
    ],
)
def test_a_wrong_option_is_refused_and_nothing_is_queued(options: dict, message: str):
    llm = make_engine(**POOLS)
    with pytest.raises(ValueError, match=message):
        llm.add_request(PROMPT, GREEDY, **options)
    assert not llm.has_unfinished()
