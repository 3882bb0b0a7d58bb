"""Ids with reference counts, a free list, and a policy for unreferenced published ids.

The pool knows nothing of what an id stands for: K/V blocks and state slots use the same class.
"""

from collections import deque
from collections.abc import Callable

from cache.eviction import EvictionPolicy, Lru


class BlockPool:
    """Owner of the ids [1, num_ids). Id 0 is padding: never handed out, never published.

    Every id is free, referenced (count > 0, published or not) or evictable (count 0, published).
    `allocate` prefers free ids, then the evictable one that `policy` names, the least recently
    released one by default; `on_evict(id)` runs before an evicted id is handed out, so that an
    index can forget it.

    Invariants, checked by `check()`:
    1. free, evictable and referenced ids are disjoint and are all of [1, num_ids).
    2. reference counts are >= 0 and positive exactly for referenced ids.
    3. free ids are unpublished, evictable ids are published.
    4. id 0 is in none of them.
    """

    def __init__(
        self,
        num_ids: int,
        on_evict: Callable[[int], object] | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        """policy: this pool's own; None: LRU."""
        if num_ids < 2:
            raise ValueError(f"a pool needs at least 2 ids (id 0 is padding), got {num_ids}")
        self.num_ids = num_ids
        self._on_evict = on_evict
        self.num_evictions = 0
        self._evictable: EvictionPolicy = Lru() if policy is None else policy
        self.reset()

    def reset(self) -> None:
        """Make every id free, whoever held it and whatever it was published for."""
        self._refs = [0] * self.num_ids
        self._published = [False] * self.num_ids
        self._free: deque[int] = deque(range(1, self.num_ids))
        self._evictable.clear()

    @property
    def policy(self) -> EvictionPolicy:
        """To be told about requests and saved states, by whoever knows what the ids stand for."""
        return self._evictable

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """Ids that `allocate` can still hand out."""
        return len(self._free) + len(self._evictable)

    @property
    def num_total(self) -> int:
        """All ids that there are now, but for the padding."""
        return self.num_ids - 1

    @property
    def capacity(self) -> int:
        """Ids that can be in use at once."""
        return self.num_ids - 1

    @property
    def num_in_use(self) -> int:
        return self.num_ids - 1 - self.num_available

    def ref_count(self, id_: int) -> int:
        return self._refs[id_]

    def is_published(self, id_: int) -> bool:
        return self._published[id_]

    def is_dead(self, id_: int) -> bool:
        """Whether its content is of no use to anybody. A pool that shares its memory knows."""
        return False

    def allocate(self) -> int | None:
        """A private id with one reference, or None when every id is referenced."""
        id_ = self._take_free()
        if id_ is None and self._evictable:
            id_ = self._evictable.evict()
            self._evicted(id_)
        if id_ is not None:
            self._refs[id_] = 1
        return id_

    def _take_free(self) -> int | None:
        return self._free.popleft() if self._free else None

    def _set_free(self, id_: int) -> None:
        self._free.append(id_)

    def _evicted(self, id_: int) -> None:
        """An evictable id was taken out of the policy: it is no longer published."""
        self._published[id_] = False
        self.num_evictions += 1
        if self._on_evict is not None:
            self._on_evict(id_)

    def acquire(self, id_: int) -> None:
        """One more reference to a published or referenced id: it stays until it is released."""
        assert self._refs[id_] > 0 or id_ in self._evictable, f"id {id_} is free"
        self._evictable.discard(id_)
        self._refs[id_] += 1

    def release(self, id_: int) -> None:
        """Give one reference back: the last one makes a published id evictable (with LRU
        the last in line), and any other id free."""
        assert self._refs[id_] > 0, f"id {id_} released more often than acquired"
        self._refs[id_] -= 1
        if self._refs[id_] == 0:
            if self._published[id_]:
                self._evictable.add(id_)
            else:
                self._set_free(id_)

    def publish(self, id_: int) -> None:
        """Mark a referenced id as shared content, to be kept after its last release."""
        assert self._refs[id_] > 0, f"id {id_} published without a reference"
        assert not self._published[id_], f"id {id_} published twice"
        self._published[id_] = True

    def unpublish(self, id_: int) -> None:
        """Undo `publish`; an unreferenced id becomes free at once."""
        assert self._published[id_], f"id {id_} is not published"
        self._published[id_] = False
        self._evictable.forget(id_)
        if self._refs[id_] == 0:
            self._set_free(id_)

    def check(self) -> None:
        self._evictable.check()
        free, evictable = set(self._free), set(self._evictable)
        referenced = {i for i, count in enumerate(self._refs) if count > 0}
        assert len(free) == len(self._free), "a free id is listed twice"
        assert not free & evictable and not free & referenced and not evictable & referenced
        assert free | evictable | referenced == set(range(1, self.num_ids)), "an id is lost"
        assert min(self._refs) >= 0, "negative reference count"
        assert not any(self._published[i] for i in free), "a free id is published"
        assert all(self._published[i] for i in evictable), "an unpublished id is kept"
        assert not self._published[0] and 0 not in referenced, "id 0 is in use"
