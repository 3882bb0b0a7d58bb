"""What was used long ago and saves little work goes first."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf, isclose, log2

from cache.eviction import Flops, Kind, Lru, prefill_flops
from cache.hashing import PrefixHash
from cache.saved_states import SavedStates

_STALE = 1024  # entries that are out of date, beside one for each id, before heaps are cleaned


class FlopAware(Lru):
    """The lowest (recency + alpha x work saved per byte) goes first, both normalised.

    Recency: 0 for the evictable id that was released longest ago, 1 for now. Work saved: a prefill
    from the next shallower state to this one, over the mean of all evictable ones. (As a share of
    the largest, one prompt of a million tokens would leave nothing to the others.) All states have
    equal bytes. Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs" (2024).

    As the scales move with time no order of all ids lasts: ids of nearly equal work (2 ** (1/4))
    wait in one heap, the one released longest ago on top, and the tops are compared. O(log n)
    amortised and the number of heaps, under a hundred; once as many entries are out of date as
    there are ids, and a thousand, the heaps are cleaned. The next shallower state is that of when
    this one was saved, or if that goes the next one above it.
    """

    def __init__(self, alpha: float, flops: Flops = prefill_flops) -> None:
        super().__init__()
        if not 0.0 <= alpha < inf:
            raise ValueError(f"alpha must be a finite number >= 0, got {alpha}")
        self.alpha = alpha
        self._flops = flops
        self._states = SavedStates()
        self._num_released = 0
        self._reset()

    def _reset(self) -> None:
        self._released: dict[int, int] = {}
        self._work: dict[int, float] = {}  # of the evictable ids, and the sum of it
        self._total = 0.0
        self._heaps: dict[int, list[tuple[int, int]]] = {}  # (released, id); may be out of date
        self._num_pushed = 0  # since the heaps were cleaned

    def clear(self) -> None:
        super().clear()
        self._states.clear()
        self._reset()

    def saved(self, id_: int, boundary: int, keys: Sequence[PrefixHash], kind: Kind) -> None:
        self._states.insert(id_, boundary, keys)

    def add(self, id_: int) -> None:
        super().add(id_)
        self._num_released += 1
        self._released[id_] = self._num_released
        self._weigh(id_)

    def _weigh(self, id_: int) -> None:
        """Put an evictable id into the heap of the work that it saves now."""
        work = 0.0
        if id_ in self._states:
            work = self._flops(self._states.parent_boundary(id_), self._states[id_].boundary)
        self._total += work - self._work.get(id_, 0.0)
        self._work[id_] = work
        self._num_pushed += 1
        if self._num_pushed > len(self) + _STALE:
            self._drop_stale()
        heappush(self._heaps.setdefault(_size_class(work), []), (self._released[id_], id_))

    def discard(self, id_: int) -> None:
        if id_ in self:
            super().discard(id_)
            self._total -= self._work.pop(id_)
            del self._released[id_]

    def forget(self, id_: int) -> None:
        self.discard(id_)
        if id_ in self._states:
            children = sorted(self._states[id_].children)
            self._states.remove(id_)
            for child in children:
                if child in self:
                    self._weigh(child)

    def evict(self) -> int:
        tops = self._tops()
        oldest = min(tops)[0]
        span = max(1, self._num_released - oldest)
        mean = self._total / len(self) or 1.0

        def score(top: tuple[int, int]) -> tuple[float, int]:
            released, id_ = top
            return (released - oldest) / span + self.alpha * self._work[id_] / mean, released

        id_ = min(tops, key=score)[1]
        self.forget(id_)
        return id_

    def _tops(self) -> list[tuple[int, int]]:
        """Of each heap, after what is out of date there is gone."""
        tops = []
        for size_class, heap in list(self._heaps.items()):
            while heap and not self._is_valid(size_class, *heap[0]):
                heappop(heap)
            if heap:
                tops.append(heap[0])
            else:
                del self._heaps[size_class]
        return tops

    def _drop_stale(self) -> None:
        """Leave only what is valid in the heaps."""
        self._num_pushed = 0
        for size_class, heap in self._heaps.items():
            self._heaps[size_class] = [top for top in heap if self._is_valid(size_class, *top)]
            heapify(self._heaps[size_class])

    def _is_valid(self, size_class: int, released: int, id_: int) -> bool:
        return self._released.get(id_) == released and _size_class(self._work[id_]) == size_class

    def check(self) -> None:
        self._states.check()
        entries = {(c, *entry) for c, heap in self._heaps.items() for entry in heap}
        valid = sorted(id_ for c, released, id_ in entries if self._is_valid(c, released, id_))
        assert valid == sorted(self), "heaps and evictable ids disagree"
        assert len(entries) <= 2 * (len(self._states) + len(self) + _STALE + 1), "not cleaned"
        assert isclose(self._total, sum(self._work.values()), rel_tol=1e-6, abs_tol=1e-6)


def _size_class(work: float) -> int:
    return int(4 * log2(work)) if work >= 1.0 else -1
