"""Both leaves under one boundary: what is matched, shared and taken. Stride 4, block 2."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.cached_sequence import StateSource
from cache.composite_block_manager import Match, MissReason
from cache.ops import LinearStateCacheOp
from tests.cache.builders import (
    checkpoints,
    composite,
    prefilled,
    run,
    schedule,
    sequence,
    served,
)

A = list(range(10))
B = [*A[:8], 50, 51, 52]


def test_the_timeline_of_the_design_holds_id_for_id():
    manager = composite()
    linear, a, b = manager.linear, sequence(A), sequence(B)

    step1 = run(manager, a, 4)
    assert (step1.start, step1.op) == (0, LinearStateCacheOp(1))
    assert (a.live_slot, a.pending_save.boundary) == (1, 4)
    assert len(linear.cache) == 0

    step2 = run(manager, a, 8)
    assert (step2.start, step2.op) == (4, LinearStateCacheOp(2, True, 1, 4))
    assert (a.live_slot, a.pending_save.boundary) == (2, 8)
    assert checkpoints(linear, b) == {4: 1}

    step3 = run(manager, a, 10)
    assert (step3.start, step3.op) == (8, LinearStateCacheOp(3, True, 2, 8))
    assert (a.live_slot, a.pending_save) == (3, None)
    assert checkpoints(linear, b) == {4: 1, 8: 2}
    assert a.block_table == [1, 2, 3, 4, 5]

    a.append_token(99)
    assert run(manager, a, 11).op == LinearStateCacheOp(3)

    assert manager.match(b) == Match(8, 8, None)
    row = schedule(manager, b, 11)
    assert (row.start, row.op, row.snapshots) == (8, LinearStateCacheOp(4, True, 2, 8), ())
    assert b.block_table[:4] == a.block_table[:4] and b.block_table[4:] == [7, 8]
    assert linear.pool.ref_count(2) == 1
    manager.commit(b, 11)
    assert checkpoints(linear, b) == {4: 1, 8: 2}
    assert linear.pool.ref_count(2) == 0
    manager.check([a, b])


# ---- the boundary


@pytest.mark.parametrize(
    ("num_tokens", "boundary"),
    [(4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12), (40, 16)],
    ids=lambda number: str(number),
)
def test_the_final_token_is_always_computed(num_tokens, boundary):
    """trap 6: a prompt of exactly k strides: hits at (k-1) and k."""
    manager = composite()
    served(manager, range(16))
    assert manager.match(sequence(range(num_tokens))).boundary == boundary


def test_a_hit_drops_to_the_deepest_boundary_within_the_kv_that_is_left():
    """trap 2: the K/V match is shorter than the deepest checkpoint."""
    manager = composite(num_blocks=9)
    served(manager, range(14))  # blocks 1..7; states at 4, 8 and 12; 8 is free
    squatter = sequence(range(90, 98))
    assert manager.kv.allocate(squatter, 4)  # the free one, and the tail of the prompt
    assert squatter.block_table == [8, 7]
    assert manager.match(sequence(range(14))) == Match(12, 12, None)
    assert manager.kv.allocate(squatter, 6)
    assert squatter.block_table == [8, 7, 6]
    follower = sequence(range(14))
    assert manager.linear.allocate_shared(follower) == [4, 8, 12]
    assert manager.match(follower) == Match(8, 10, None)
    assert manager.allocate(follower, manager.match(follower), 12) is False
    manager.kv.release(squatter)
    row = schedule(manager, follower, 14)
    assert row.op == LinearStateCacheOp(follower.live_slot, True, 3, 8)
    assert follower.block_table[:4] == [1, 2, 3, 4]


def test_kv_without_a_state_is_not_reused():
    manager = composite()
    served(manager, range(12))
    for slot in manager.linear.cache.slot_ids():
        manager.linear.quarantine(slot)
    assert manager.match(sequence(range(12))) == Match(0, 12, MissReason.EVICTED)


@given(
    st.sampled_from([(1, 4), (2, 4), (4, 4), (2, 8), (1, 2), (3, 6)]),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_a_match_is_the_deepest_grid_boundary_of_the_shared_prefix(sizes, first, second):
    """traps 4 and 31: strides that are several blocks wide; what is stored is found."""
    block, stride = sizes
    manager = composite(block_size=block, stride=stride, every=stride, num_blocks=64, num_slots=64)
    served(manager, range(first))
    shared = min(first, second)
    probe = [*range(shared), *range(100, 100 + second - shared)]
    limit = min(shared // block * block, second - 1)
    found = manager.match(sequence(probe))
    assert found.boundary == limit // stride * stride
    assert found.kv_reach == min(shared // block * block, first // stride * stride)


def test_a_running_prefill_jumps_ahead_when_another_one_got_further():
    manager = composite()
    slow, fast = sequence(range(14)), sequence(range(14))
    run(manager, slow, 4)
    run(manager, fast, 12)
    manager.release(fast)
    row = schedule(manager, slow, 14)
    assert (row.start, row.op.boundary) == (12, 12)
    assert slow.block_table[:2] == [1, 2] and slow.block_table[2:6] == [5, 6, 7, 8]
    manager.commit(slow, 14)
    manager.check([slow])


def test_a_match_is_never_below_what_was_computed():
    manager = composite()
    served(manager, range(6))
    seq = sequence(range(14))
    run(manager, seq, 8)
    assert manager.match(seq) == Match(8, 8, None)


def test_a_model_without_recurrent_layers_reuses_kv_alone_in_whole_strides():
    manager = composite(recurrent=False)
    served(manager, range(11))
    assert manager.match(sequence(range(11))) == Match(8, 8, None)
    assert manager.match(sequence(range(8))) == Match(4, 8, None)
    assert manager.match(sequence(range(3))) == Match(0, 2, MissReason.BELOW_STRIDE)
    assert manager.match(sequence([7] * 9)) == Match(0, 0, MissReason.NO_CHECKPOINT)
    row = run(manager, sequence(range(11)), 11)
    assert (row.start, row.op) == (8, None)


def test_a_prefill_that_runs_on_kv_alone_does_not_fall_back_to_a_whole_stride():
    manager, seq = composite(recurrent=False), sequence(range(11))
    run(manager, seq, 6)
    assert manager.match(seq).boundary == 6
    assert run(manager, seq, 11).start == 6


# ---- all or nothing


def holdings(manager, seq):
    pools = [manager.kv.pool, manager.linear.pool]
    refs = [[pool.ref_count(id_) for id_ in range(pool.num_ids)] for pool in pools]
    return (
        refs,
        list(seq.block_table),
        seq.live_slot,
        seq.state_source,
        seq.num_computed_tokens,
        seq.num_published_blocks,
        manager.linear.num_live,
    )


@pytest.mark.parametrize("short_of", ["blocks", "slots"])
def test_a_refused_hit_gives_back_all_it_took(short_of):
    """trap 21: a slot or block taken at match is lost when the request is refused."""
    manager = composite(num_blocks=12, num_slots=6, max_num_seqs=1)
    served(manager, range(9))
    seq = sequence(range(9))
    match = manager.match(seq)
    pool = manager.kv.pool if short_of == "blocks" else manager.linear.pool
    while pool.num_free:
        pool.allocate()
    while short_of == "slots" and pool.num_evictable > 1:
        pool.allocate()
    match = manager.match(seq) if short_of == "blocks" else match
    before = holdings(manager, seq)
    if short_of == "slots":
        assert manager.match(seq).miss_reason is MissReason.NO_SLOT
    assert match.boundary == 8
    assert manager.allocate(seq, match, 30 if short_of == "blocks" else 9) is False
    assert holdings(manager, seq) == before


def test_a_refused_step_of_a_running_sequence_keeps_what_it_held():
    manager = composite(num_blocks=7)
    seq = sequence(range(14))
    run(manager, seq, 8)
    before = holdings(manager, seq)
    assert schedule(manager, seq, 14) is None
    assert holdings(manager, seq) == before
    assert seq.pending_save.boundary == 8
    manager.check([seq])


def test_a_checkpoint_is_no_reason_to_refuse_a_request():
    manager = composite(num_slots=4, max_num_seqs=1)
    served(manager, range(13))
    assert manager.linear.pool.num_free + manager.linear.pool.num_evictable == 3
    seq = sequence(range(100, 103))
    assert schedule(manager, seq, 3) is not None


def test_a_hit_without_a_slot_to_run_on_beside_it_is_a_miss():
    manager = composite(num_slots=3, max_num_seqs=2)
    first = prefilled(manager, range(4))
    manager.release(first)
    assert manager.match(sequence(range(9))).boundary == 4
    other = prefilled(manager, [9, 9])
    seq = sequence(range(9))
    assert manager.match(seq) == Match(0, 4, MissReason.NO_SLOT)
    assert schedule(manager, seq, 9).start == 0
    manager.commit(seq, 9)
    manager.check([other, seq])


def test_after_a_skipped_save_the_next_source_is_that_of_its_own_boundary():
    """trap 3: a mounted source survives a re-match for another boundary because the save was
    skipped."""
    manager = composite(num_slots=4, max_num_seqs=1)
    seq, pool = sequence(range(13)), manager.linear.pool
    run(manager, seq, 4)
    run(manager, seq, 8)  # publishes 4 in slot 1, rotates to slot 2
    held = [pool.allocate(), pool.allocate()]  # all that is left, the checkpoint included
    row = schedule(manager, seq, 12)
    assert row.op == LinearStateCacheOp(2) and seq.state_source is None
    assert manager.linear.saves_skipped == {"no_slot": 1}
    manager.commit(seq, 12)
    for slot in held:
        pool.release(slot)
    assert schedule(manager, seq, 13).op == LinearStateCacheOp(3, True, 2, 12)
    manager.check([seq])


def test_the_source_of_a_rotation_gives_way_to_the_one_that_is_matched():
    """trap 3: the second source of one step is the one that is read."""
    manager = composite()
    slow, fast = sequence(range(14)), sequence(range(14))
    run(manager, slow, 4)  # a save at 4 is pending
    run(manager, fast, 12)
    manager.release(fast)
    manager.linear.quarantine(checkpoints(manager.linear, slow)[4])
    row = schedule(manager, slow, 14)  # rotates out of its own slot, then mounts 12
    assert (row.start, row.op.boundary) == (12, 12)
    assert slow.state_source == StateSource(row.op.restore_src_slot_id, 12)
    manager.check([slow])
    manager.commit(slow, 14)
    manager.check([slow])


def test_the_slots_of_guesses_are_held_by_who_verifies_them():
    manager = composite(num_scratch=3)
    seq = prefilled(manager, range(9))
    assert manager.linear.take_scratch(seq, 3)
    manager.check([seq])
    with pytest.raises(AssertionError, match="leaks"):
        manager.check([])
    manager.release(seq)
    manager.check([])
