"""The LINEAR leaf: which states are saved, where, in which slots, and when not. Stride 4."""

import pytest

from cache.linear_state_prefix_cache import Provenance
from cache.ops import LinearStateCacheOp
from tests.cache.builders import checkpoints, linear_leaf, linear_step, sequence


def test_a_save_is_deferred_to_the_next_step_and_then_rotates_the_sequence():
    linear, seq = linear_leaf(), sequence(range(10))
    assert linear_step(linear, seq, 4) == (LinearStateCacheOp(1), [])
    assert linear.allocate_shared(seq) == [] and seq.pending_save.boundary == 4
    assert linear_step(linear, seq, 8) == (LinearStateCacheOp(2, True, 1, 4), [])
    assert checkpoints(linear, seq) == {4: 1}
    assert linear_step(linear, seq, 10) == (LinearStateCacheOp(3, True, 2, 8), [])
    assert checkpoints(linear, seq) == {4: 1, 8: 2}
    assert seq.state_source is None and seq.pending_save is None
    assert (linear.num_saves, linear.num_live, linear.pool.num_evictable) == (2, 1, 2)


def test_the_key_of_a_deferred_save_is_the_recorded_one():
    linear, seq = linear_leaf(), sequence(range(8))
    linear_step(linear, seq, 4)
    recorded = seq.pending_save.key
    assert recorded == seq.linear_state_hashes[0]
    linear_step(linear, seq, 8)
    assert linear.cache.find(recorded).boundary == 4


def test_only_states_that_a_prefill_left_are_saved():
    """trap 38: provenance; what a decode step left is never published."""
    linear, seq = linear_leaf(), sequence(range(6))
    linear_step(linear, seq, 6)
    for end in range(7, 14):
        seq.append_token(end)
        linear_step(linear, seq, end)
        assert seq.pending_save is None
    linear.release(seq)
    assert linear.allocate_shared(sequence(range(14))) == [4]
    entry = linear._checkpoint(seq, 4)
    assert entry.provenance is Provenance.PREFILL


def test_a_step_that_ends_inside_a_stride_saves_nothing_there():
    """trap 1: a token budget ends a prefill mid-stride; the slot is later published for the whole
    stride."""
    linear, seq = linear_leaf(), sequence(range(12))
    linear_step(linear, seq, 3)
    assert seq.pending_save is None
    op, snapshots = linear_step(linear, seq, 6)
    assert (op, snapshots) == (LinearStateCacheOp(1), [(4, 2)])
    assert checkpoints(linear, sequence(range(12))) == {4: 2}


def test_boundaries_inside_a_prefill_are_snapshots_and_its_end_is_a_deferred_save():
    linear, seq = linear_leaf(), sequence(range(17))
    op, snapshots = linear_step(linear, seq, 12)
    assert (op, snapshots) == (LinearStateCacheOp(1), [(4, 3), (8, 2)])
    assert checkpoints(linear, seq) == {4: 3, 8: 2}
    assert seq.pending_save.boundary == 12
    assert seq.snapshots == [] and linear.pool.num_evictable == 2


def test_states_are_saved_every_so_many_tokens_and_at_the_end_of_the_prompt():
    linear, seq = linear_leaf(every=8), sequence(range(23))
    linear_step(linear, seq, 23)
    assert linear.allocate_shared(sequence(range(30))) == [8, 16, 20]


@pytest.mark.parametrize(
    ("num_tokens", "saved"), [(3, []), (4, []), (5, [4]), (8, [4]), (9, [8]), (12, [8])]
)
def test_the_end_of_a_prompt_is_its_last_boundary_below_the_final_token(num_tokens, saved):
    """trap 6: a prompt of exactly k strides."""
    linear, seq = linear_leaf(every=16), sequence(range(num_tokens))
    linear_step(linear, seq, num_tokens)
    linear.release(seq)
    assert linear.allocate_shared(sequence(range(30))) == saved


def test_a_prompt_that_ends_on_the_saving_grid_is_saved_there():
    linear, seq = linear_leaf(every=4), sequence(range(8))
    linear_step(linear, seq, 8)
    linear.release(seq)
    assert linear.allocate_shared(sequence(range(9))) == [4, 8]


def test_a_boundary_where_prompts_part_is_saved_too():
    linear, seq = linear_leaf(every=16), sequence(range(16))
    seq.branch_boundary = 8
    linear_step(linear, seq, 16)
    linear.release(seq)
    assert linear.allocate_shared(sequence(range(30))) == [8, 12, 16]


