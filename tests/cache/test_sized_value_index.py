"""The learnt value by the memory that an eviction frees: literal orders, with linear work."""

import pytest

from cache.eviction import Kind, Lru
from cache.policy_names import parse_policy
from cache.shared_memory import SharedMemory
from cache.sized_value_index import SizedValueIndex
from cache.value_index import ValueIndex

TOKENS = 4  # of a page's K/V: one block


class Cache:
    """States of texts in blocks of 4 tokens; their K/V is not referenced, their slots neither."""

    def __init__(self, num_pages, *, sized=True):
        self.memory = SharedMemory(num_pages, 1)
        policy = (
            SizedValueIndex(self.memory, TOKENS, flops=lambda start, end: end - start)
            if sized
            else ValueIndex(flops=lambda start, end: end - start)
        )
        self.evicted = []
        self.slots = self.memory.slots.serve(self.evicted.append, policy)
        self.blocks = self.memory.blocks.serve(lambda id_: None)

    def state(self, text, num_blocks, above=None, start=0, kind=Kind.TIP):
        """At the end of `num_blocks` blocks of this text; K/V from block `start` on is new."""
        ids = [self.blocks.allocate() for _ in range(num_blocks - start)]
        for id_ in ids:
            self.blocks.publish(id_)
        slot = self.slots.allocate()
        self.slots.publish(slot)
        self.memory.add_state(slot, above, ids)
        keys = [f"{text}{index}" for index in range(num_blocks)]
        self.slots.policy.saved(slot, TOKENS * num_blocks, keys, kind)
        for id_ in reversed(ids):
            self.blocks.release(id_)
        self.slots.release(slot)
        return slot

    def evict(self, count):
        for _ in range(count):
            assert self.slots.evict_one()
            self.slots.policy.check()
            self.memory.check()
        return self.evicted


def test_the_deepest_state_frees_its_k_v_too_and_goes_before_one_that_saves_as_much():
    for sized in (True, False):
        cache = Cache(20, sized=sized)
        shallow = cache.state("a", 1, kind=Kind.COMB)
        deep = cache.state("a", 2, shallow, 1, kind=Kind.COMB)
        assert cache.evict(1) == [deep if sized else shallow]


def test_a_longer_path_is_worth_more_for_its_page_than_a_shorter_one():
    cache = Cache(20)
    longer = cache.state("a", 3)
    shorter = cache.state("b", 2)
    assert cache.evict(2) == [shorter, longer]


def test_a_state_that_has_become_the_deepest_goes_before_others_worth_more():
    cache = Cache(30)
    first = cache.state("a", 1, kind=Kind.COMB)  # 4 tokens for a page, then for two
    second = cache.state("a", 2, first, 1, kind=Kind.COMB)  # 4 for two
    other = cache.state("b", 5, kind=Kind.COMB)  # 20 for six
    assert cache.evict(3) == [second, first, other]


def test_two_at_a_fork_are_worth_what_only_they_need():
    cache = Cache(40)
    trunk = cache.state("a", 3, kind=Kind.COMB)
    one = cache.state("a", 5, trunk, 3, kind=Kind.COMB)
    assert cache.memory.pages_freed_by(trunk) == 1.0
    assert cache.memory.pages_freed_by(one) == 3.0
    assert cache.evict(1) == [one]
    assert cache.memory.pages_freed_by(trunk) == 4.0


@pytest.mark.parametrize(("kind", "pages"), [(Kind.TIP, 3.0), (Kind.COMB, 1.0), (Kind.BRANCH, 1.0)])
def test_a_new_state_is_weighed_with_its_k_v_if_it_is_a_prompts_end(kind, pages):
    memory = SharedMemory(4, 1)
    sized = SizedValueIndex(memory, TOKENS)
    assert sized.worth(16, 8, kind) == pytest.approx(ValueIndex().worth(16, 8, kind) / pages)


def test_value_is_value_a_page_where_memory_is_shared_and_only_there():
    memory = SharedMemory(4, 1)
    sized = parse_policy("value", memory=memory, tokens_per_page=TOKENS)
    assert type(sized) is SizedValueIndex and type(parse_policy("value")) is ValueIndex
    plain = ValueIndex().worth(16, 8, Kind.TIP)
    assert sized.worth(16, 8, Kind.TIP) == pytest.approx(plain / 3.0)
    assert type(parse_policy("lru", memory=memory)) is Lru
