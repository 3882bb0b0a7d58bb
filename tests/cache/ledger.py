"""A worker of exact values: it notes which tokens each slot and each K/V row stands for.

A state is the (namespace, tokens) it has seen, a K/V block the same up to its last written row. A
row that reads anything but the state of exactly its first `start` tokens fails at once, and so does
a published id whose content is not what its key promises. No tolerance, no numerics.
"""

from typing import Protocol

from cache.cached_sequence import CachedSequence
from cache.composite_block_manager import CompositeBlockManager
from cache.hashing import Namespace, PrefixHash
from cache.ops import LinearStateCacheOp

Value = tuple[Namespace, tuple[int, ...]]


class Rowlike(Protocol):
    seq: CachedSequence
    start: int
    end: int
    op: LinearStateCacheOp | None
    snapshots: tuple[tuple[int, int], ...]


def value(seq: CachedSequence, num_tokens: int) -> Value:
    return seq.namespace, tuple(seq.token_ids[:num_tokens])


class Ledger:
    def __init__(self, manager: CompositeBlockManager) -> None:
        self.manager = manager
        self.states: dict[int, Value] = {}
        self.blocks: dict[int, Value] = {}

    def forward(self, rows: list[Rowlike]) -> None:
        """All rows of one step: every read is checked, then everything is written."""
        self._check_slots_are_exclusive(rows)
        for row in rows:
            self._check_reads(row)
        for row in rows:
            self._write(row)

    def _check_slots_are_exclusive(self, rows: list[Rowlike]) -> None:
        ops = [row.op for row in rows if row.op is not None]
        written = [op.linear_state_id for op in ops]
        written += [slot for row in rows for _, slot in row.snapshots]
        read = {op.restore_src_slot_id for op in ops if op.restore_requested}
        assert 0 not in written and 0 not in read, "a real row uses the padding slot"
        assert len(set(written)) == len(written), f"two writers of one slot: {written}"
        assert not read & set(written), f"read and written in one step: {read & set(written)}"

    def _check_reads(self, row: Rowlike) -> None:
        seq, start = row.seq, row.start
        if row.op is not None:
            if row.op.restore_requested:
                assert row.op.boundary == start, f"{row.op} at token {start}"
            source = row.op.restore_src_slot_id
            slot = source if row.op.restore_requested else row.op.linear_state_id
            if start > 0:
                assert self.states[slot] == value(seq, start), f"slot {slot} is not S({start})"
        size = self.manager.kv.block_size
        for index in range(-(-start // size)):
            wanted = value(seq, min(start, (index + 1) * size))
            assert self.blocks[seq.block_table[index]] == wanted, f"wrong K/V in block {index}"

    def _write(self, row: Rowlike) -> None:
        seq, pool = row.seq, self.manager.kv.pool
        size = self.manager.kv.block_size
        assert len(seq.block_table) * size >= row.end, "no block for a token"
        for index in range(row.start // size, -(-row.end // size)):
            id_ = seq.block_table[index]
            assert pool.ref_count(id_) == 1 and not pool.is_published(id_), f"{id_} is shared"
            self.blocks[id_] = value(seq, min(row.end, (index + 1) * size))
        if row.op is not None:
            self.states[row.op.linear_state_id] = value(seq, row.end)
        for boundary, slot in row.snapshots:
            assert row.start < boundary < row.end
            self.states[slot] = value(seq, boundary)

    def check(self) -> None:
        """Every published slot holds exactly the state that its key and its boundary promise."""
        linear = self.manager.linear
        if linear is None:
            return
        for slot in linear.cache.slot_ids():
            namespace, tokens = self.states[slot]
            entry = linear.cache.find(self._key(namespace, tokens))
            assert entry is not None, f"slot {slot} is filed under the key of another state"
            assert (entry.slot_id, entry.boundary) == (slot, len(tokens))

    def _key(self, namespace: Namespace, tokens: tuple[int, ...]) -> PrefixHash:
        assert self.manager.linear is not None
        seq = CachedSequence(tokens, namespace=namespace)
        seq.update_linear_state_hashes(self.manager.linear.domain)
        assert len(tokens) % self.manager.linear.chunk_stride == 0
        return seq.linear_state_hashes[-1]
