"""The checkpoint index by itself: what a probe finds, and what is remembered. Stride 4."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache import linear_state_prefix_cache
from cache.hashing import HashDomain, Namespace
from cache.linear_state_prefix_cache import Checkpoint, LinearStatePrefixCache, Provenance
from tests.cache.builders import sequence

DOMAIN = HashDomain("linear", 4)


def hashes(num_tokens, *, salt=""):
    seq = sequence(range(num_tokens), salt=salt)
    seq.update_linear_state_hashes(DOMAIN)
    return seq.linear_state_hashes


def cache_with(boundaries, *, num_tokens=40, salt=""):
    """States of the prompt 0, 1, 2, ... at these boundaries, in slots 1, 2, ..."""
    cache = LinearStatePrefixCache(4)
    keys = hashes(num_tokens, salt=salt)
    for slot, boundary in enumerate(boundaries, start=1):
        cache.insert(keys[boundary // 4 - 1], Checkpoint(slot, boundary, Namespace("", "", salt)))
    return cache


def test_a_probe_finds_all_boundaries_ascending_and_gaps_are_allowed():
    cache = cache_with([20, 4, 12])
    assert cache.match(hashes(40), 40) == [4, 12, 20]


@pytest.mark.parametrize(
    ("num_tokens", "found"),
    [(0, []), (1, []), (3, []), (4, []), (5, [4]), (7, [4]), (8, [4]), (9, [4, 8])],
    ids=lambda value: str(value),
)
def test_only_states_strictly_below_the_final_token_are_found(num_tokens, found):
    """trap 6: a prompt of exactly k strides: the last token must still be computed."""
    cache = cache_with([4, 8])
    assert cache.match(hashes(num_tokens), num_tokens) == found


@given(st.integers(1, 6), st.sets(st.integers(1, 9)), st.integers(0, 40))
def test_a_probe_finds_exactly_the_saved_boundaries_below_the_final_token(stride, saved, length):
    """trap 4: property over strides."""
    domain = HashDomain("linear", stride)
    prompt = sequence(range(9 * stride))
    prompt.update_linear_state_hashes(domain)
    cache = LinearStatePrefixCache(stride)
    for slot, index in enumerate(sorted(saved), start=1):
        key = prompt.linear_state_hashes[index - 1]
        cache.insert(key, Checkpoint(slot, index * stride, Namespace()))
    probe = sequence(range(length))
    probe.update_linear_state_hashes(domain)
    wanted = [index * stride for index in sorted(saved) if index * stride <= length - 1]
    assert cache.match(probe.linear_state_hashes, length) == wanted
    cache.check()


def test_a_probe_changes_nothing():
    cache = cache_with([4, 8])
    assert cache.contains(hashes(8)[1]) and not cache.contains(hashes(12)[2])
    cache.match(hashes(12), 12)
    assert len(cache) == 2 and cache.slot_ids() == {1, 2}
    assert not cache.was_evicted(hashes(12)[2])


def test_a_found_checkpoint_knows_its_slot_its_boundary_and_how_it_came_to_be():
    """trap 38: provenance at store and load."""
    cache = cache_with([4, 8])
    entry = cache.find(hashes(8)[1])
    assert entry == Checkpoint(2, 8, Namespace(), Provenance.PREFILL)
    assert cache.find(hashes(12)[2]) is None


def test_provenance_is_part_of_what_an_entry_is():
    prefill, decode = (Checkpoint(1, 4, Namespace(), kind) for kind in Provenance)
    assert prefill != decode


@pytest.mark.parametrize("boundary", [0, -4, 3, 5, 6])
def test_a_state_off_the_grid_is_not_filed(boundary):
    cache = LinearStatePrefixCache(4)
    with pytest.raises(AssertionError):
        cache.insert(hashes(4)[0], Checkpoint(1, boundary, Namespace()))
    assert len(cache) == 0


def test_a_forgotten_checkpoint_is_not_found_but_remembered_as_evicted():
    cache = cache_with([4, 8])
    key = hashes(8)[0]
    assert not cache.was_evicted(key)
    cache.forget(1)
    assert cache.match(hashes(40), 40) == [8]
    assert cache.was_evicted(key) and not cache.was_evicted(hashes(8)[1])
    cache.check()


def test_a_checkpoint_saved_again_is_no_longer_remembered_as_evicted():
    cache = cache_with([4])
    cache.forget(1)
    cache.insert(hashes(4)[0], Checkpoint(3, 4, Namespace()))
    assert not cache.was_evicted(hashes(4)[0])


def test_the_oldest_eviction_is_dropped_from_a_bounded_memory(monkeypatch):
    monkeypatch.setattr(linear_state_prefix_cache, "_REMEMBERED_EVICTIONS", 2)
    cache = cache_with([4, 8, 12])
    for slot in (2, 1, 3):
        cache.forget(slot)
    assert [cache.was_evicted(key) for key in hashes(12)] == [True, False, True]


def test_namespaces_are_counted_while_they_hold_a_state():
    cache = LinearStatePrefixCache(4)
    mine, other = Namespace(cache_salt="mine"), Namespace(cache_salt="other")
    assert not cache.holds_only_other_namespaces(mine)
    cache.insert(hashes(8, salt="other")[0], Checkpoint(1, 4, other))
    cache.insert(hashes(8, salt="other")[1], Checkpoint(2, 8, other))
    assert cache.holds_only_other_namespaces(mine)
    cache.insert(hashes(4, salt="mine")[0], Checkpoint(3, 4, mine))
    assert not cache.holds_only_other_namespaces(mine)
    cache.forget(3)
    assert cache.holds_only_other_namespaces(mine)
    cache.forget(1)
    assert cache.holds_only_other_namespaces(mine)
    cache.forget(2)
    assert not cache.holds_only_other_namespaces(mine)
    cache.check()


def test_check_sees_an_entry_filed_under_another_slot_or_off_the_grid():
    for slot, boundary in ((2, 4), (1, 5)):
        cache = cache_with([4])
        cache.check()
        cache._index._by_key[hashes(4)[0]] = (1, Checkpoint(slot, boundary, Namespace()))
        with pytest.raises(AssertionError):
            cache.check()


def test_check_sees_a_namespace_that_is_counted_twice():
    cache = cache_with([4])
    cache._by_namespace[Namespace()] += 1
    with pytest.raises(AssertionError):
        cache.check()
