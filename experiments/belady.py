"""What could eviction save at most? The policy that knows which state is used when."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from cache.eviction import Kind, Lru
from cache.hashing import PrefixHash


class Belady(Lru):
    """The state whose next use is the farthest away goes first (Belady, 1966). O(log n).

    uses: by key, the numbers of the requests that resume there when nothing is ever evicted, in
    order; the first request is 0. One that will not be used is not saved where another would have
    to go. All costs count alike, so for unequal ones it is a reference, not a strict bound.
    """

    selective = True

    def __init__(self, uses: dict[PrefixHash, list[int]]) -> None:
        super().__init__()
        self._uses = uses
        self._now = -1
        self._keys: dict[int, PrefixHash] = {}
        self._farthest: list[tuple[float, int]] = []  # (-next use, id); may be out of date
        self._planned: dict[int, PrefixHash] = {}

    def _next_use(self, id_: int) -> float:
        uses = self._uses.get(self._keys[id_], [])
        index = bisect_right(uses, self._now)
        return uses[index] if index < len(uses) else inf

    def request(self, keys: Sequence[PrefixHash], mounted: int | None) -> None:
        self._now += 1

    def plan(self, keys: Sequence[PrefixHash], stride: int) -> None:
        """The prompt whose states are offered next: its keys, one each `stride` tokens."""
        self._planned = {(i + 1) * stride: key for i, key in enumerate(keys)}

    def saved(self, id_: int, boundary: int, keys: Sequence[PrefixHash], kind: Kind) -> None:
        self._keys[id_] = keys[-1]

    def add(self, id_: int) -> None:
        super().add(id_)
        heappush(self._farthest, (-self._next_use(id_), id_))

    def worth(self, boundary: int, above: int, kind: Kind) -> float:
        uses = self._uses.get(self._planned[boundary], [])
        index = bisect_right(uses, self._now)
        return -(uses[index] if index < len(uses) else inf)

    def least_worth(self) -> float:
        while self._farthest:
            use, id_ = self._farthest[0]
            if id_ in self and use == -self._next_use(id_):
                return use
            heappop(self._farthest)
            if id_ in self:
                heappush(self._farthest, (-self._next_use(id_), id_))
        return inf

    def evict(self) -> int:
        self.least_worth()
        _, id_ = heappop(self._farthest)
        super().forget(id_)
        return id_

    def clear(self) -> None:
        super().clear()
        self._farthest.clear()


def uses_by_key(
    prompts: Sequence[Sequence[PrefixHash]], resumed: Sequence[int], stride: int
) -> dict[PrefixHash, list[int]]:
    """resumed: where each prompt did, in unlimited memory; 0: from nothing."""
    uses: dict[PrefixHash, list[int]] = defaultdict(list)
    for number, (keys, boundary) in enumerate(zip(prompts, resumed, strict=True)):
        if boundary:
            uses[keys[boundary // stride - 1]].append(number)
    return uses