def test_without_prefix_caching_nothing_is_saved():
    linear, seq = linear_leaf(caching=False), sequence(range(16))
    linear_step(linear, seq, 8)
    linear_step(linear, seq, 16)
    linear.release(seq)
    assert len(linear.cache) == 0 and linear.pool.num_free == 15


def test_when_all_slots_are_taken_a_save_is_skipped_and_counted():
    """trap 22: all slots pinned: save asserts and kills the engine."""
    linear, seq = linear_leaf(2, max_num_seqs=1), sequence(range(12))
    linear_step(linear, seq, 4)
    assert linear_step(linear, seq, 12) == (LinearStateCacheOp(1), [])
    assert linear.saves_skipped == {"no_slot": 2}  # the deferred one and the snapshot
    assert linear.num_saves == 0


def test_saving_leaves_the_slots_of_sequences_that_are_not_running_yet():
    linear, seq = linear_leaf(4, max_num_seqs=3), sequence(range(13))
    linear_step(linear, seq, 13)
    assert linear.saves_skipped == {"no_slot": 3}
    others = [sequence(range(3)) for _ in range(2)]
    assert all(linear.allocate_for_sequence(other) for other in others)


def test_with_one_slot_to_spare_the_deepest_state_is_saved():
    linear, seq = linear_leaf(5, max_num_seqs=3), sequence(range(13))
    _, snapshots = linear_step(linear, seq, 13)
    assert snapshots == [(12, 2)]
    assert linear.saves_skipped == {"no_slot": 2}


def test_saves_evict_the_least_recently_used_checkpoint_and_live_slots_never():
    linear = linear_leaf(5, max_num_seqs=1)
    first, second = sequence(range(100, 113)), sequence(range(9))
    linear_step(linear, first, 13)  # 12 -> 2, 8 -> 3, 4 -> 4; live 1
    linear.release(first)
    assert linear.allocate_for_sequence(second) and second.live_slot == 1
    _, snapshots = linear_step(linear, second, 9)
    assert snapshots == [(4, 3), (8, 4)]
    assert linear.allocate_shared(first) == [12]


def test_a_state_that_is_saved_already_is_not_saved_twice():
    linear = linear_leaf()
    first, second = sequence(range(9)), sequence(range(9))
    linear_step(linear, first, 9)
    assert linear_step(linear, second, 9) == (LinearStateCacheOp(4), [])
    assert linear.saves_skipped == {"duplicate": 2} and linear.num_saves == 2


def test_of_two_rows_that_save_one_boundary_in_one_step_the_first_wins():
    """trap 13: two requests with one prefix in one step."""
    linear = linear_leaf()
    rows = [sequence(range(5)), sequence(range(5))]
    for seq in rows:
        linear.allocate_shared(seq)
        linear.allocate_for_sequence(seq)
        linear.plan_snapshots(seq, 0, 5)
    assert [seq.snapshots for seq in rows] == [[(4, 2)], [(4, 4)]]
    for seq in rows:
        seq.num_computed_tokens = 5
        linear.commit(seq)
    linear.check()
    assert checkpoints(linear, rows[0]) == {4: 2}
    assert linear.pool.ref_count(4) == 0 and not linear.pool.is_published(4)


def test_leaving_publishes_a_pending_save_without_a_new_slot():
    linear, seq = linear_leaf(2, max_num_seqs=1), sequence(range(8))
    linear_step(linear, seq, 4)
    linear.release(seq)
    assert checkpoints(linear, sequence(range(8))) == {4: 1}
    assert (linear.pool.num_evictable, linear.num_live, seq.live_slot) == (1, 0, None)


def test_of_the_states_of_one_step_the_deepest_is_evicted_last():
    """trap 28: the next turn resumes from the deepest one."""
    linear, seq = linear_leaf(6, max_num_seqs=1), sequence(range(9))
    linear_step(linear, seq, 9)  # 8 -> 2, 4 -> 3
    linear.release(seq)
    longer = sequence(range(17))
    linear.allocate_shared(longer)
    linear.set_source(longer, linear.mount(longer, 8))
    longer.num_computed_tokens = 8
    linear.allocate_for_sequence(longer)
    linear.plan_snapshots(longer, 8, 17)
    assert longer.snapshots == [(12, 1), (16, 5)]
    longer.num_computed_tokens = 17
    linear.commit(longer)
    linear.release(longer)
    linear.pool.allocate()
    boundaries = []
    while linear.pool.allocate():
        boundaries.append(linear.allocate_shared(sequence(range(17))))
    assert boundaries == [[8, 12, 16], [12, 16], [16], []]
