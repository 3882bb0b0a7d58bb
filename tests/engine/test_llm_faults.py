"""Forwards that raise, restores that fail, aborts in the middle of a step: nothing leaks, nothing
is wrong afterwards."""

from dataclasses import replace

import pytest
import torch

import engine.issued
from engine import SamplingParams
from tests.engine.real_model import (
    GREEDY,
    Arrival,
    assert_cold_bits,
    assert_idle,
    drive,
    fork,
    make_engine,
    poison_unowned,
    tokens,
)

POOLS = {"num_slots": 30, "num_blocks": 100, "checkpoint_every": 64}


def finish(llm):
    """Step to the end; final outputs by request."""
    outputs = {}
    while llm.has_unfinished():
        outputs |= {o.request_id: o for o in llm.step() if o.finished}
        llm.scheduler.check()
        poison_unowned(llm)
    assert_idle(llm)
    return outputs


def fail_once(llm, monkeypatch, error=RuntimeError):
    """The next forward spoils all that its step writes, then raises."""
    forward = llm.worker.model.forward

    def failing(inputs, pool, kv_cache):
        monkeypatch.setattr(llm.worker.model, "forward", forward)
        written = [inputs.prefill_slots.write, inputs.decode_slots.write, inputs.snapshot_slots]
        if pool is not None:
            for slots in written:
                pool.arena[[slot for slot in slots.host if slot > 0]] = 255
        kv_cache.flatten(2, 3)[:, :, inputs.kv_indices.tensor] = torch.nan
        raise error("the device is gone")

    monkeypatch.setattr(llm.worker.model, "forward", failing)


