"""The LINEAR leaf: live slots, sources, and what a leaving sequence gives back. Stride 4."""

import pytest

from cache.cached_sequence import StateSource
from cache.ops import LinearStateCacheOp
from tests.cache.builders import linear_leaf, linear_step, sequence


def sequence_like(seq):
    twin = sequence(seq.token_ids)
    twin.linear_state_hashes = list(seq.linear_state_hashes)
    return twin


def test_a_sequence_gets_one_live_slot_and_keeps_it():
    linear, seq = linear_leaf(), sequence(range(3))
    assert linear.allocate_for_sequence(seq) and seq.live_slot == 1
    assert linear.allocate_for_sequence(seq) and seq.live_slot == 1
    assert (linear.num_live, linear.pool.num_in_use) == (1, 1)


def test_without_a_slot_a_sequence_gets_none():
    linear = linear_leaf(2, max_num_seqs=1)
    assert linear.allocate_for_sequence(sequence(range(3)))
    late = sequence(range(3))
    assert not linear.allocate_for_sequence(late)
    assert late.live_slot is None and linear.num_live == 1


def test_checkpoints_take_no_part_in_admission():
    assert linear_leaf().participates_in_admission is False


def test_a_probe_takes_nothing():
    linear, seq = linear_leaf(), sequence(range(12))
    linear_step(linear, seq, 12)
    linear.release(seq)
    probe = sequence(range(12))
    assert linear.allocate_shared(probe) == [4, 8]
    assert linear.pool.num_in_use == 0 and probe.block_table == [] and probe.state_source is None


def test_a_mounted_checkpoint_is_pinned_until_the_step_is_committed():
    """trap 15: a source slot is released (and reused) before the worker read it."""
    linear, seq = linear_leaf(5, max_num_seqs=1), sequence(range(9))
    linear_step(linear, seq, 9)
    linear.release(seq)  # 8 -> slot 2, 4 -> slot 3, slots 4 and 1 free
    reader = sequence(range(9))
    linear.allocate_shared(reader)
    assert linear.mount(reader, 8) == StateSource(2, 8)
    linear.set_source(reader, StateSource(2, 8))
    assert linear.allocate_for_sequence(reader)
    taken = [linear.pool.allocate() for _ in range(3)]
    assert taken == [1, 3, None]
    assert linear.cache_op(reader) == LinearStateCacheOp(4, True, 2, 8)
    reader.num_computed_tokens = 9
    linear.commit(reader)
    assert linear.pool.ref_count(2) == 0 and reader.state_source is None


def test_unmounting_gives_the_reference_back():
    linear, seq = linear_leaf(), sequence(range(5))
    linear_step(linear, seq, 5)
    mounted = linear.mount(seq, 4)
    linear.unmount(mounted)
    assert linear.pool.ref_count(mounted.slot_id) == 0


def test_a_later_source_replaces_an_earlier_one_and_releases_it():
    """trap 3: a mounted source survives a re-match for another boundary."""
    linear, seq = linear_leaf(), sequence(range(9))
    linear_step(linear, seq, 9)
    linear.release(seq)
    reader = sequence(range(9))
    linear.allocate_shared(reader)
    linear.set_source(reader, linear.mount(reader, 4))
    linear.set_source(reader, linear.mount(reader, 8))
    assert [linear.pool.ref_count(slot) for slot in (3, 2)] == [0, 1]
    assert reader.state_source == StateSource(2, 8)


def test_a_checkpoint_can_be_mounted_only_if_a_live_slot_is_left_beside_it():
    linear = linear_leaf(4, max_num_seqs=1)
    seq = sequence(range(5))
    linear_step(linear, seq, 5)
    linear.release(seq)  # 4 -> slot 2; slots 3 and 1 free
    reader, other = sequence(range(5)), sequence(range(5))
    linear.allocate_shared(reader)
    held = [linear.pool.allocate()]
    assert linear.can_mount(reader, 4)
    held.append(linear.pool.allocate())
    assert not linear.can_mount(reader, 4)  # the checkpoint itself is the last slot
    assert linear.allocate_for_sequence(other) and other.live_slot == 2
    other.live_slot, linear.num_live = None, 0
    linear.pool.release(2)


def test_a_pinned_checkpoint_can_be_mounted_again_beside_one_free_slot():
    linear, seq = linear_leaf(3, max_num_seqs=1), sequence(range(5))
    linear_step(linear, seq, 5)
    linear.release(seq)
    reader = sequence(range(5))
    linear.allocate_shared(reader)
    linear.mount(reader, 4)
    assert linear.can_mount(sequence_like(reader), 4)
    linear.allocate_for_sequence(reader)
    assert not linear.can_mount(sequence_like(reader), 4)
    assert linear.can_mount(reader, 4)  # it has its live slot


