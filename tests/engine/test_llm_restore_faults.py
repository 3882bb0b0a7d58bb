"""A restore that fails costs time, never the answer."""

import logging
from dataclasses import replace

import pytest

from cache.hashing import Namespace
from cache.ops import NO_SLOT
from cache.state_pool import StatePool
from engine.sequence import Sequence
from tests.engine.real_model import (
    GREEDY,
    Arrival,
    assert_cold_bits,
    assert_idle,
    drive,
    fork,
    make_engine,
    tokens,
)

POOLS = {"num_slots": 40, "num_blocks": 100, "checkpoint_every": 64}


def break_copies(monkeypatch, is_bad):
    """Copies of a bad (source, destination) pair raise, after they spoiled all destinations."""
    copy = StatePool.copy
    broken = []

    def failing(pool, sources, destinations):
        bad = [pair for pair in zip(sources, destinations, strict=True) if is_bad(*pair)]
        if bad:
            broken.extend(bad)
            pool.arena[destinations] = 255
            raise RuntimeError("copy failed")
        copy(pool, sources, destinations)

    monkeypatch.setattr(StatePool, "copy", failing)
    return broken


def warmed(families=4, **config):
    """An engine with a checkpoint at 128 of each family, and four prompts that will hit."""
    llm = make_engine(restore="copy", max_num_batched_tokens=2048, **POOLS | config)
    drive(llm, [Arrival(fork(128, 9, family=f)) for f in range(families)])
    return llm, [fork(128, 20 + f, family=f, branch=2) for f in range(families)]


