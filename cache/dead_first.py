"""Evictable K/V blocks: those that no saved state needs, and all others, each in LRU order."""

from collections.abc import Callable, Iterator

from cache.eviction import Lru, Untold


class DeadFirst(Untold):
    """Two LRU lines. An id must be discarded before it changes its line, and added after it.

    Which dead one goes is for the pool to say (`SharedBlocks`): it looks at their pages.
    """

    def __init__(self, is_live: Callable[[int], bool]) -> None:
        self._is_live = is_live
        self.dead = Lru()
        self._live = Lru()

    def add(self, id_: int) -> None:
        (self._live if self._is_live(id_) else self.dead).add(id_)

    def discard(self, id_: int) -> None:
        self.dead.discard(id_)
        self._live.discard(id_)

    def evict(self) -> int:
        assert not self.dead, "dead ones go first"
        return self._live.evict()

    def forget(self, id_: int) -> None:
        self.discard(id_)

    def clear(self) -> None:
        self.dead.clear()
        self._live.clear()

    def __contains__(self, id_: object) -> bool:
        return id_ in self.dead or id_ in self._live

    def __iter__(self) -> Iterator[int]:
        yield from self.dead
        yield from self._live

    def __len__(self) -> int:
        return len(self.dead) + len(self._live)
