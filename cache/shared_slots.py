"""The state slots of a shared memory: a slot is a page."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from cache.block_pool import BlockPool
from cache.eviction import EvictionPolicy

if TYPE_CHECKING:
    from cache.shared_memory import SharedMemory


class SharedSlots(BlockPool):
    """Slots of a shared memory. An id is free while its page is unused, or holds dead K/V only."""

    def __init__(self, memory: "SharedMemory") -> None:
        self._memory = memory
        super().__init__(memory.num_pages)

    def serve(
        self, on_evict: Callable[[int], object], policy: EvictionPolicy | None
    ) -> "SharedSlots":
        """For whoever keeps the index. policy: None: LRU."""
        assert self._on_evict is None, "the slots serve somebody already"
        self._on_evict = on_evict
        if policy is not None:
            self._evictable = policy
        return self

    def reset(self) -> None:
        super().reset()
        self._free.clear()  # what is free is for the memory to say
        self._memory.take_back_all(self)

    @property
    def num_free(self) -> int:
        return len(self._memory.unused) + self._memory.blocks.num_idle_pages

    @property
    def num_available(self) -> int:
        return self.num_free + self.num_evictable

    @property
    def num_total(self) -> int:
        """Those that are K/V and needed are none."""
        return self._memory.owners.count(self) + self.num_free

    @property
    def num_in_use(self) -> int:
        return self._memory.owners.count(self) - self.num_evictable

    def _take_free(self) -> int | None:
        return self._memory.page_for_slot()

    def _set_free(self, id_: int) -> None:
        self._memory.give_back(id_)

    def _evicted(self, id_: int) -> None:
        super()._evicted(id_)
        self._memory.forget_state(id_)

    def unpublish(self, id_: int) -> None:
        self._memory.forget_state(id_)
        super().unpublish(id_)

    def evict_one(self) -> bool:
        """Make an unused page of the state that is next to go; False: none is evictable."""
        if not self._evictable:
            return False
        id_ = self._evictable.evict()
        self._evicted(id_)
        self._set_free(id_)
        return True

    def drop(self, id_: int) -> None:
        """A published state is worth nothing any more, whoever reads it now."""
        self._evictable.forget(id_)
        self._evicted(id_)
        if self._refs[id_] == 0:
            self._set_free(id_)

    def check(self) -> None:
        self._evictable.check()
        for id_ in range(1, self.num_ids):
            held = self._refs[id_] > 0 or id_ in self._evictable
            assert held == (self._memory.owners[id_] is self), f"page of slot {id_}"
            assert self._published[id_] or id_ not in self._evictable
            assert self._refs[id_] == 0 or id_ not in self._evictable
        assert min(self._refs) >= 0 and not self._refs[0] and not self._published[0]