def checkpoint_slot(llm, prompt, boundary):
    """The slot that holds the prompt's checkpoint."""
    namespace = Namespace(llm.model_config.fingerprint)
    seq = Sequence("probe", prompt, GREEDY, namespace=namespace)
    seq.update_linear_state_hashes(llm.manager.linear.domain)
    found = llm.manager.linear.cache.find(seq.linear_state_hashes[boundary // 64 - 1])
    assert found is not None and found.boundary == boundary
    return found.slot_id


@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_one_failed_restore_of_four_is_prefilled_in_full_and_the_others_stay_warm(
    bad, monkeypatch, caplog
):
    llm, prompts = warmed()
    source = checkpoint_slot(llm, prompts[bad], 128)
    broken = break_copies(monkeypatch, lambda src, dst: src == source)
    before = llm.stats()
    with caplog.at_level(logging.WARNING):
        outputs = drive(llm, [Arrival(prompt) for prompt in prompts])
    assert broken
    assert "restore failed" in caplog.text
    for i, output in enumerate(outputs):
        assert_cold_bits("float32", output)
        cached = 0 if i == bad else 128
        assert (output.num_cached_tokens, output.boundary) == (cached, cached)
        assert output.miss_reason == ("restore_failed" if i == bad else None)
    stats = llm.stats()
    assert stats.cold_starts == 1
    assert stats.misses["restore_failed"] == 1
    assert stats.hits - before.hits == 3
    assert stats.queries - before.queries == 4


def test_all_failed_restores_are_prefilled_in_full(monkeypatch):
    llm, prompts = warmed()
    broken = break_copies(monkeypatch, lambda src, dst: True)
    outputs = drive(llm, [Arrival(prompt, 1) for prompt in prompts])
    assert broken
    for output in outputs:
        assert_cold_bits("float32", output)
        assert (output.num_cached_tokens, output.miss_reason) == (0, "restore_failed")
    assert llm.stats().cold_starts == 4


def test_a_checkpoint_that_failed_is_forgotten_and_saved_anew_elsewhere(monkeypatch):
    """The slot stays bad: who comes later must not find it again."""
    llm, prompts = warmed()
    source = checkpoint_slot(llm, prompts[0], 128)
    break_copies(monkeypatch, lambda src, dst: src == source)
    drive(llm, [Arrival(prompts[0])])
    for branch in (7, 8):
        [output] = drive(llm, [Arrival(fork(128, 30, branch=branch))])
        assert output.boundary == 128
        assert_cold_bits("float32", output)
    assert checkpoint_slot(llm, prompts[0], 128) != source
    assert llm.stats().cold_starts == 1


def test_requests_beside_a_failed_restore_in_decode_and_prefill_are_undisturbed(monkeypatch):
    llm, prompts = warmed()
    source = checkpoint_slot(llm, prompts[2], 128)
    break_copies(monkeypatch, lambda src, dst: src == source)
    plan = [Arrival(tokens(8, 30), 9), Arrival(tokens(9, 300), 3, step=2)]
    plan += [Arrival(prompt, 5, step=2) for prompt in prompts]
    for output in drive(llm, plan):
        assert_cold_bits("float32", output)
    assert llm.stats().cold_starts == 1


@pytest.mark.parametrize("budget", [64, 2048])
def test_a_failed_copy_after_a_save_starts_the_request_again(budget, monkeypatch):
    """The move to a new slot after a save is a restore too: in the prefill, and at its end."""
    llm = make_engine(restore="copy", max_num_batched_tokens=budget, **POOLS)
    calls = []
    break_copies(monkeypatch, lambda src, dst: calls.append(src) or len(calls) in (1, 2))
    [output] = drive(llm, [Arrival(tokens(0, 128), 6)])
    assert calls
    assert_cold_bits("float32", output)
    assert len(output.token_ids) == 6
    assert llm.stats().cold_starts == 1
    assert llm.stats().misses.keys() <= {"restore_failed", "no_checkpoint"}


@pytest.mark.parametrize("restore", ["copy", "redirect"])
def test_a_restore_without_a_source_is_prefilled_in_full(restore, monkeypatch):
    """'Asked for a restore, no source resolved' is not 'no restore asked for'."""
    llm = make_engine(restore=restore, **POOLS)
    drive(llm, [Arrival(fork(128, 9))])
    cache_op = llm.manager.linear.cache_op

    def unresolved(seq):
        op = cache_op(seq)
        return replace(op, restore_src_slot_id=NO_SLOT) if op.restore_requested else op

    with monkeypatch.context() as patch:
        patch.setattr(llm.manager.linear, "cache_op", unresolved)
        [output] = drive(llm, [Arrival(fork(128, 20, branch=2))])
    assert_cold_bits("float32", output)
    assert (output.num_cached_tokens, output.miss_reason) == (0, "restore_failed")
    assert llm.stats().cold_starts == 1
    [output] = drive(llm, [Arrival(fork(128, 20, branch=3))])
    assert output.boundary == 128
    assert_cold_bits("float32", output)


def test_a_request_aborted_in_the_step_of_its_failed_restore_leaves_nothing(monkeypatch):
    llm, prompts = warmed()
    break_copies(monkeypatch, lambda src, dst: True)
    llm.add_request(prompts[0], GREEDY, request_id="a")
    issue = llm.worker.issue

    def aborting(batch, *before):
        llm.abort("a")
        return issue(batch, *before)

    monkeypatch.setattr(llm.worker, "issue", aborting)
    [output] = llm.step()
    assert output.finish_reason == "abort"
    assert_idle(llm)


def test_a_failure_that_is_no_runtime_error_is_not_hidden(monkeypatch):
    """Only what a device raises becomes a cold start; a bug in the bookkeeping must show."""
    llm, prompts = warmed()

    def wrong(pool, sources, destinations):
        raise ValueError("slots overlap")

    with monkeypatch.context() as patch:
        patch.setattr(StatePool, "copy", wrong)
        with pytest.raises(ValueError, match="slots overlap"):
            llm.generate([prompts[0]], GREEDY)
        assert_idle(llm)
    [output] = drive(llm, [Arrival(prompts[0])])
    assert output.boundary == 128
    assert_cold_bits("float32", output)
