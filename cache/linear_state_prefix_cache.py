"""The checkpoint index: which token boundaries of which prefixes have a saved state."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from cache.hashing import Namespace, PrefixHash, Provenance, filed_under
from cache.prefix_index import PrefixIndex

_REMEMBERED_EVICTIONS = 65_536


@dataclass(frozen=True)
class Checkpoint:
    """A published state: the slot that holds it and the number of tokens it stands for.

    logits: of a whole prompt, what the engine keeps with it: the logits after its last token.
    """

    slot_id: int
    boundary: int
    namespace: Namespace
    provenance: Provenance = Provenance.PREFILL
    logits: object | None = None


class LinearStatePrefixCache:
    """Chained hash per `chunk_stride` tokens -> checkpoint. Probing changes nothing.

    Owns no slots: the block manager holds the references and calls `forget` when a slot is evicted.

    Invariants, checked by `check()`:
    1. every entry's boundary is positive, and a multiple of chunk_stride but for a whole prompt's.
    2. every entry is filed under its own slot id.
    3. the entries counted by namespace are all entries.
    """

    def __init__(self, chunk_stride: int) -> None:
        self.chunk_stride = chunk_stride
        self._index: PrefixIndex[Checkpoint] = PrefixIndex()
        self._evicted: OrderedDict[PrefixHash, None] = OrderedDict()
        self._by_namespace: Counter[Namespace] = Counter()

    def __len__(self) -> int:
        return len(self._index)

    def clear(self) -> None:
        """Forget every checkpoint, and that there were any."""
        self._index.clear()
        self._evicted.clear()
        self._by_namespace.clear()

    def was_evicted(self, key: PrefixHash, least: Provenance = Provenance.PREFILL) -> bool:
        """Whether one no worse than `least` was forgotten (within the last 65,536 of any)."""
        return any(filed_under(key, p) in self._evicted for p in least.accepted)

    def match(
        self,
        hashes: Sequence[PrefixHash],
        num_tokens: int,
        least: Provenance = Provenance.PREFILL,
    ) -> list[int]:
        """Boundaries that can be restored for a prompt of num_tokens tokens, ascending.

        Every whole chunk strictly below the final token is probed, gaps allowed: the state of a
        later boundary contains all before it. K/V reach is not looked at (the composite clamps).
        """
        last = max(0, num_tokens - 1) // self.chunk_stride
        return [
            (index + 1) * self.chunk_stride
            for index, key in enumerate(hashes[:last])
            if self.contains(key, least)
        ]

    def deepest(
        self,
        hashes: Sequence[PrefixHash],
        above: int,
        limit: int,
        least: Provenance = Provenance.PREFILL,
    ) -> int | None:
        """The deepest boundary in (above, limit] that can be restored; looked for from there."""
        for index in range(limit // self.chunk_stride - 1, above // self.chunk_stride - 1, -1):
            if self.contains(hashes[index], least):
                return (index + 1) * self.chunk_stride
        return None

    def contains(self, key: PrefixHash, least: Provenance = Provenance.PREFILL) -> bool:
        """Whether a checkpoint of this prefix is there, no worse than `least`."""
        if least is Provenance.PREFILL:
            return self._index.contains(key)
        return any(self._index.contains(filed_under(key, p)) for p in least.accepted)

    def find(self, key: PrefixHash, least: Provenance = Provenance.PREFILL) -> Checkpoint | None:
        """The best such checkpoint; the caller acquires its slot."""
        for provenance in least.accepted:
            found = self._index.find(filed_under(key, provenance))
            if found is not None:
                return found[1]
        return None

    def holds(self, key: PrefixHash, provenance: Provenance, slot_id: int) -> bool:
        """Whether this very slot is filed under this key and provenance."""
        found = self._index.find(filed_under(key, provenance))
        return found is not None and found[0] == slot_id

    def insert(self, key: PrefixHash, checkpoint: Checkpoint) -> None:
        """File a checkpoint of the prefix `key` under its provenance."""
        self._check_boundary(checkpoint)
        filed = filed_under(key, checkpoint.provenance)
        self._index.insert(filed, checkpoint.slot_id, checkpoint)
        self._by_namespace[checkpoint.namespace] += 1
        self._evicted.pop(filed, None)

    def forget(self, slot_id: int) -> None:
        """Drop the checkpoint in a slot and remember that it was there."""
        key, checkpoint = self._index.forget(slot_id)
        self._by_namespace[checkpoint.namespace] -= 1
        if not self._by_namespace[checkpoint.namespace]:
            del self._by_namespace[checkpoint.namespace]
        self._evicted[key] = None
        if len(self._evicted) > _REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)

    def holds_only_other_namespaces(self, namespace: Namespace) -> bool:
        """Whether there are checkpoints, and none of this namespace."""
        return bool(self._by_namespace) and namespace not in self._by_namespace

    def slot_ids(self) -> set[int]:
        return self._index.ids()

    def check(self) -> None:
        self._index.check()
        assert self._by_namespace.total() == len(self._index)
        for slot_id in self._index.ids():
            key = self._index.key_of(slot_id)
            assert key is not None
            found = self._index.find(key)
            assert found is not None and found[1].slot_id == slot_id
            entry = found[1]
            self._check_boundary(entry)

    def _check_boundary(self, checkpoint: Checkpoint) -> None:
        on_grid = checkpoint.boundary % self.chunk_stride == 0
        assert checkpoint.boundary > 0 and (on_grid or checkpoint.logits is not None), checkpoint
