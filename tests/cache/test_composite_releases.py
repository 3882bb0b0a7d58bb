"""What is left behind by those who leave, and what `check` sees. Stride 4, block 2."""

import pytest

from cache.composite_block_manager import Match, MissReason
from tests.cache.builders import composite, prefilled, schedule, sequence


def test_after_everyone_left_every_id_is_free_or_evictable():
    """trap 21: free + evictable + in use == total - 1."""
    manager = composite()
    seqs = [prefilled(manager, range(9)), prefilled(manager, range(13))]
    running = sequence(range(7, 30))
    assert schedule(manager, running, 12)
    manager.check([*seqs, running])
    manager.release(seqs[0])
    manager.release(seqs[1])
    manager.discard(running)
    manager.check([])
    assert manager.kv.pool.num_in_use == manager.linear.pool.num_in_use == 0
    assert running.num_computed_tokens == running.branch_boundary == 0


def test_what_a_failed_step_wrote_is_not_published():
    """trap 14: the producer ends before the bytes were written."""
    manager = composite()
    seq = sequence(range(14))
    assert schedule(manager, seq, 12)
    manager.discard(seq)
    assert manager.match(sequence(range(14))) == Match(0, 0, MissReason.NO_CHECKPOINT)


def test_nothing_is_matched_before_the_step_that_writes_it_is_committed():
    """trap 13: a hit on something computed in the same step."""
    manager = composite()
    first, second = sequence(range(14)), sequence(range(14))
    row = schedule(manager, first, 12)
    assert len(row.snapshots) == 2
    assert manager.match(second) == Match(0, 0, MissReason.NO_CHECKPOINT)
    manager.commit(first, 12)
    assert manager.match(second) == Match(8, 12, None)


@pytest.mark.parametrize("damage", ["block", "slot", "live", "count", "exclusive", "pending"])
def test_check_sees_a_leak(damage):
    manager = composite()
    seq, other = prefilled(manager, range(10)), prefilled(manager, range(20, 30))
    manager.check([seq, other])
    if damage == "block":
        manager.kv.pool.allocate()
    elif damage == "slot":
        manager.linear.pool.allocate()
    elif damage == "live":
        seq.live_slot = None
    elif damage == "count":
        manager.linear.num_live += 1
    elif damage == "exclusive":
        manager.linear.pool.release(seq.live_slot)
        seq.live_slot = other.live_slot
        manager.linear.pool.acquire(seq.live_slot)
    else:
        seq.pending_save, seq.live_slot = object(), None
    with pytest.raises(AssertionError):
        manager.check([seq, other])


@pytest.mark.parametrize("leave", ["release", "discard"])
def test_a_fork_that_was_seen_is_forgotten_when_the_sequence_starts_again(leave):
    manager = composite(every=16)
    manager.release(prefilled(manager, [*range(9), *range(100, 109)]))
    seq = sequence([*range(9), *range(200, 209)])
    assert schedule(manager, seq, 18) and seq.branch_boundary == 8
    getattr(manager, leave)(seq)
    assert seq.branch_boundary == 0


def test_a_forgotten_prefix_is_not_matched_by_any_part_of_it():
    manager = composite()
    manager.release(prefilled(manager, range(13)))
    other = prefilled(manager, range(50, 63))
    seq = sequence(range(13))
    assert manager.match(seq) == Match(12, 12, None)
    manager.forget(seq)
    manager.check([other])
    assert manager.linear.allocate_shared(seq) == [] and manager.match(seq).kv_reach == 0
    assert manager.match(sequence(range(50, 63))).boundary == 12
