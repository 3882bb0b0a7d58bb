"""Who goes first when a pool is full? The interface of eviction policies, and the plain ones.

Time is counted in requests: `request` moves the clock by one. Nothing here reads a wall clock or
draws a random number, so the same calls evict the same ids.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from math import inf
from typing import Protocol

from cache.hashing import PrefixHash
from cache.saved_states import SavedStates

Flops = Callable[[int, int], float]
"""Cost of prefilling the tokens [start, end): any unit, increasing in `end`."""


def prefill_flops(start: int, end: int) -> float:
    """Of Qwen3.5-9B: 13.98e9 a token, and 65,536 a pair of tokens that attend."""
    return 13.98e9 * (end - start) + 65_536.0 * (end * end - start * start)


class Kind(StrEnum):
    """Why a state was saved, and what became of it."""

    TIP = "tip"  # near the end of a prompt that no other has gone on from yet
    END = "end"  # at its very end, a little below its tip
    SUPERSEDED = "superseded"  # a tip that was gone on from, by another prompt or below its own
    BRANCH = "branch"  # prompts part here
    COMB = "comb"  # on the way, every so many tokens
    WHOLE = "whole"  # after a whole prompt, for an identical one


class EvictionPolicy(Protocol):
    """The evictable ids of a pool, and which of them goes next.

    `BlockPool` calls add, discard, evict, forget and clear. Only the LINEAR leaf tells about
    requests and saved states; a policy must work without, too, if it is to serve K/V blocks.
    selective: a new state is saved only if it is worth more than the one that would go for it.
    """

    selective: bool

    def add(self, id_: int) -> None:
        """A published id lost its last reference."""

    def discard(self, id_: int) -> None:
        """It is referenced again, or was never evictable: then nothing changes."""

    def evict(self) -> int:
        """Take out the next one to go; at least one is evictable."""

    def forget(self, id_: int) -> None:
        """A published id is no longer published, evictable or not; what is known of it is void."""

    def clear(self) -> None:
        """Forget every id, and keep what was learnt."""

    def worth(self, boundary: int, above: int, kind: Kind) -> float:
        """Of a new state. above: the next shallower boundary of its prefix that has a state."""

    def least_worth(self) -> float:
        """Of the one that `evict` would give; infinite if there is none."""

    def passed_over(self, keys: Sequence[PrefixHash], kind: Kind) -> None:
        """A state (see `saved`) was not saved: others are worth more."""

    def request(self, keys: Sequence[PrefixHash], mounted: int | None) -> None:
        """A prompt came whose K/V is cached as far as `keys` go, one a stride.

        mounted: the id it resumes from; None: it starts from nothing.
        """

    def saved(self, id_: int, boundary: int, keys: Sequence[PrefixHash], kind: Kind) -> None:
        """A published id holds the state after `boundary` tokens; the last of `keys` is its own."""

    def again(self, id_: int, keys: Sequence[PrefixHash], kind: Kind) -> None:
        """A prompt resumed from this state (see `saved`), and would save it for this reason."""

    def check(self) -> None:
        """Its invariants."""

    def __contains__(self, id_: object) -> bool: ...

    def __iter__(self) -> Iterator[int]: ...

    def __len__(self) -> int: ...


class Untold:
    """What a policy does that learns nothing from requests and saved states."""

    selective = False

    def worth(self, boundary: int, above: int, kind: Kind) -> float:
        return 0.0

    def least_worth(self) -> float:
        return -inf

    def passed_over(self, keys: Sequence[PrefixHash], kind: Kind) -> None:
        """Nothing is noted."""

    def request(self, keys: Sequence[PrefixHash], mounted: int | None) -> None:
        """Nothing is learnt."""

    def saved(self, id_: int, boundary: int, keys: Sequence[PrefixHash], kind: Kind) -> None:
        """Nothing is noted."""

    def again(self, id_: int, keys: Sequence[PrefixHash], kind: Kind) -> None:
        """Nothing is noted."""

    def check(self) -> None:
        """It has no invariants of its own."""


class Lru(OrderedDict[int, None], Untold):
    """The least recently released id goes first. O(1)."""

    def add(self, id_: int) -> None:
        self[id_] = None

    def discard(self, id_: int) -> None:
        self.pop(id_, None)

    def evict(self) -> int:
        return self.popitem(last=False)[0]

    def forget(self, id_: int) -> None:
        self.pop(id_, None)


class LruCapPerPath(Lru):
    """LRU, but of more than `cap` states on one path the least recently used go before all others.

    A path: a state and those that it goes on from. O(1), and O(p log p) for a save with p on its
    path.
    """

    def __init__(self, cap: int) -> None:
        super().__init__()
        if cap < 1:
            raise ValueError(f"cap must be at least 1, got {cap}")
        self.cap = cap
        self._states = SavedStates()
        self._released: dict[int, int] = {}
        self._num_released = 0

    def add(self, id_: int) -> None:
        super().add(id_)
        self._num_released += 1
        self._released[id_] = self._num_released

    def saved(self, id_: int, boundary: int, keys: Sequence[PrefixHash], kind: Kind) -> None:
        self._states.insert(id_, boundary, keys)
        path = self._states.path(id_)
        unused = sorted((each for each in path if each in self), key=self._released.__getitem__)
        for surplus in reversed(unused[: max(0, len(path) - self.cap)]):
            self.move_to_end(surplus, last=False)

    def evict(self) -> int:
        id_ = super().evict()
        self._states.remove(id_)
        return id_

    def forget(self, id_: int) -> None:
        super().forget(id_)
        self._states.remove(id_)

    def clear(self) -> None:
        super().clear()
        self._states.clear()

    def check(self) -> None:
        self._states.check()