@pytest.mark.parametrize("kind", ["float32", "attention", "recurrent"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_a_forward_that_raises_is_raised_again_and_the_requests_start_anew(
    steps, kind, monkeypatch
):
    """At the first prefill, in the middle of prefills, while some decode."""
    llm = make_engine(kind, max_num_batched_tokens=128, **POOLS)
    prompts = {"a": fork(64, 9, branch=1), "b": fork(64, 150, branch=2), "c": tokens(5, 200)}
    for request_id, prompt in prompts.items():
        llm.add_request(prompt, replace(GREEDY, max_tokens=8), request_id=request_id)
    for _ in range(steps):
        llm.step()
    fail_once(llm, monkeypatch)
    with pytest.raises(RuntimeError, match="the device is gone"):
        llm.step()
    llm.scheduler.check()
    poison_unowned(llm)
    outputs = finish(llm)
    assert outputs.keys() == prompts.keys()
    for output in outputs.values():
        assert len(output.token_ids) == 8
        assert_cold_bits(kind, output)
    assert llm.stats().queries == 3


def test_a_forward_that_raises_leaves_nothing_in_use(monkeypatch):
    llm = make_engine(**POOLS)
    llm.add_request(fork(64, 9), GREEDY)
    fail_once(llm, monkeypatch)
    with pytest.raises(RuntimeError):
        llm.step()
    stats = llm.stats()
    assert (stats.slots_live, stats.blocks_in_use, stats.requests_running) == (0, 0, 0)
    assert (stats.slots_checkpoint, stats.blocks_cached, stats.requests_waiting) == (0, 0, 1)
    assert len(finish(llm)) == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_generate_aborts_its_requests_when_a_step_fails(error, monkeypatch):
    llm = make_engine(**POOLS)
    fail_once(llm, monkeypatch, error)
    with pytest.raises(error):
        llm.generate([fork(64, 9), tokens(5, 200)], GREEDY)
    assert_idle(llm)
    assert llm.stats().blocks_cached == llm.stats().slots_checkpoint == 0
    [output] = drive(llm, [Arrival(fork(64, 9))])
    assert_cold_bits("float32", output)


def test_a_hit_whose_step_fails_is_counted_once(monkeypatch):
    """Three tries: the same 128 tokens are not reused three times over."""
    llm = make_engine(**POOLS)
    drive(llm, [Arrival(fork(128, 9, branch=1))])
    request_id = llm.add_request(fork(128, 30, branch=2), GREEDY)
    for _ in range(2):
        fail_once(llm, monkeypatch)
        with pytest.raises(RuntimeError):
            llm.step()
    output = finish(llm)[request_id]
    assert_cold_bits("float32", output)
    assert output.num_cached_tokens == output.boundary == 128
    assert llm.stats().tokens_reused == 128


def test_a_hit_that_is_gone_when_its_failed_step_is_tried_again_is_a_miss(monkeypatch):
    llm = make_engine(max_num_seqs=1, num_slots=3, num_blocks=100)
    drive(llm, [Arrival(fork(128, 9, branch=1))])
    request_id = llm.add_request(fork(128, 30, branch=2), GREEDY)
    fail_once(llm, monkeypatch)
    with pytest.raises(RuntimeError):
        llm.step()
    linear = llm.manager.linear
    for slot in linear.cache.slot_ids():
        linear.quarantine(slot)
    output = finish(llm)[request_id]
    assert_cold_bits("float32", output)
    assert (output.num_cached_tokens, output.boundary) == (0, 0)
    assert output.miss_reason == "evicted"
    assert llm.stats().hits == 0


@pytest.mark.parametrize("failures", [1, 2])
def test_a_sampler_that_raises_harms_no_request(failures, monkeypatch):
    llm = make_engine(**POOLS)
    prompts = [fork(64, 9, branch=i) for i in range(3)]
    request_ids = [llm.add_request(prompt, GREEDY) for prompt in prompts]
    sample = engine.issued.sample

    def failing(seqs, *rest):
        nonlocal failures
        if failures and request_ids[1] in {seq.request_id for seq in seqs}:
            failures -= 1
            raise RuntimeError("no token")
        return sample(seqs, *rest)

    monkeypatch.setattr(engine.issued, "sample", failing)
    while failures:
        with pytest.raises(RuntimeError, match="no token"):
            llm.step()
        llm.scheduler.check()
    outputs = finish(llm)
    for request_id in request_ids:
        assert len(outputs[request_id].token_ids) == 3
        assert_cold_bits("float32", outputs[request_id])


def test_a_tiny_temperature_does_not_break_the_requests_beside_it():
    llm = make_engine()
    params = [GREEDY, SamplingParams(temperature=1e-40, max_tokens=3), GREEDY]
    prompts = [tokens(i, 20) for i in range(3)]
    outputs = llm.generate(prompts, params)
    assert_cold_bits("float32", outputs[0])
    assert_cold_bits("float32", outputs[2])


def spoil_once(llm, monkeypatch, row):
    """The next forward gives NaN logits in one row and NaN in all that this row's step saved."""
    forward = llm.worker.model.forward

    def spoiling(inputs, pool, kv_cache):
        monkeypatch.setattr(llm.worker.model, "forward", forward)
        logits = forward(inputs, pool, kv_cache)
        logits[row] = torch.nan
        if len(logits) == 1:
            for slots in (inputs.prefill_slots.write, inputs.snapshot_slots):
                pool.arena[[slot for slot in slots.host if slot > 0]] = 255
        return logits

    monkeypatch.setattr(llm.worker.model, "forward", spoiling)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_request_with_nan_logits_ends_with_an_error_and_the_others_go_on(bad, monkeypatch):
    llm = make_engine(**POOLS)
    spoil_once(llm, monkeypatch, bad)
    outputs = llm.generate([tokens(i, 70) for i in range(3)], GREEDY)
    assert_idle(llm)
    for i, output in enumerate(outputs):
        assert output.finish_reason == ("error" if i == bad else "length")
        assert len(output.token_ids) == (0 if i == bad else 3)
        assert_cold_bits("float32", output)


def test_what_a_request_with_nan_logits_saved_is_not_reused(monkeypatch):
    """One bad step must not fail every later request with that prefix."""
    llm = make_engine(**POOLS)
    spoil_once(llm, monkeypatch, 0)
    [output] = llm.generate([fork(128, 9)], GREEDY)
    assert output.finish_reason == "error"
    for branch in (2, 3):
        [output] = llm.generate([fork(128, 9, branch=branch)], GREEDY)
        assert output.finish_reason == "length"
        assert_cold_bits("float32", output)


# ---- aborts inside a step


@pytest.mark.parametrize("when", ["before the forward", "after the forward"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_abort_during_a_step_takes_effect_at_its_end(steps, when, monkeypatch):
    llm = make_engine(max_num_batched_tokens=128, **POOLS)
    for request_id, prompt in (("a", fork(128, 100, branch=1)), ("b", tokens(5, 20))):
        llm.add_request(prompt, replace(GREEDY, max_tokens=6), request_id=request_id)
    for _ in range(steps):
        llm.step()
    issue = llm.worker.issue

    def aborting(batch, *before):
        if when == "before the forward":
            assert llm.abort("a").finish_reason is None
        result = issue(batch, *before)
        if when == "after the forward":
            assert llm.abort("a").finish_reason is None
            assert llm.abort("a").finish_reason is None
        return result

    monkeypatch.setattr(llm.worker, "issue", aborting)
    ended = [output for output in llm.step() if output.finished]
    assert [(o.request_id, o.finish_reason) for o in ended] == [("a", "abort")]
    assert len(ended[0].token_ids) == max(0, steps - 1)
    llm.scheduler.check()
    poison_unowned(llm)
    assert llm.abort("a") is None
    monkeypatch.setattr(llm.worker, "issue", issue)
    outputs = finish(llm)
    assert outputs.keys() == {"b"}
    assert_cold_bits("float32", outputs["b"])
    [after] = drive(llm, [Arrival(fork(128, 7, branch=2))])
    assert after.boundary == 128
    assert_cold_bits("float32", after)


def test_an_abort_during_a_step_that_fails_ends_the_request(monkeypatch):
    llm = make_engine(**POOLS)
    llm.add_request(tokens(0, 70), GREEDY, request_id="a")
    llm.add_request(tokens(1, 70), GREEDY, request_id="b")
    fail_once(llm, monkeypatch)
    failing = llm.worker.model.forward

    def aborting(*inputs):
        llm.abort("a")
        return failing(*inputs)

    monkeypatch.setattr(llm.worker.model, "forward", aborting)
    with pytest.raises(RuntimeError):
        llm.step()
    assert llm.abort("a").finish_reason == "abort"
    assert llm.abort("a") is None
    outputs = finish(llm)
    assert outputs.keys() == {"b"}
    assert_cold_bits("float32", outputs["b"])
