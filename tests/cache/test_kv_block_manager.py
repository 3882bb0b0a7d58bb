"""The K/V leaf: which blocks a sequence gets, shares and leaves behind. Blocks of 2 tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cache.builders import kv_leaf, sequence


def computed(kv, token_ids, *, upto=None):
    """A sequence that owns blocks for its prompt and has published what it computed."""
    seq = sequence(token_ids)
    kv.reach(seq)
    assert kv.allocate(seq, seq.num_prompt_tokens)
    seq.num_computed_tokens = seq.num_prompt_tokens if upto is None else upto
    kv.publish(seq)
    return seq


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2)], ids=lambda n: str(n)
)
def test_a_begun_block_counts(tokens, blocks):
    assert kv_leaf().num_blocks_for(tokens) == blocks


def test_blocks_are_allocated_in_ascending_order_and_only_the_missing_ones():
    kv, seq = kv_leaf(), sequence(range(9))
    assert kv.allocate(seq, 3) and seq.block_table == [1, 2]
    assert kv.allocate(seq, 4) and seq.block_table == [1, 2]
    assert kv.allocate(seq, 5) and seq.block_table == [1, 2, 3]
    kv.check()


def test_without_room_nothing_is_allocated():
    kv, seq, other = kv_leaf(4), sequence(range(8)), sequence(range(2))
    assert kv.allocate(other, 2)
    assert not kv.allocate(seq, 6)
    assert seq.block_table == [] and kv.pool.num_free == 2
    assert kv.allocate(seq, 4) and seq.block_table == [2, 3]


def test_only_whole_computed_prompt_blocks_are_published():
    kv = kv_leaf()
    seq = computed(kv, range(7), upto=5)
    assert [kv.pool.is_published(id_) for id_ in seq.block_table] == [True, True, False, False]
    assert seq.num_published_blocks == 2
    kv.check()


def test_blocks_with_generated_tokens_are_never_published():
    """trap 38: what a decode step wrote is not stored under a key."""
    kv = kv_leaf()
    seq = computed(kv, range(3))
    for token in (7, 8, 9):
        seq.append_token(token)
    assert kv.allocate(seq, 6)
    seq.num_computed_tokens = 6
    kv.publish(seq)
    assert [kv.pool.is_published(id_) for id_ in seq.block_table] == [True, False, False]


def test_publishing_goes_on_where_it_stopped():
    kv = kv_leaf()
    seq = computed(kv, range(8), upto=4)
    seq.num_computed_tokens = 8
    kv.publish(seq)
    assert all(kv.pool.is_published(id_) for id_ in seq.block_table)


def test_a_block_whose_key_is_published_already_stays_private():
    kv = kv_leaf()
    first, second = sequence([1, 2, 3, 4]), sequence([1, 2, 5, 6])
    for seq in (first, second):
        kv.reach(seq)
        kv.allocate(seq, 4)
        seq.num_computed_tokens = 4
    kv.publish(first)
    kv.publish(second)
    assert (first.block_table, second.block_table) == ([1, 2], [3, 4])
    assert [kv.pool.is_published(id_) for id_ in (1, 2, 3, 4)] == [True, True, False, True]
    kv.release(second)
    assert (kv.pool.num_evictable, kv.pool.num_in_use) == (1, 2)


def test_reach_is_the_run_of_published_blocks_from_token_0():
    kv = kv_leaf()
    computed(kv, [1, 2, 3, 4, 5, 6])
    assert kv.reach(sequence([1, 2, 3, 4, 5, 6, 7])) == 6
    assert kv.reach(sequence([1, 2, 3, 4, 5, 9])) == 4
    assert kv.reach(sequence([1, 2, 3])) == 2
    assert kv.reach(sequence([1])) == 0
    assert kv.reach(sequence([9, 2, 3, 4])) == 0


def test_reach_ends_at_the_first_gap():
    kv = kv_leaf(4)
    kv.release(computed(kv, [1, 2, 3, 4, 5, 6]))
    kv._index.forget(2)
    kv.pool.unpublish(2)
    assert kv.reach(sequence([1, 2, 3, 4, 5, 6, 7])) == 2


def test_reach_counts_what_the_sequence_has_computed_itself_and_what_follows():
    kv = kv_leaf()
    computed(kv, [1, 2, 3, 4, 5, 6])
    seq = sequence([1, 2, 3, 4, 5, 6, 7, 8])
    seq.num_computed_tokens = 4
    assert kv.reach(seq) == 6
    seq.num_computed_tokens = 7
    assert kv.reach(seq) == 7


def test_probing_takes_no_reference_and_refreshes_nothing():
    kv = kv_leaf(4)
    kv.release(computed(kv, [1, 2]))
    kv.release(computed(kv, [3, 4]))
    kv.release(computed(kv, [5, 6]))
    kv.reach(sequence([1, 2, 0]))
    assert kv.pool.num_in_use == 0
    fresh = sequence(range(6))
    assert kv.allocate(fresh, 6) and fresh.block_table == [1, 2, 3]


def test_shared_blocks_are_the_same_ids_with_one_more_reference():
    kv = kv_leaf()
    first = computed(kv, [1, 2, 3, 4, 5, 6])
    second = sequence([1, 2, 3, 4, 5, 6, 7])
    assert kv.reach(second) == 6
    kv.acquire_shared(second, 4)
    assert second.block_table == first.block_table[:2] == [1, 2]
    assert [kv.pool.ref_count(id_) for id_ in (1, 2, 3)] == [2, 2, 1]
    assert kv.allocate(second, 7) and second.block_table == [1, 2, 4, 5]


def test_sharing_more_extends_what_is_held():
    kv = kv_leaf()
    computed(kv, [1, 2, 3, 4, 5, 6])
    second = sequence([1, 2, 3, 4, 5, 6, 7])
    kv.reach(second)
    kv.acquire_shared(second, 2)
    kv.acquire_shared(second, 6)
    assert second.block_table == [1, 2, 3]


def test_the_tail_of_a_released_sequence_is_evicted_before_its_head():
    kv = kv_leaf(5)
    kv.release(computed(kv, [1, 2, 3, 4, 5, 6]))
    other = sequence(range(50, 56))
    kv.allocate(other, 4)
    assert other.block_table == [4, 3]
    assert kv.reach(sequence([1, 2, 3, 4, 5, 6, 7])) == 4
    kv.check()


def test_truncating_gives_back_the_blocks_after_the_kept_ones():
    kv = kv_leaf()
    seq = computed(kv, range(8), upto=8)
    kv.truncate(seq, 3)
    assert seq.block_table == [1, 2, 3] and seq.num_published_blocks == 3
    kv.truncate(seq, 3)
    assert seq.block_table == [1, 2, 3]
    kv.release(seq)
    assert seq.block_table == [] and seq.num_published_blocks == 0


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=10), min_size=1, max_size=8),
    st.integers(2, 12),
)
def test_no_block_is_lost_whatever_comes_and_goes(prompts, num_blocks):
    """trap 21: free + evictable + in use == total - 1."""
    kv = kv_leaf(num_blocks)
    held = []
    for number, prompt in enumerate(prompts):
        seq = sequence(prompt)
        boundary = kv.reach(seq) // 2 * 2
        kv.acquire_shared(seq, boundary)
        if kv.allocate(seq, len(prompt)):
            seq.num_computed_tokens = len(prompt)
            kv.publish(seq)
        held.append(seq)
        if number % 2:
            kv.release(held.pop(0))
        kv.check()
        pool = kv.pool
        assert pool.num_free + pool.num_evictable + pool.num_in_use == num_blocks - 1
    for seq in held:
        kv.release(seq)
    assert kv.pool.num_in_use == 0


def test_check_sees_a_published_block_that_the_index_does_not_know():
    kv = kv_leaf()
    computed(kv, range(4))
    kv.check()
    kv._index.forget(1)
    with pytest.raises(AssertionError, match="disagree"):
        kv.check()
