"""One budget for K/V blocks and state slots: pages that become the one or the other as needed.

A page holds one state slot or `blocks_per_page` K/V blocks: slot s is page s, and block b lies in
page b // blocks_per_page, so that both are strided views of one arena. Page 0 is padding.

States decide, K/V follows. K/V that no saved state needs is dead and goes first; then the state
policy names the state that goes, and what only that one needed is dead from then on.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cache.block_pool import BlockPool
from cache.cached_sequence import CachedSequence
from cache.hashing import Provenance
from cache.kv_paths import KVPaths
from cache.shared_blocks import SharedBlocks
from cache.shared_slots import SharedSlots

Published = Callable[[CachedSequence, int, int, Provenance], list[int] | None]


SPARE_SLOTS = 2
"""Pages that K/V leaves besides those of all live slots: a source that a step pins, and one more"""

_ALIGN_BYTES = 64


@dataclass(frozen=True)
class PageLayout:
    """A page of `page_bytes` holds a slot at its begin, or `blocks_per_page` K/V blocks, one each
    `block_bytes`."""

    block_bytes: int
    blocks_per_page: int

    @property
    def page_bytes(self) -> int:
        return self.block_bytes * self.blocks_per_page

    @classmethod
    def fitting(cls, slot_bytes: int, block_bytes: int) -> "PageLayout":
        """Where the least is lost: blocks spread until they hold a slot, or a slot padded until it
        holds whole blocks. Both sizes as they are, at least 1."""
        few = max(1, slot_bytes // block_bytes)
        layouts = []
        for count in (few, few + 1):
            spread = max(block_bytes, -(-slot_bytes // count))
            layouts.append(cls(-(-spread // _ALIGN_BYTES) * _ALIGN_BYTES, count))

        def lost(layout: PageLayout) -> float:
            kept = min(slot_bytes, layout.blocks_per_page * block_bytes)
            return 1.0 - kept / layout.page_bytes

        return min(layouts, key=lost)


class SharedMemory:
    """Which page is what. Each is unused, or belongs to `slots`, or to `blocks`.

    reserved: pages that K/V may never have, those of slots now in use not counted. They must be
    unused or hold evictable states, so that a slot can be had at any time. most_reserved: what one
    sequence that runs alone has to leave to all slots together.
    published: the K/V blocks of a part of a sequence, no worse than asked for; None: one is gone.

    Invariants, checked by `check()`:
    1. unused pages and those of both pools are disjoint and are all of [1, num_pages).
    2. a state is published if and only if `paths` knows the K/V that it needs; that is published.
    3. a block is live if and only if it lies in `paths`.
    """

    def __init__(self, num_pages: int, blocks_per_page: int) -> None:
        if num_pages < 2 or blocks_per_page < 1:
            raise ValueError(
                f"shared memory needs at least 2 pages (page 0 is padding) of at least 1 block, "
                f"got {num_pages} of {blocks_per_page}"
            )
        self.num_pages = num_pages
        self.blocks_per_page = blocks_per_page
        self.reserved: Callable[[], int] = lambda: 0
        self.on_growth: Callable[[int], object] = lambda slot: None
        self.most_reserved = 0
        self.published: Published = lambda seq, start, end, least: None
        self.paths = KVPaths()
        self.owners: list[BlockPool | None] = [None] * num_pages
        self.unused = deque(range(1, num_pages))
        self.slots = SharedSlots(self)
        self.blocks = SharedBlocks(self)

    @property
    def num_pages_for_blocks(self) -> int:
        """Pages that K/V could still have, by evicting states if it must."""
        return max(0, len(self.unused) + self.slots.num_evictable - self.reserved())

    def page_for_blocks(self) -> int | None:
        """An unused page, if K/V may have it."""
        if not self.unused or not self.num_pages_for_blocks:
            return None
        return self._owned(self.unused.popleft(), self.blocks)

    def page_for_slot(self) -> int | None:
        """An unused page, or one of dead K/V. The latter first, where no more than the reserve
        would be left: K/V could take it back."""
        ample = len(self.unused) + self.slots.num_evictable > self.reserved()
        if self.unused and (ample or not self.blocks.num_idle_pages):
            return self._owned(self.unused.popleft(), self.slots)
        page = self.blocks.empty_a_page()
        return None if page is None else self._owned(page, self.slots)

    def _owned(self, page: int, pool: BlockPool) -> int:
        self.owners[page] = pool
        return page

    def give_back(self, page: int) -> None:
        """Nothing is left on it."""
        self.owners[page] = None
        self.unused.append(page)

    def take_back_all(self, pool: BlockPool) -> None:
        """It was reset: everything that it held is void."""
        for page, owner in enumerate(self.owners):
            if owner is pool:
                self.give_back(page)

    # ---- states and what they need

    def add_state(self, slot: int, above: int | None, blocks: list[int]) -> None:
        """A published state needs the K/V of the state `above` (None: nothing) and these blocks."""
        self.blocks.revive(self.paths.insert(slot, above, blocks))

    def forget_state(self, slot: int) -> None:
        """It is no longer published."""
        if slot in self.paths:
            self.blocks.let_die(self.paths.remove(slot))
            for state in self.paths.grown:
                self.on_growth(state)

    def pages_freed_by(self, slot: int) -> float:
        """What evicting a published state frees: its own page, and K/V that only it needs."""
        return 1.0 + self.paths.num_freed_by(slot) / self.blocks_per_page

    def lose_block(self, block: int) -> None:
        """Its content goes: the states that need it are dead, and so not to be kept."""
        for slot in self.paths.needing(block):
            self.slots.drop(slot)

    def check(self) -> None:
        self.paths.check()
        assert self.owners[0] is None and 0 not in self.unused, "page 0 is in use"
        unused = {page for page in range(1, self.num_pages) if self.owners[page] is None}
        assert unused == set(self.unused) and len(unused) == len(self.unused), "a page is lost"
        for slot in range(1, self.num_pages):
            assert self.slots.is_published(slot) == (slot in self.paths), f"path of state {slot}"
        needed = set(self.paths.blocks())
        assert all(self.blocks.is_published(block) for block in needed), "needed K/V is gone"
        live = {b for b in range(self.blocks.num_ids) if self.blocks.is_live(b)}
        assert live == needed, "live and needed blocks differ"
