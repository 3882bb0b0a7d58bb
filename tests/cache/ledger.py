"""A worker of exact values: it notes which tokens each slot and each K/V row stands for.

A state is the (namespace, tokens) it has seen, a K/V block the same up to its last written row, and
each knows whether its bits are those of a cold prefill. A row that reads anything but the state of
exactly its first `start` tokens fails at once, so does one that asked for exact bits and reads
others, and so does a published id whose content is not what its key promises. No tolerance.
"""

from typing import Protocol

from cache.cached_sequence import CachedSequence
from cache.composite_block_manager import CompositeBlockManager
from cache.hashing import Namespace, PrefixHash, Provenance, filed_under
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
        self.inexact_states: set[int] = set()
        self.inexact_blocks: set[int] = set()

    def forward(self, rows: list[Rowlike]) -> None:
        """All rows of one step: every read is checked, then everything is written."""
        self._check_slots_are_exclusive(rows)
        exact = [self._check_reads(row) for row in rows]
        for row, reads_exact in zip(rows, exact, strict=True):
            self._write(row, reads_exact)

    def _check_slots_are_exclusive(self, rows: list[Rowlike]) -> None:
        ops = [row.op for row in rows if row.op is not None]
        written = [op.linear_state_id for op in ops]
        written += [slot for row in rows for _, slot in row.snapshots]
        read = {op.restore_src_slot_id for op in ops if op.restore_requested}
        assert 0 not in written and 0 not in read, "a real row uses the padding slot"
        assert len(set(written)) == len(written), f"two writers of one slot: {written}"
        assert not read & set(written), f"read and written in one step: {read & set(written)}"

    def _check_reads(self, row: Rowlike) -> bool:
        """Whether all that the row goes on from has the bits of a cold prefill."""
        seq, start = row.seq, row.start
        exact = True
        if row.op is not None:
            if row.op.restore_requested:
                assert row.op.boundary == start, f"{row.op} at token {start}"
            source = row.op.restore_src_slot_id
            slot = source if row.op.restore_requested else row.op.linear_state_id
            if start > 0:
                assert self.states[slot] == value(seq, start), f"slot {slot} is not S({start})"
                exact = slot not in self.inexact_states
        size = self.manager.kv.block_size
        for index in range(-(-start // size)):
            wanted = value(seq, min(start, (index + 1) * size))
            assert self.blocks[seq.block_table[index]] == wanted, f"wrong K/V in block {index}"
        exact = exact and not self.inexact_blocks & set(seq.block_table[: -(-start // size)])
        assert exact or not seq.exact or start >= seq.num_prompt_tokens, "not the bits it asked for"
        return exact

    def _write(self, row: Rowlike, reads_exact: bool) -> None:
        seq, pool = row.seq, self.manager.kv.pool
        size = self.manager.kv.block_size
        assert len(seq.block_table) * size >= row.end, "no block for a token"
        for index in range(row.start // size, -(-row.end // size)):
            id_ = seq.block_table[index]
            assert pool.ref_count(id_) == 1 and not pool.is_published(id_), f"{id_} is shared"
            self._overwrite_the_state_of_its_page(id_)
            self.blocks[id_] = value(seq, min(row.end, (index + 1) * size))
            # The tile of attention that a prompt ends in is not that of a longer prompt.
            whole = row.end // self.manager.chunk_stride * self.manager.chunk_stride
            prefilled = row.end <= seq.num_prompt_tokens and (index + 1) * size <= whole
            _mark(self.inexact_blocks, id_, exact=reads_exact and prefilled)
        exact = reads_exact and row.end <= seq.num_prompt_tokens
        if row.op is not None:
            self._overwrite_the_blocks_of_its_page(row.op.linear_state_id)
            self.states[row.op.linear_state_id] = value(seq, row.end)
            _mark(self.inexact_states, row.op.linear_state_id, exact=exact)
        for boundary, slot in row.snapshots:
            assert row.start < boundary < row.end
            self._overwrite_the_blocks_of_its_page(slot)
            self.states[slot] = value(seq, boundary)
            _mark(self.inexact_states, slot, exact=exact)

    def _overwrite_the_state_of_its_page(self, block: int) -> None:
        """With one budget the bytes of a block may have been those of a state ..."""
        memory = None if self.manager.linear is None else self.manager.linear.memory
        if memory is not None:
            self.states.pop(block // memory.blocks_per_page, None)

    def _overwrite_the_blocks_of_its_page(self, slot: int) -> None:
        """... and the other way round."""
        memory = None if self.manager.linear is None else self.manager.linear.memory
        if memory is not None:
            for block in range(memory.blocks_per_page):
                self.blocks.pop(slot * memory.blocks_per_page + block, None)

    def check(self) -> None:
        """Every published id holds what its key, its boundary and its provenance promise."""
        kv = self.manager.kv
        for id_ in kv._index.ids():
            key = self._block_key(*self.blocks[id_])
            found = kv._index.find(filed_under(key, _provenance(id_ in self.inexact_blocks)))
            assert found is not None and found[0] == id_, f"block {id_} is filed as another"
        linear = self.manager.linear
        if linear is None:
            return
        for slot in linear.cache.slot_ids():
            namespace, tokens = self.states[slot]
            provenance = _provenance(slot in self.inexact_states)
            key = filed_under(self._key(namespace, tokens), provenance)
            found = linear.cache._index.find(key)
            assert found is not None, f"slot {slot} is filed under the key of another state"
            entry = found[1]
            assert (entry.slot_id, entry.boundary) == (slot, len(tokens))
            assert entry.provenance is provenance

    def _key(self, namespace: Namespace, tokens: tuple[int, ...]) -> PrefixHash:
        assert self.manager.linear is not None
        seq = CachedSequence(tokens, namespace=namespace)
        seq.update_linear_state_hashes(self.manager.linear.domain)
        assert len(tokens) % self.manager.linear.chunk_stride == 0
        return seq.linear_state_hashes[-1]

    def _block_key(self, namespace: Namespace, tokens: tuple[int, ...]) -> PrefixHash:
        seq = CachedSequence(tokens, namespace=namespace)
        seq.update_block_hashes(self.manager.kv.domain)
        assert len(tokens) % self.manager.kv.block_size == 0, "a part of a block is published"
        return seq.block_hashes[-1]


def _mark(inexact: set[int], id_: int, *, exact: bool) -> None:
    (inexact.discard if exact else inexact.add)(id_)


def _provenance(inexact: bool) -> Provenance:
    return Provenance.DECODE if inexact else Provenance.PREFILL