def test_only_the_mounted_checkpoint_is_refreshed():
    """trap 29: a hit refreshes the whole path in the LRU, so cold sessions survive warm ones."""
    linear, seq = linear_leaf(5, max_num_seqs=1), sequence(range(13))
    linear_step(linear, seq, 13)
    linear.release(seq)  # 12 -> 2, 8 -> 3, 4 -> 4; free 1
    reader = sequence(range(10))
    linear.allocate_shared(reader)
    linear.unmount(linear.mount(reader, 4))
    linear.pool.allocate()
    evicted = [linear.pool.allocate() for _ in range(3)]
    assert evicted == [3, 2, 4]


def test_a_discarded_sequence_gives_everything_back_and_publishes_nothing():
    """trap 14: the producer ends before the bytes were written."""
    linear, seq = linear_leaf(), sequence(range(12))
    linear_step(linear, seq, 4)
    linear.allocate_for_sequence(seq)
    linear.plan_snapshots(seq, 4, 12)
    assert seq.snapshots == [(8, 3)] and seq.state_source == StateSource(1, 4)
    linear.discard(seq)
    assert linear.allocate_shared(sequence(range(12))) == [4]  # it was written by the step before
    assert (linear.pool.num_in_use, linear.num_live) == (0, 0)
    assert (seq.snapshots, seq.state_source, seq.live_slot) == ([], None, None)


def test_a_discarded_pending_save_is_forgotten():
    linear, seq = linear_leaf(), sequence(range(8))
    linear_step(linear, seq, 4)
    linear.discard(seq)
    assert seq.pending_save is None and len(linear.cache) == 0
    assert linear.pool.num_free == 15


def test_a_quarantined_checkpoint_is_not_found_again_and_its_slot_returns():
    linear, seq = linear_leaf(), sequence(range(9))
    linear_step(linear, seq, 9)
    mounted = linear.mount(seq, 8)
    linear.quarantine(mounted.slot_id)
    linear.check()
    assert linear.allocate_shared(seq) == [4]
    assert linear.pool.ref_count(mounted.slot_id) == 1  # still pinned by its reader
    linear.unmount(mounted)
    assert linear.pool.num_free == 13 and linear.pool.num_evictable == 1


@pytest.mark.parametrize("slot", [-1, 0, 1, 15, 16, 99])
def test_quarantining_a_slot_without_a_checkpoint_changes_nothing(slot):
    linear, seq = linear_leaf(), sequence(range(5))
    linear_step(linear, seq, 5)
    linear.quarantine(slot)
    assert linear.allocate_shared(seq) == [4]


def test_check_sees_a_published_slot_that_the_index_does_not_know():
    linear, seq = linear_leaf(), sequence(range(5))
    linear_step(linear, seq, 5)
    linear.cache.forget(2)
    with pytest.raises(AssertionError, match="disagree"):
        linear.check()


# ---- drafts


def drafting_leaf(num_slots: int = 12, *, num_scratch: int = 3):
    return linear_leaf(num_slots, max_num_seqs=1, num_scratch=num_scratch)


def test_scratch_is_set_aside_and_comes_back():
    linear = drafting_leaf()
    aside = set(linear.scratch)
    assert len(aside) == 3 and linear.pool.num_available == 11 - 3
    seq = sequence(range(3))
    linear_step(linear, seq, 3)
    assert not linear.take_scratch(seq, 4) and not seq.scratch
    assert linear.take_scratch(seq, 3) and set(seq.scratch) == aside and not linear.scratch
    linear.discard(seq)
    assert set(linear.scratch) == aside and linear.pool.num_in_use == 3


def test_the_slot_after_the_last_true_token_becomes_the_live_slot():
    linear = drafting_leaf()
    seq = sequence(range(3))
    linear_step(linear, seq, 3)
    before = seq.live_slot
    assert linear.take_scratch(seq, 3)
    first, second, third = seq.scratch
    linear.settle(seq, 2)
    assert seq.live_slot == second and not seq.scratch
    assert sorted(linear.scratch) == sorted([first, before, third])


def test_a_boundary_among_the_guesses_is_published_and_its_place_is_filled():
    linear = drafting_leaf()
    seq = sequence(range(3), exact=False)
    linear_step(linear, seq, 3)
    for token in (7, 8, 9):
        seq.append_token(token)
    assert linear.take_scratch(seq, 3)
    first, second, third = seq.scratch
    linear.settle(seq, 3)  # tokens 4 to 6: boundary 4 is after the first of them
    assert linear.cache.slot_ids() == {first} and linear.pool.ref_count(first) == 0
    assert seq.live_slot == third
    assert len(linear.scratch) == 3 and first not in linear.scratch and second in linear.scratch


def test_a_reset_sets_scratch_aside_again():
    linear = drafting_leaf()
    linear.reset()
    assert len(linear.scratch) == linear.pool.num_in_use == 3
