"""The state that is worth least a request goes first: reuse learnt online, times what it saves."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from math import ceil, inf

from cache.eviction import Flops, Kind, Lru, prefill_flops
from cache.hashing import PrefixHash
from cache.reuse_hazard import AGE_EDGES, NUM_AGES, LearntRanks, age_bucket
from cache.saved_states import SavedStates

_REFRESH_EVERY = 128  # requests between two looks at what was learnt
_NUM_REMEMBERED = 8192  # evicted states that are still observed
_ON_THE_WAY = (Kind.SUPERSEDED, Kind.COMB)
_OF_AN_END = 1e-6  # of its rank: any other state is worth more
_STALE = 1024  # entries that are out of date, beside one for each state, before queues are cleaned


@dataclass(eq=False)
class Observed:
    """A state that is there (id_) or was (id_ is None), last wanted or changed at request `last`.

    stamp: of its only valid entry in the queues; 0 when it has none.
    """

    key: PrefixHash
    kind: Kind
    last: int
    id_: int | None
    stamp: int = 0


class ValueIndex:
    """Value = rank of (kind, age) x prefill work from the next shallower state to this one.

    The rank is the expected uses a request (`ReuseHazard`). A request uses the deepest state of its
    prefix that was ever saved, even if it was evicted since (the last 8,192 are remembered), so
    that what is learnt does not depend on what was kept. All states have equal bytes.

    A prompt's very end (`Kind.END`) fills slots that nothing else needs: all ends go before all
    others. It is observed only while it is there, and who uses it has used the tip above it as
    well, so it takes no credit from that one.

    Age counts from the last use, and of a state below which prompts go on (superseded or of a
    comb) from the last prompt that went through it: it is of use as long as its path is alive.

    Evictable states wait in one heap for each kind and age bucket, ordered by the work they save,
    for which the rank is one factor. `evict` compares the heads of the heaps (at most 6 x 80). A
    state moves through O(log age) buckets; entries are replaced lazily, by stamp. A head whose work
    has grown since, because the state above it was evicted, is put back with what it saves now. So
    an operation is O(log n) amortised; `request` and `saved` also look at each stride down to the
    next shallower state. Once as many entries are out of date as there are states, and a thousand,
    the queues are cleaned. Ids of which nothing was told go first, in LRU order.

    Invariants, checked by `check()`:
    1. every evictable id has one valid entry, in the heap of its kind and not before its bucket.
    2. every state that is there is observed under its id, and found by its key or another has it.
    3. the remembered ones have no id.
    """

    selective = True

    def __init__(self, flops: Flops = prefill_flops) -> None:
        self._flops = flops
        self._ranks = LearntRanks(Kind)
        self._clock = 0
        self._stamps = 0
        self._states = SavedStates()
        self._reset()

    def _reset(self) -> None:
        self._untold = Lru()
        self._live: dict[int, Observed] = {}
        self._by_key: dict[PrefixHash, Observed] = {}
        self._remembered: OrderedDict[PrefixHash, Observed] = OrderedDict()
        self._heaps: dict[tuple[Kind, int], list[tuple[float, int, int]]] = {}
        self._due: list[tuple[int, int, int]] = []  # (request, stamp, id)
        self._num_pushed = 0  # since the queues were cleaned
        self._evictable: dict[int, None] = {}

    def clear(self) -> None:
        self._states.clear()
        self._reset()

    def __contains__(self, id_: object) -> bool:
        return id_ in self._evictable or id_ in self._untold

    def __iter__(self) -> Iterator[int]:
        yield from self._untold
        yield from self._evictable

    def __len__(self) -> int:
        return len(self._evictable) + len(self._untold)

    # ---- what the pool says

    def add(self, id_: int) -> None:
        if id_ not in self._live:
            self._untold.add(id_)
        else:
            self._evictable[id_] = None
            self._enqueue(self._live[id_])

    def discard(self, id_: int) -> None:
        self._untold.discard(id_)
        if id_ in self._evictable:
            del self._evictable[id_]
            self._live[id_].stamp = 0

    def _lowest(self) -> tuple[float, int]:
        """Value and id of the one that goes next, of those of which something is known."""
        self._move_the_aged()
        best: tuple[float, int, int] | None = None
        for (kind, bucket), heap in list(self._heaps.items()):
            if not self._clean(heap):
                del self._heaps[kind, bucket]
                continue
            work, stamp, id_ = heap[0]
            value = (self._rank(kind, bucket) * work, stamp, id_)
            best = value if best is None else min(best, value)
        assert best is not None, "nothing is evictable"
        return best[0], best[2]

    def worth(self, boundary: int, above: int, kind: Kind) -> float:
        return self._rank(kind, 0) * self._flops(above, boundary)

    def least_worth(self) -> float:
        if self._untold:
            return -inf
        return self._lowest()[0] if self._evictable else inf

    def passed_over(self, keys: Sequence[PrefixHash], kind: Kind) -> None:
        """It is remembered like one that was evicted."""
        if keys[-1] not in self._by_key and kind is not Kind.END:
            seen = self._by_key[keys[-1]] = Observed(keys[-1], kind, self._clock, None)
            self._remember(seen)
            self._supersede(keys, kind)

    def evict(self) -> int:
        if self._untold:
            return self._untold.evict()
        _, id_ = self._lowest()
        seen = self._live[id_]
        self._drop(id_)
        if self._by_key.get(seen.key) is seen:
            seen.id_ = None
            if seen.kind is Kind.END:
                self._observe(seen, used=False)
                del self._by_key[seen.key]
            else:
                self._remember(seen)
        return id_

    def _remember(self, seen: Observed) -> None:
        self._remembered[seen.key] = seen
        if len(self._remembered) > _NUM_REMEMBERED:
            _, oldest = self._remembered.popitem(last=False)
            self._observe(oldest, used=False)
            del self._by_key[oldest.key]

    def forget(self, id_: int) -> None:
        self._untold.discard(id_)
        if id_ in self._live:
            seen = self._live[id_]
            self._drop(id_)
            if self._by_key.get(seen.key) is seen:
                del self._by_key[seen.key]

    def _drop(self, id_: int) -> None:
        self.discard(id_)
        del self._live[id_]
        self._states.remove(id_)

    # ---- what the LINEAR leaf says

    def request(self, keys: Sequence[PrefixHash], mounted: int | None) -> None:
        self._clock += 1
        if self._clock % _REFRESH_EVERY == 0:
            self._ranks.refresh(self._ages)
        self._use_end(keys)
        wanted = self._deepest(keys, len(keys))
        if wanted is not None:
            self._observe(wanted, used=True)
            if wanted.kind is Kind.SUPERSEDED and wanted.key == keys[-1]:
                wanted.kind = Kind.BRANCH
            if wanted.id_ is not None:
                self._states.relink(wanted.id_, keys)
            self._restart(wanted)
        if mounted in self._live:
            self._gone_through(mounted)

    def _use_end(self, keys: Sequence[PrefixHash]) -> None:
        """The deepest state of these strides may be the very end of a prompt."""
        observed = (self._by_key.get(key) for key in reversed(keys))
        seen = next((each for each in observed if each is not None), None)
        if seen is not None and seen.kind is Kind.END:
            self._observe(seen, used=True)
            self._restart(seen)

    def _gone_through(self, mounted: int) -> None:
        """A prompt resumed from this state, and so went through those above it."""
        for id_ in self._states.path(mounted):
            seen = self._live[id_]
            if id_ == mounted or seen.kind in _ON_THE_WAY:
                self._observe(seen, used=False)
                self._restart(seen)

    def saved(self, id_: int, boundary: int, keys: Sequence[PrefixHash], kind: Kind) -> None:
        seen = self._by_key.get(keys[-1])
        if seen is None or seen.id_ is not None:
            seen = self._by_key[keys[-1]] = Observed(keys[-1], kind, self._clock, id_)
        else:
            del self._remembered[seen.key]
            seen.id_ = id_
            if seen.kind is Kind.COMB and kind is not Kind.COMB:
                self._become(seen, kind)
        self._live[id_] = seen
        self._states.insert(id_, boundary, keys)
        self._supersede(keys, kind)

    def again(self, id_: int, keys: Sequence[PrefixHash], kind: Kind) -> None:
        """The very end of a prompt is the tip of one that adds little to it."""
        if id_ in self._live and self._live[id_].kind is Kind.END and kind is not Kind.END:
            self._become(self._live[id_], kind)
            self._supersede(keys, kind)

    def _supersede(self, keys: Sequence[PrefixHash], kind: Kind) -> None:
        """A prompt went on from the state above, if that was a prompt's end."""
        if kind not in (Kind.COMB, Kind.WHOLE, Kind.END):
            above = self._deepest(keys, len(keys) - 1, comb=False)
            if above is not None and above.kind is Kind.TIP:
                self._become(above, Kind.SUPERSEDED)

    def _deepest(
        self, keys: Sequence[PrefixHash], num_keys: int, *, comb: bool = True
    ) -> Observed | None:
        """The deepest state of these strides that is or was there, but for ends of prompts.

        comb: of that kind, too.
        """
        passed = (Kind.END,) if comb else (Kind.END, Kind.COMB)
        for index in range(num_keys - 1, -1, -1):
            seen = self._by_key.get(keys[index])
            if seen is not None and seen.kind not in passed:
                return seen
        return None

    # ---- what is learnt

    def _observe(self, seen: Observed, *, used: bool) -> None:
        self._ranks.hazards[seen.kind].observe(self._clock - seen.last, used=used)

    def _become(self, seen: Observed, kind: Kind) -> None:
        self._observe(seen, used=False)
        seen.kind = kind
        self._restart(seen)

    def _restart(self, seen: Observed) -> None:
        """Its age begins again."""
        seen.last = self._clock
        if seen.id_ in self._evictable:
            self._enqueue(seen)

    def _ages(self, kind: object) -> list[int]:
        every = (*self._live.values(), *self._remembered.values())
        return [self._clock - seen.last for seen in every if seen.kind == kind]

    def _rank(self, kind: Kind, bucket: int) -> float:
        return self._ranks.rank(kind, bucket) * (_OF_AN_END if kind is Kind.END else 1.0)

    # ---- queues

    def _work(self, id_: int) -> float:
        return self._flops(self._states.parent_boundary(id_), self._states[id_].boundary)

    def _enqueue(self, seen: Observed) -> None:
        """A new entry; the one before, if any, is no longer valid."""
        assert seen.id_ is not None
        self._num_pushed += 1
        if self._num_pushed > len(self._evictable) + _STALE:
            self._drop_stale()
        bucket = age_bucket(self._clock - seen.last)
        self._stamps += 1
        seen.stamp = self._stamps
        heap = self._heaps.setdefault((seen.kind, bucket), [])
        heappush(heap, (self._work(seen.id_), seen.stamp, seen.id_))
        if bucket < NUM_AGES - 1:
            due = seen.last + ceil(AGE_EDGES[bucket + 1])
            heappush(self._due, (max(due, self._clock + 1), seen.stamp, seen.id_))

    def _drop_stale(self) -> None:
        """Leave only what is valid in the queues."""
        self._num_pushed = 0
        for key, heap in self._heaps.items():
            self._heaps[key] = [entry for entry in heap if self._is_valid(entry[2], entry[1])]
            heapify(self._heaps[key])
        self._due = [entry for entry in self._due if self._is_valid(entry[2], entry[1])]
        heapify(self._due)

    def _is_valid(self, id_: int, stamp: int) -> bool:
        return id_ in self._evictable and self._live[id_].stamp == stamp

    def _move_the_aged(self) -> None:
        while self._due and self._due[0][0] <= self._clock:
            _, stamp, id_ = heappop(self._due)
            if self._is_valid(id_, stamp):
                self._enqueue(self._live[id_])

    def _clean(self, heap: list[tuple[float, int, int]]) -> bool:
        """Bring a valid head to the top, with the work that it saves now; False: none is left."""
        while heap:
            work, stamp, id_ = heap[0]
            if not self._is_valid(id_, stamp):
                heappop(heap)
            elif (now := self._work(id_)) != work:
                heapreplace(heap, (now, stamp, id_))
            else:
                return True
        return False

    def check(self) -> None:
        entries = [entry for heap in self._heaps.values() for entry in heap]
        valid = [id_ for _, stamp, id_ in entries if self._is_valid(id_, stamp)]
        assert sorted(valid) == sorted(self._evictable), "an evictable state is not in one heap"
        bound = 2 * (len(self._live) + _STALE + 1)
        assert max(len(entries), len(self._due)) <= bound, "the queues are not cleaned"
        self._states.check()
        assert set(self._states) == set(self._live)
        assert all(seen.id_ == id_ for id_, seen in self._live.items())
        assert all(seen.id_ is None for seen in self._remembered.values())
