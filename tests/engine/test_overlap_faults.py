"""Steps that are prepared ahead, when something goes wrong beside a token that is not there."""

import gc
import math
import threading
import weakref

import pytest
import torch

from engine import SamplingParams
from engine.stream import InlineStream, ThreadStream
from tests.engine.test_overlap import (
    LONG,
    PROMPTS,
    STREAMS,
    assert_nothing_is_held,
    finish,
    greedy,
    oracle,
)
from tests.oracle import expected_output


def drawn(max_tokens):
    """The oracle's logits have one 1.0 each: as cold as this its token is always drawn."""
    return SamplingParams(temperature=1e-3, seed=1, max_tokens=max_tokens)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("params", [greedy, drawn])
@pytest.mark.parametrize("when", range(5))
def test_logits_that_are_not_finite_end_one_request_where_another_one_is_drawn(
    stream, params, when
):
    """All rows are read before the next step is issued, and one of them has got no token."""
    llm = oracle(stream, max_num_batched_tokens=512)
    forward, calls = llm.worker.model.forward, iter(range(1000))

    def spoiling(inputs, pool, kv_cache):
        logits = forward(inputs, pool, kv_cache)
        if next(calls) == when:
            logits[0] = math.nan
        return logits

    llm.worker.model.forward = spoiling
    for name, each in (("bad", params), ("good", drawn)):
        llm.add_request(PROMPTS["a" if name == "bad" else "b"], each(8), request_id=name)
    done = finish(llm)
    assert done["bad"].finish_reason == "error"
    assert done["bad"].token_ids == expected_output(PROMPTS["a"], 8)[:when]
    assert done["good"].token_ids == expected_output(PROMPTS["b"], 8)
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("params", [greedy, drawn])
@pytest.mark.parametrize("when", range(8))
def test_an_abort_inside_a_step_leaves_no_state_of_a_token_that_was_not_taken_in(
    stream, params, when
):
    """trap 19: the fifth step computes with the 128th token, whose state would be kept."""
    llm = oracle(stream)
    issue, calls = llm.worker.issue, iter(range(100))

    def aborting(batch, before):
        if next(calls) == when:
            llm.abort("a")
        return issue(batch, before)

    llm.worker.issue = aborting
    llm.add_request(LONG[:124], params(20), request_id="a", exact=False)
    llm.add_request(LONG[:70], params(20), request_id="b", exact=False)
    done = finish(llm)
    assert done["a"].finish_reason == "abort"
    assert done["b"].token_ids == expected_output(LONG[:70], 20)
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("stream", STREAMS)
def test_a_step_that_only_reads_tokens_has_restored_nothing(stream):
    llm = oracle(stream, max_num_batched_tokens=512)
    restored = []
    for _ in range(2):
        llm.add_request(PROMPTS["a"], greedy(1))
        while llm.has_unfinished():
            llm.step()
            restored.append(llm.last_restore_seconds is not None)
    assert restored == [False, False, True, False]


@pytest.mark.parametrize("length", [1, 3])
def test_an_interrupt_while_a_step_is_launched_is_told_at_once(length):
    """Not by the next call, which may come an hour later, or never."""
    llm = oracle(InlineStream)
    llm.add_request(PROMPTS["c"], greedy(length), request_id="c")
    forward = llm.worker.model.forward

    def interrupted(*args):
        llm.worker.model.forward = forward
        raise KeyboardInterrupt

    llm.worker.model.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    assert finish(llm)["c"].token_ids == expected_output(PROMPTS["c"], length)
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("overlap", [False, True])
def test_generate_may_be_called_again_after_an_interrupt_between_two_lines(overlap):
    """The step's batch is in flight then, and nobody but `generate` knows of its requests."""
    llm = oracle(InlineStream, overlap=overlap)
    whole, calls = llm._loop._whole, iter(range(1000))

    def interrupted():
        if next(calls) == 1:  # the first is for the schedule
            raise KeyboardInterrupt
        return whole()

    llm._loop._whole = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS["c"], greedy(3))
    assert not llm.has_unfinished()
    [output] = llm.generate(PROMPTS["c"], greedy(3))
    assert output.token_ids == expected_output(PROMPTS["c"], 3)
    assert_nothing_is_held(llm)


def test_the_compute_thread_uses_as_many_threads_as_who_built_it():
    """OpenMP keeps the number for each thread, and bits depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert ThreadStream().submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


def test_an_engine_that_is_dropped_with_a_step_in_flight_goes_when_the_step_is_done():
    llm = oracle(ThreadStream)
    gate, forward = threading.Event(), llm.worker.model.forward

    def waiting(*args):
        assert gate.wait(timeout=30)
        return forward(*args)

    llm.worker.model.forward = waiting
    llm.add_request(LONG[:100], greedy(5))
    llm.step()
    worker, pool = weakref.ref(llm.worker), llm.worker.stream._pool
    [thread] = pool._threads
    del llm, pool
    gate.set()
    gc.collect()
    thread.join(timeout=30)
    assert not thread.is_alive() and worker() is None
