"""The K/V blocks of a shared memory: pages come, get idle and go."""

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from cache.block_pool import BlockPool
from cache.dead_first import DeadFirst

if TYPE_CHECKING:
    from cache.shared_memory import SharedMemory


class SharedBlocks(BlockPool):
    """K/V blocks of a shared memory. Ids of pages that are not K/V are neither free nor evictable.

    A block is busy while it is referenced or live; the others of a K/V page, free or dead, are
    spare. Spare ones of pages that have busy ones are used first, so that whole pages get idle.
    """

    def __init__(self, memory: "SharedMemory") -> None:
        self._memory = memory
        self._per_page = memory.blocks_per_page
        self._line = DeadFirst(self.is_live)
        super().__init__(memory.num_pages * memory.blocks_per_page, policy=self._line)

    def serve(self, on_evict: Callable[[int], object]) -> "SharedBlocks":
        """For whoever keeps the index."""
        assert self._on_evict is None, "the blocks serve somebody already"
        self._on_evict = on_evict
        return self

    def reset(self) -> None:
        self._live = bytearray(self.num_ids)
        super().reset()
        self._free.clear()  # see _spare
        self._spare: dict[int, OrderedDict[int, None]] = {}  # of every K/V page
        self._num_spare = 0
        self._partly_busy: OrderedDict[int, None] = OrderedDict()
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first
        self._memory.paths.clear()
        self._memory.take_back_all(self)

    @property
    def num_idle_pages(self) -> int:
        """K/V pages that hold nothing but dead content."""
        return len(self._idle)

    @property
    def num_free(self) -> int:
        return self._num_spare - len(self._line.dead)

    @property
    def num_available(self) -> int:
        more = self._memory.num_pages_for_blocks * self._per_page
        return self.num_free + self.num_evictable + more

    @property
    def capacity(self) -> int:
        pages = self._memory.num_pages - 1 - self._memory.most_reserved
        return max(0, pages) * self._per_page

    @property
    def num_total(self) -> int:
        return len(self._spare) * self._per_page

    @property
    def num_in_use(self) -> int:
        return self.num_total - self.num_free - self.num_evictable

    def is_live(self, id_: int) -> bool:
        """Whether a saved state needs it."""
        return bool(self._live[id_])

    def is_dead(self, id_: int) -> bool:
        return id_ in self._line.dead

    def _take_free(self) -> int | None:
        """A spare block, on a page that is partly busy if there is one. It stays among the spare
        ones for now."""
        while not self._partly_busy:
            page = self._memory.page_for_blocks()
            if page is not None:
                self._add_page(page)
                return self._emptied(page)
            if self._idle:
                return self._emptied(next(iter(self._idle)))
            if not self._memory.slots.evict_one():
                return None
        return self._emptied(next(iter(self._partly_busy)))

    def _emptied(self, page: int) -> int:
        id_ = next(iter(self._spare[page]))
        if id_ in self._line:
            self._line.discard(id_)
            self._evicted(id_)
        return id_

    def _add_page(self, page: int) -> None:
        self._spare[page] = OrderedDict.fromkeys(self._ids_of(page))
        self._num_spare += self._per_page
        self._idle[page] = None

    def _ids_of(self, page: int) -> range:
        return range(page * self._per_page, (page + 1) * self._per_page)

    def _set_free(self, id_: int) -> None:
        """It is spare, or will be at once."""

    def _evicted(self, id_: int) -> None:
        if self._live[id_]:
            self._memory.lose_block(id_)
        super()._evicted(id_)

    def allocate(self) -> int | None:
        id_ = super().allocate()
        if id_ is not None:
            self._get_busy(id_)
        return id_

    def acquire(self, id_: int) -> None:
        if self._refs[id_] == 0 and not self._live[id_]:
            self._get_busy(id_)
        super().acquire(id_)

    def release(self, id_: int) -> None:
        super().release(id_)
        if self._refs[id_] == 0 and not self._live[id_]:
            self._get_spare(id_)

    def unpublish(self, id_: int) -> None:
        if self._live[id_]:
            self._memory.lose_block(id_)
        super().unpublish(id_)

    def revive(self, ids: list[int]) -> None:
        """A state needs these from now on."""
        self._set_live(ids, live=True)

    def let_die(self, ids: list[int]) -> None:
        """No state needs these any more."""
        self._set_live(ids, live=False)

    def _set_live(self, ids: list[int], *, live: bool) -> None:
        for id_ in ids:
            evictable = id_ in self._line
            self._line.discard(id_)
            self._live[id_] = live
            if self._refs[id_] == 0:
                (self._get_busy if live else self._get_spare)(id_)
            if evictable:
                self._line.add(id_)

    def empty_a_page(self) -> int | None:
        """Evict what is left on the page that is idle for longest, and give the page away."""
        if not self._idle:
            return None
        page, _ = self._idle.popitem(last=False)
        for id_ in self._spare.pop(page):
            if id_ in self._line:
                self._line.discard(id_)
                self._evicted(id_)
        self._num_spare -= self._per_page
        return page

    def _get_busy(self, id_: int) -> None:
        page = id_ // self._per_page
        spare = self._spare[page]
        del spare[id_]
        self._num_spare -= 1
        if len(spare) == self._per_page - 1:
            del self._idle[page]
            self._partly_busy[page] = None
        if not spare:
            del self._partly_busy[page]

    def _get_spare(self, id_: int) -> None:
        page = id_ // self._per_page
        spare = self._spare[page]
        if not spare:
            self._partly_busy[page] = None
        spare[id_] = None
        self._num_spare += 1
        if len(spare) == self._per_page:
            del self._partly_busy[page]
            self._idle[page] = None

    def check(self) -> None:
        assert min(self._refs) >= 0, "negative reference count"
        assert self._num_spare == sum(map(len, self._spare.values()))
        for page, owner in enumerate(self._memory.owners):
            assert (page in self._spare) == (owner is self), f"use of page {page}"
            spare = self._spare.get(page, OrderedDict())
            for id_ in self._ids_of(page):
                busy = self._refs[id_] > 0 or self.is_live(id_)
                assert (id_ in spare) == (owner is self and not busy), f"block {id_} is lost"
                evictable = self._published[id_] and self._refs[id_] == 0
                assert (id_ in self._line) == evictable, f"block {id_} is not in line"
                assert owner is self or not (busy or evictable), f"block {id_} has no page"
                assert self._published[id_] or not self.is_live(id_), f"block {id_} is private"
            num = len(spare)
            assert (page in self._idle) == (num == self._per_page)
            assert (page in self._partly_busy) == (0 < num < self._per_page)
        assert all(self.is_live(id_) != self.is_dead(id_) for id_ in self._line)
