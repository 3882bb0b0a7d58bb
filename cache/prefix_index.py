"""A write-once map between prefix hashes and the ids that hold their content."""

from typing import Generic, TypeVar

from cache.hashing import PrefixHash

E = TypeVar("E")


class PrefixIndex(Generic[E]):
    """key -> (id, entry), and id -> key. Holds no references: `BlockPool` decides who stays.

    Invariants, checked by `check()`:
    1. the two maps are inverse to each other (a key has one id, an id has one key).
    """

    def __init__(self) -> None:
        self._by_key: dict[PrefixHash, tuple[int, E]] = {}
        self._by_id: dict[int, PrefixHash] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._by_key.clear()
        self._by_id.clear()

    def __len__(self) -> int:
        return len(self._by_key)

    def contains(self, key: PrefixHash) -> bool:
        """Probe: nothing changes."""
        return key in self._by_key

    def find(self, key: PrefixHash) -> tuple[int, E] | None:
        """(id, entry) of a key, or None."""
        return self._by_key.get(key)

    def key_of(self, id_: int) -> PrefixHash | None:
        return self._by_id.get(id_)

    def insert(self, key: PrefixHash, id_: int, entry: E) -> None:
        """Keys and ids are write-once: insert each only after it was forgotten."""
        assert key not in self._by_key, "key inserted twice"
        assert id_ not in self._by_id, f"id {id_} has a key already"
        self._by_key[key] = (id_, entry)
        self._by_id[id_] = key

    def forget(self, id_: int) -> tuple[PrefixHash, E]:
        """Drop an id and its key; returns the key and the entry."""
        key = self._by_id.pop(id_)
        return key, self._by_key.pop(key)[1]

    def ids(self) -> set[int]:
        return set(self._by_id)

    def check(self) -> None:
        assert len(self._by_key) == len(self._by_id)
        for id_, key in self._by_id.items():
            assert self._by_key[key][0] == id_, f"id {id_} and its key disagree"
