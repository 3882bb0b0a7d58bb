"""The id pool: who gets which id, in which order, and that none is lost or handed out twice."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.block_pool import BlockPool


def cached(pool: BlockPool, count: int) -> list[int]:
    """Allocate, publish and release `count` ids, one after the other."""
    ids = [pool.allocate() for _ in range(count)]
    for id_ in ids:
        pool.publish(id_)
    for id_ in ids:
        pool.release(id_)
    return ids


def test_ids_are_handed_out_in_ascending_order_and_never_0():
    """trap 18: slot 0 is padding."""
    pool = BlockPool(5)
    assert [pool.allocate() for _ in range(5)] == [1, 2, 3, 4, None]
    pool.check()


def test_a_pool_needs_an_id_beside_the_padding():
    with pytest.raises(ValueError, match=r"at least 2 ids.*got 1"):
        BlockPool(1)
    assert BlockPool(2).allocate() == 1


def test_released_private_ids_are_reused_oldest_release_first():
    pool = BlockPool(4)
    for _ in range(3):
        pool.allocate()
    for id_ in (2, 3, 1):
        pool.release(id_)
    assert [pool.allocate() for _ in range(3)] == [2, 3, 1]


def test_free_ids_are_used_before_any_cached_one_is_evicted():
    pool = BlockPool(5)
    cached(pool, 2)
    assert [pool.allocate() for _ in range(2)] == [3, 4]
    assert pool.num_evictions == 0


def test_the_least_recently_released_id_is_evicted_first():
    evicted: list[int] = []
    pool = BlockPool(5, on_evict=evicted.append)
    ids = [pool.allocate() for _ in range(4)]
    for id_ in ids:
        pool.publish(id_)
    for id_ in (3, 1, 4, 2):
        pool.release(id_)
    assert [pool.allocate() for _ in range(4)] == [3, 1, 4, 2]
    assert evicted == [3, 1, 4, 2]
    assert pool.num_evictions == 4


def test_an_acquired_id_moves_to_the_end_of_the_eviction_order_when_released():
    pool = BlockPool(4)
    cached(pool, 3)
    pool.acquire(1)
    pool.release(1)
    assert [pool.allocate() for _ in range(3)] == [2, 3, 1]


def test_an_evicted_id_is_private_and_the_owner_is_told_before_it_is_handed_out():
    pool = BlockPool(2, on_evict=lambda id_: told.append((id_, pool.ref_count(id_))))
    told: list[tuple[int, int]] = []
    cached(pool, 1)
    assert pool.allocate() == 1
    assert told == [(1, 0)]
    assert not pool.is_published(1)
    pool.release(1)
    assert (pool.num_free, pool.num_evictable) == (1, 0)


def test_a_referenced_id_is_never_evicted():
    """trap 15: a source slot is released (and reused) before the worker read it."""
    pool = BlockPool(3)
    cached(pool, 2)
    pool.acquire(1)
    assert [pool.allocate(), pool.allocate()] == [2, None]
    assert pool.is_published(1)


def test_an_id_with_two_references_stays_until_both_are_given_back():
    pool = BlockPool(2)
    pool.allocate()
    pool.acquire(1)
    pool.release(1)
    assert pool.allocate() is None
    pool.release(1)
    assert pool.allocate() == 1


def test_an_id_held_over_later_frees_does_not_change():
    """trap 23: a handle is a view into the free list and later changes."""
    pool = BlockPool(6)
    handle = pool.allocate()
    others = [pool.allocate() for _ in range(4)]
    for id_ in others:
        pool.release(id_)
    assert handle == 1 and isinstance(handle, int)
    assert 1 not in [pool.allocate() for _ in range(4)]
    assert pool.ref_count(1) == 1


def test_counts_add_up_to_all_ids_but_the_padding():
    """trap 21: free + evictable + in use == total - 1."""
    pool = BlockPool(6)
    cached(pool, 2)
    pool.allocate()
    assert (pool.num_free, pool.num_evictable, pool.num_in_use) == (2, 2, 1)
    assert pool.num_available == 4


def test_unpublishing_an_unreferenced_id_frees_it():
    pool = BlockPool(3)
    cached(pool, 1)
    pool.unpublish(1)
    assert (pool.num_free, pool.num_evictable) == (2, 0)
    assert [pool.allocate(), pool.allocate()] == [2, 1]
    assert pool.num_evictions == 0


def test_unpublishing_a_referenced_id_frees_it_at_its_last_release():
    pool = BlockPool(2)
    pool.allocate()
    pool.publish(1)
    pool.unpublish(1)
    assert pool.num_free == 0
    pool.release(1)
    assert (pool.num_free, pool.num_evictable) == (1, 0)


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda pool: pool.release(2), "released more often"),
        (lambda pool: pool.acquire(2), "id 2 is free"),
        (lambda pool: pool.acquire(0), "id 0 is free"),
        (lambda pool: pool.publish(2), "without a reference"),
        (lambda pool: (pool.publish(1), pool.publish(1)), "published twice"),
        (lambda pool: pool.unpublish(1), "not published"),
    ],
    ids=["release a free id", "acquire a free id", "acquire 0", "publish free", "twice", "un"],
)
def test_misuse_is_an_assertion(misuse, words):
    pool = BlockPool(3)
    pool.allocate()
    with pytest.raises(AssertionError, match=words):
        misuse(pool)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.append(3),
        lambda pool: pool._free.remove(3),
        lambda pool: pool._free.append(1),
        lambda pool: pool._evictable.update({3: None}),
        lambda pool: pool._evictable.update({1: None}),
        lambda pool: pool._refs.__setitem__(3, 1),
        lambda pool: pool._refs.__setitem__(2, -1),
        lambda pool: pool._refs.__setitem__(0, 1),
        lambda pool: pool._published.__setitem__(3, True),
        lambda pool: pool._published.__setitem__(2, False),
        lambda pool: pool._published.__setitem__(0, True),
    ],
)
def test_check_sees_every_kind_of_damage(damage):
    pool = BlockPool(4)  # 1 referenced, 2 evictable, 3 free
    pool.allocate()
    pool.allocate()
    pool.publish(2)
    pool.release(2)
    pool.check()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check()


class PoolBesideAModel(RuleBasedStateMachine):
    """The pool and three plain lists do the same, id for id and in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(6, on_evict=self.evicted.append)
        self.free, self.evictable = [1, 2, 3, 4, 5], []
        self.refs: dict[int, int] = {}
        self.published: set[int] = set()

    @rule()
    def allocate(self) -> None:
        expected = None
        told = list(self.evicted)
        if self.free:
            expected = self.free.pop(0)
        elif self.evictable:
            expected = self.evictable.pop(0)
            self.published.remove(expected)
            told.append(expected)
        assert self.pool.allocate() == expected
        assert self.evicted == told
        if expected is not None:
            self.refs[expected] = 1

    @precondition(lambda self: self.refs or self.evictable)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted([*self.refs, *self.evictable])))
        self.pool.acquire(id_)
        if id_ in self.evictable:
            self.evictable.remove(id_)
        self.refs[id_] = self.refs.get(id_, 0) + 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.release(id_)
        self.refs[id_] -= 1
        if not self.refs[id_]:
            del self.refs[id_]
            (self.evictable if id_ in self.published else self.free).append(id_)

    @precondition(lambda self: set(self.refs) - self.published)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(set(self.refs) - self.published)))
        self.pool.publish(id_)
        self.published.add(id_)

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def unpublish(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.published)))
        self.pool.unpublish(id_)
        self.published.remove(id_)
        if id_ in self.evictable:
            self.evictable.remove(id_)
            self.free.append(id_)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert [self.pool.ref_count(i) for i in range(6)] == [self.refs.get(i, 0) for i in range(6)]
        assert {i for i in range(6) if self.pool.is_published(i)} == self.published
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_evictable == len(self.evictable)
        assert self.pool.num_available == len(self.free) + len(self.evictable)
        assert self.pool.num_in_use == len(self.refs)


TestPoolBesideAModel = PoolBesideAModel.TestCase
TestPoolBesideAModel.settings = settings(max_examples=40, stateful_step_count=40)
