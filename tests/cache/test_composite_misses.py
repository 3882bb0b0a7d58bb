"""Why nothing was reused, who sees whose prefixes, and which states survive. Stride 4, block 2."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.composite_block_manager import Match, MissReason
from tests.cache.builders import checkpoints, composite, prefilled, run, sequence, served

# ---- reasons


def test_with_caching_off_every_prompt_is_a_miss_and_nothing_is_kept():
    manager = composite(caching=False)
    served(manager, range(9))
    assert manager.match(sequence(range(9))) == Match(0, 0, MissReason.DISABLED)
    assert manager.kv.pool.num_evictable == manager.linear.pool.num_evictable == 0


@pytest.mark.parametrize(
    ("num_tokens", "reason"),
    [
        (1, MissReason.BELOW_STRIDE),
        (4, MissReason.BELOW_STRIDE),
        (5, MissReason.NO_CHECKPOINT),
    ],
)
def test_a_prompt_that_is_too_short_to_hit_is_told_so(num_tokens, reason):
    """trap 27: prompts shorter than the stride can never hit, with no word of it."""
    assert composite().match(sequence(range(num_tokens))) == Match(0, 0, reason)


def test_another_prompt_s_states_are_no_reason():
    manager = composite()
    served(manager, range(50, 60))
    assert manager.match(sequence(range(9))).miss_reason is MissReason.NO_CHECKPOINT


def test_a_prompt_on_its_way_is_told_no_reason(monkeypatch):
    manager = composite()
    seq = sequence(range(20))
    assert manager.match(seq).miss_reason is MissReason.NO_CHECKPOINT
    run(manager, seq, 8)
    monkeypatch.setattr(manager, "_reason", None)
    assert manager.match(seq) == Match(8, 8, None)


def test_states_that_lie_deeper_than_the_kv_are_reported():
    manager = composite(num_blocks=7)
    served(manager, range(9))
    manager.kv.allocate(sequence(range(90, 102)), 12)
    assert manager.match(sequence(range(9))) == Match(0, 0, MissReason.KV_SHORTER)


def test_an_evicted_state_is_reported():
    manager = composite(num_slots=3, max_num_seqs=1)
    served(manager, range(5))
    served(manager, range(50, 59), 4)
    assert manager.match(sequence(range(5))).miss_reason is MissReason.EVICTED


def test_a_state_of_another_namespace_is_reported():
    """trap 39: two tenants, one prefix."""
    manager = composite()
    served(manager, range(9), salt="theirs")
    assert manager.match(sequence(range(9), salt="ours")) == Match(0, 0, MissReason.NAMESPACE)
    assert manager.match(sequence(range(9), salt="theirs")) == Match(8, 8, None)


def test_different_salts_never_share_a_block_or_a_state_and_equal_salts_do():
    """trap 39: different salts never hit each other; equal salts do."""
    manager = composite()
    seqs = [prefilled(manager, range(9), salt=salt) for salt in ("a", "b", "a")]
    first, second, third = (seq.block_table for seq in seqs)
    assert not set(first) & set(second)
    assert first[:4] == third[:4]
    manager.check(seqs)


def test_hits_and_misses_add_up_to_the_queries():
    """trap 36: counters go negative, or hits exceed queries."""
    manager = composite()
    manager.count_query(8, None)
    manager.count_query(0, MissReason.NO_CHECKPOINT)
    manager.count_query(0, MissReason.NO_CHECKPOINT)
    manager.count_query(4, None)
    assert (manager.num_queries, manager.num_hits, manager.num_tokens_reused) == (4, 2, 12)
    assert manager.misses == {MissReason.NO_CHECKPOINT: 2}
    with pytest.raises(AssertionError, match="without a reason"):
        manager.count_query(0, None)


# ---- what is saved where


@given(st.integers(0, 24), st.integers(1, 12), st.sampled_from([4, 8, 16]))
def test_the_third_prompt_with_a_shared_prefix_resumes_at_its_end(shared, unique, every):
    """trap 26: the only checkpoint sits at the prompt's tail, inside the unique part."""
    manager = composite(every=every, num_slots=40)

    def prompt(user):
        return [*range(shared), *range(100 * user, 100 * user + unique)]

    served(manager, prompt(1))
    second, third = sequence(prompt(2)), sequence(prompt(3))
    resumed = manager.match(second).boundary
    assert resumed >= shared // every * every if shared < shared + unique else True
    run(manager, second, second.num_prompt_tokens)
    manager.release(second)
    assert manager.match(third).boundary == shared // 4 * 4


def test_where_two_prompts_part_one_state_is_saved():
    """trap 26: the second prompt finds no state in the shared prefix and leaves one there."""
    manager = composite(every=16)
    served(manager, [*range(9), *range(100, 109)])
    second = sequence([*range(9), *range(200, 209)])
    row = run(manager, second, 18)
    assert row.start == 0 and second.branch_boundary == 8
    assert [boundary for boundary, _ in row.snapshots] == [8, 16]
    manager.release(second)
    third = sequence([*range(9), *range(300, 309)])
    assert manager.match(third) == Match(8, 8, None)


def test_a_fork_at_the_end_of_a_step_is_a_deferred_save():
    manager = composite(every=16)
    served(manager, [*range(9), *range(100, 109)])
    second = sequence([*range(9), *range(200, 209)])
    run(manager, second, 8)
    assert second.pending_save.boundary == 8


def test_a_fork_beyond_the_final_token_is_not_saved_there():
    manager = composite(every=16)
    served(manager, range(12))
    second = sequence(range(8))
    run(manager, second, 8)
    assert second.branch_boundary == 4


def test_a_fork_that_was_seen_once_is_not_lost_by_a_shorter_match():
    manager = composite(every=16)
    served(manager, [*range(13), *range(100, 109)])
    second = sequence([*range(13), *range(200, 209)])
    assert manager.allocate(second, manager.match(second), 4)
    manager.plan_saves(second, manager.match(second), 4)
    assert second.branch_boundary == 12
    manager.commit(second, 4)
    manager.plan_saves(second, Match(4, 4, None), 8)
    assert second.branch_boundary == 12


def test_every_turn_of_a_chat_resumes_although_the_pool_is_full():
    """trap 28: the consumed checkpoint is the next one evicted; every few turns a full miss."""
    manager = composite(num_slots=4, max_num_seqs=1, every=64)
    history = list(range(9))
    served(manager, history)
    for turn in range(1, 12):
        other = range(1000 * turn, 1000 * turn + 5)
        served(manager, other)  # another session takes a slot in between
        history += range(100 * turn, 100 * turn + 6)
        seq = sequence(history)
        resumed = manager.match(seq).boundary
        assert resumed == (len(history) - 6 - 1) // 4 * 4
        run(manager, seq, seq.num_prompt_tokens)
        manager.release(seq)
        manager.check([])


def test_a_cold_session_is_evicted_before_a_warm_one():
    """trap 29: only the mounted entry is refreshed."""
    manager = composite(num_slots=6, max_num_seqs=1)
    served(manager, range(9))  # warm: 4 and 8
    served(manager, range(50, 55))  # cold: 4
    run_again = sequence(range(9))
    run(manager, run_again, 9)  # mounts 8
    manager.release(run_again)
    pool = manager.linear.pool
    while pool.num_free:
        pool.allocate()
    pool.allocate()  # the entry at 4 of the warm session was on the path, but not mounted
    assert checkpoints(manager.linear, sequence(range(9))) == {8: 2}
    pool.allocate()
    assert checkpoints(manager.linear, sequence(range(50, 55))) == {}
    assert checkpoints(manager.linear, sequence(range(9))) == {8: 2}
