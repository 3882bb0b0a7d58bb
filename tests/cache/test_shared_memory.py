"""One budget for K/V and states: which page becomes what, and what goes first, by literal ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.hashing import Provenance
from cache.shared_memory import PageLayout, SharedMemory
from tests.cache.builders import composite, prefilled, run, schedule, sequence, served


class Memory:
    """A shared memory alone; `gone` notes what was evicted, in order: ("slot" | "block", id)."""

    def __init__(self, num_pages, *, blocks_per_page=2, reserved=0):
        self.memory = SharedMemory(num_pages, blocks_per_page)
        self.memory.reserved = lambda: reserved
        self.gone = []
        self.slots = self.memory.slots.serve(lambda id_: self.gone.append(("slot", id_)), None)
        self.blocks = self.memory.blocks.serve(lambda id_: self.gone.append(("block", id_)))

    def kv(self, count):
        """Published blocks that nobody refers to any more, and no state needs yet."""
        ids = [self.blocks.allocate() for _ in range(count)]
        for id_ in ids:
            self.blocks.publish(id_)
        for id_ in reversed(ids):
            self.blocks.release(id_)
        return ids

    def state(self, above, blocks):
        """A checkpoint that needs these blocks besides those of `above`."""
        slot = self.slots.allocate()
        self.slots.publish(slot)
        self.memory.add_state(slot, above, blocks)
        self.slots.release(slot)
        self.check()
        return slot

    def check(self):
        self.memory.check()
        self.slots.check()
        self.blocks.check()


def test_a_page_becomes_a_slot_or_blocks_of_consecutive_ids():
    it = Memory(4, blocks_per_page=3)
    assert it.slots.allocate() == 1
    assert [it.blocks.allocate() for _ in range(4)] == [6, 7, 8, 9]
    assert it.slots.allocate() is None
    assert [it.blocks.allocate() for _ in range(3)] == [10, 11, None]
    it.check()
    assert (it.slots.num_in_use, it.blocks.num_in_use) == (1, 6)


@pytest.mark.parametrize(("num_pages", "blocks_per_page"), [(1, 1), (2, 0)])
def test_too_small_a_memory_is_refused(num_pages, blocks_per_page):
    with pytest.raises(ValueError, match=rf"at least 2 pages.*got {num_pages} of"):
        SharedMemory(num_pages, blocks_per_page)


def test_a_page_that_a_slot_gave_back_becomes_k_v_and_the_other_way_round():
    it = Memory(2)
    slot = it.slots.allocate()
    assert it.blocks.allocate() is None
    it.slots.release(slot)
    block = it.blocks.allocate()
    assert block == 2 and it.slots.allocate() is None
    it.blocks.release(block)
    it.check()
    assert it.slots.allocate() == 1 and it.gone == []
    it.check()


def test_dead_k_v_goes_before_any_state_and_needed_k_v_only_with_its_state():
    it = Memory(4)
    needed = it.kv(2)
    state = it.state(None, needed)
    dead = it.kv(1)
    assert (needed, state, dead) == ([2, 3], 2, [6])
    assert [it.blocks.allocate() for _ in range(2)] == [7, 6]
    assert it.gone == [("block", 6)]
    assert [it.blocks.allocate() for _ in range(2)] == [4, 5]  # the page of the state
    assert it.gone == [("block", 6), ("slot", 2)]
    it.check()
    assert [it.blocks.allocate() for _ in range(3)] == [3, 2, None]  # the deepest first
    assert it.gone[2:] == [("block", 3), ("block", 2)]
    it.check()


def test_a_slot_takes_an_unused_page_then_one_of_dead_k_v_then_that_of_a_state():
    it = Memory(5)
    older = it.state(None, it.kv(2))
    dead = it.kv(2)
    assert (older, dead) == (2, [6, 7])
    assert it.slots.allocate() == 4 and it.gone == []
    assert it.slots.allocate() == 3
    assert sorted(it.gone) == [("block", 6), ("block", 7)]
    assert it.slots.allocate() == 2 and it.gone[2:] == [("slot", 2)]
    assert it.slots.allocate() == 1  # its K/V died with it
    assert it.slots.allocate() is None
    it.check()


def test_k_v_between_two_states_dies_with_the_deeper_one():
    it = Memory(8)
    first = it.kv(2)
    shallow = it.state(None, first)
    second = it.kv(2)
    deep = it.state(shallow, second)
    assert [it.blocks.is_live(id_) for id_ in (*first, *second)] == [True] * 4
    it.slots.unpublish(deep)
    it.check()
    assert [it.blocks.is_live(id_) for id_ in (*first, *second)] == [True, True, False, False]
    assert it.blocks.is_dead(second[0]) and not it.blocks.is_dead(first[0])
    assert it.memory.pages_freed_by(shallow) == 2.0


def test_blocks_on_busy_pages_are_used_before_an_idle_page_is_touched():
    it = Memory(6)
    blocks = it.kv(4)  # pages 1 and 2
    assert blocks == [2, 3, 4, 5]
    it.blocks.acquire(4)
    assert it.blocks.num_idle_pages == 1
    assert it.blocks.allocate() == 5
    assert it.slots.num_free == 4  # pages 1, 3, 4 and 5


def test_unused_pages_are_taken_before_dead_k_v_is_lost():
    it = Memory(4)
    it.kv(4)
    assert it.blocks.allocate() == 6 and it.gone == []


def test_k_v_leaves_the_reserve_to_the_slots():
    it = Memory(5, reserved=2)
    assert it.blocks.num_available == 4
    assert [it.blocks.allocate() for _ in range(5)] == [2, 3, 4, 5, None]
    assert [it.slots.allocate() for _ in range(3)] == [3, 4, None]
    it.check()


def test_states_count_for_the_reserve_and_a_scarce_slot_takes_dead_k_v_first():
    it = Memory(5, reserved=2)
    state = it.state(None, it.kv(2))
    it.kv(2)  # page 3; page 4 is unused
    assert state == 2 and it.blocks.num_available == 4
    assert it.slots.allocate() == 3, "the unused page is of the reserve"
    it.check()


def test_the_least_recently_used_state_goes_and_a_referenced_one_stays():
    it = Memory(7, blocks_per_page=1)
    states = [it.state(None, it.kv(1)) for _ in range(3)]
    assert states == [2, 4, 6]
    it.slots.acquire(2)
    assert (it.slots.num_free, it.slots.num_evictable, it.slots.num_available) == (0, 2, 2)
    assert [it.slots.allocate() for _ in range(5)] == [4, 3, 6, 5, None]
    assert it.gone == [("slot", 4), ("block", 3), ("slot", 6), ("block", 5)]
    it.check()


def test_needed_k_v_of_states_in_use_is_the_last_to_go_and_the_state_with_it():
    it = Memory(3, blocks_per_page=1)
    state = it.state(None, it.kv(1))
    it.slots.acquire(state)
    assert it.slots.allocate() is None
    assert it.blocks.num_available == 1
    assert it.blocks.allocate() == 1
    assert it.gone == [("slot", state), ("block", 1)]
    it.check()


def test_a_state_whose_k_v_is_gone_is_dropped_at_once():
    it = Memory(6)
    first, second = it.kv(2), it.kv(2)
    shallow = it.state(None, first)
    deep = it.state(shallow, second)
    it.slots.acquire(shallow)
    it.blocks.unpublish(second[0])
    it.check()
    assert it.gone == [("slot", deep)]
    it.blocks.unpublish(first[1])
    it.check()
    assert it.gone == [("slot", deep), ("slot", shallow)]
    assert it.slots.ref_count(shallow) == 1 and not it.slots.is_published(shallow)
    it.slots.release(shallow)
    it.check()
    assert it.slots.num_in_use == 0


def test_after_a_reset_every_page_is_unused():
    it = Memory(6)
    it.state(None, it.kv(2))
    it.kv(2)
    it.slots.allocate()
    it.blocks.allocate()
    it.blocks.reset()
    it.slots.reset()
    it.check()
    assert (it.slots.num_free, it.slots.num_in_use, it.blocks.num_in_use) == (5, 0, 0)
    assert it.blocks.num_available == 10 and len(it.memory.paths) == 0


# ---- the layout of a page


@pytest.mark.parametrize(
    ("slot_bytes", "block_bytes", "expected"),
    [
        (51_500_000, 2 << 20, (2 << 20, 25)),  # 1.8 % of a slot's page is lost
        (51_500_000, 16 << 20, (17_166_720, 3)),  # 2.3 % of the K/V, instead of 23 % of states
        (4096, 4096, (4096, 1)),
        (100, 4096, (4096, 1)),
        (64 * 9, 64 * 10, (64 * 10, 1)),
        (64 * 10, 64 * 9, (64 * 10, 1)),
        (1, 1, (64, 1)),
    ],
)
def test_a_page_holds_a_slot_or_whole_blocks_and_loses_little(slot_bytes, block_bytes, expected):
    layout = PageLayout.fitting(slot_bytes, block_bytes)
    assert (layout.block_bytes, layout.blocks_per_page) == expected
    assert layout.page_bytes == expected[0] * expected[1] >= slot_bytes


@given(st.integers(1, 10**8), st.integers(1, 10**8))
def test_both_always_fit_and_every_view_is_aligned(slot_bytes, block_bytes):
    layout = PageLayout.fitting(slot_bytes, block_bytes)
    assert layout.page_bytes >= slot_bytes and layout.block_bytes >= block_bytes
    assert layout.block_bytes % 64 == 0
    lost = layout.page_bytes - max(slot_bytes, layout.blocks_per_page * block_bytes)
    assert lost <= 64 * layout.blocks_per_page


# ---- below the managers


def manager_of(pages, *, blocks_per_page=2, seqs=1, scratch=0, every=8):
    memory = SharedMemory(pages, blocks_per_page)
    manager = composite(memory=memory, max_num_seqs=seqs, every=every, num_scratch=scratch)
    return manager, memory


def test_k_v_of_a_prompt_lives_as_long_as_the_state_at_its_end():
    manager, memory = manager_of(20)
    served(manager, [1] * 9)
    manager.check([])
    memory.check()
    assert sum(map(memory.blocks.is_live, range(40))) == 4  # 8 tokens; the ninth is in none
    [slot] = manager.linear.cache.slot_ids()
    manager.linear.quarantine(slot)
    memory.check()
    assert sum(map(memory.blocks.is_dead, range(40))) == 4
    assert manager.match(sequence([1] * 9)).kv_reach == 8


def test_dead_blocks_make_way_for_equal_ones_that_a_sequence_computed():
    manager, memory = manager_of(20)
    served(manager, [1] * 9)
    [slot] = manager.linear.cache.slot_ids()
    manager.linear.quarantine(slot)
    old = manager.kv.published(sequence_with_keys(manager), 0, 8, Provenance.PREFILL)
    seq = prefilled(manager, [1] * 9)
    new = manager.kv.published(seq, 0, 8, Provenance.PREFILL)
    assert new == seq.block_table[:4] and not {*new} & {*old}
    manager.release(seq)
    manager.check([])
    memory.check()
    assert manager.match(sequence([1] * 9)).boundary == 8


def test_dead_blocks_of_a_prefill_do_not_make_way_for_decoded_ones():
    manager, memory = manager_of(20)
    served(manager, [1] * 9)
    [slot] = manager.linear.cache.slot_ids()
    manager.linear.quarantine(slot)
    old = manager.kv.published(sequence_with_keys(manager), 0, 8, Provenance.PREFILL)
    seq = sequence([1] * 5, exact=False)
    run(manager, seq, 5)
    for end in (6, 7, 8):
        seq.append_token(1)
        run(manager, seq, end)
    assert manager.kv.published(sequence_with_keys(manager), 4, 8, Provenance.PREFILL) == old[2:]
    manager.check([seq])
    memory.check()


def sequence_with_keys(manager):
    seq = sequence([1] * 9)
    manager.match(seq)
    return seq


def test_a_state_is_not_kept_when_a_part_of_its_k_v_is_gone():
    manager, memory = manager_of(20)
    seq = sequence([1] * 9)
    run(manager, seq, 8)  # the state of 8 is pending
    manager.kv.forget(seq)
    manager.release(seq)
    manager.check([])
    memory.check()
    assert manager.linear.saves_skipped == {"no_kv": 1} and not manager.linear.cache.slot_ids()


def test_forgetting_a_prompt_takes_deeper_states_of_others_along():
    manager, memory = manager_of(30)
    served(manager, [1] * 17)
    assert manager.match(sequence([1] * 17)).boundary == 16
    seq = sequence([1] * 9)
    manager.match(seq)
    manager.forget(seq)
    manager.check([])
    memory.check()
    assert manager.linear.cache.slot_ids() == set()


@pytest.mark.parametrize(("seqs", "scratch"), [(1, 0), (3, 0), (2, 4)])
def test_capacity_is_what_one_sequence_can_have_and_slots_for_all_are_left(seqs, scratch):
    manager, memory = manager_of(20, seqs=seqs, scratch=scratch)
    most = memory.blocks.capacity
    assert most == 2 * (19 - seqs - scratch - 2)
    seq = sequence([1] * (2 * most))
    assert schedule(manager, seq, 2 * most) is not None
    others = [memory.slots.allocate() for _ in range(seqs - 1)]
    assert None not in others
    assert memory.blocks.num_in_use == most


def test_a_pool_of_its_own_can_have_all_but_the_padding():
    assert composite(num_blocks=9).kv.pool.capacity == 8


def test_after_a_reset_in_the_middle_of_a_step_the_largest_request_runs():
    manager, memory = manager_of(12, seqs=2, scratch=1)
    served(manager, [1] * 9)
    seqs = [sequence([2] * 9), sequence([1] * 9)]
    for seq in seqs:
        assert schedule(manager, seq, 9) is not None
    manager.reset(seqs)
    manager.check([])
    memory.check()
    assert memory.slots.num_in_use == 1 and len(memory.unused) == 10
    most = memory.blocks.capacity
    assert most == 2 * (11 - 2 - 1 - 2)
    assert schedule(manager, sequence([3] * 2 * most), 2 * most) is not None
