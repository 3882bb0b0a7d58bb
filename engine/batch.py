"""One step: which rows run, and the tensors the model sees."""

from dataclasses import dataclass, field

import torch

from cache.ops import LinearStateCacheOp
from engine.sequence import Sequence
from kernels import KERNEL_CHUNK
from kernels.ids import BlockTables, Ids


@dataclass(frozen=True)
class ScheduledRow:
    """One sequence computes its tokens [start, end) in this step.

    op: its linear state, None for a model without recurrent layers.
    snapshots: (boundary, slot) to store on the way; boundaries strictly inside (start, end).
    """

    seq: Sequence
    start: int
    end: int
    op: LinearStateCacheOp | None
    snapshots: tuple[tuple[int, int], ...] = ()

    @property
    def is_prefill(self) -> bool:
        return self.start < self.seq.num_prompt_tokens

    @property
    def needs_logits(self) -> bool:
        """Whether the next token is still to be chosen (not when known tokens are replayed)."""
        return self.end == self.seq.num_tokens


@dataclass
class Batch:
    """The rows of one step, in the order they were scheduled."""

    rows: list[ScheduledRow] = field(default_factory=list)

    @property
    def sequences(self) -> set[Sequence]:
        return {row.seq for row in self.rows}

    @property
    def num_tokens(self) -> int:
        return sum(row.end - row.start for row in self.rows)


@dataclass(frozen=True)
class StateSlots:
    """Slot ids of some rows for one step: where the state is read and where it is written."""

    read: Ids  # [N], -1: zero state
    write: Ids  # [N]


@dataclass(frozen=True)
class ModelInputs:
    """Packed rows: the prefill tokens of all sequences, then one row a decoding one.

    R rows in all: the first P belong to Np prefills, the other N decode.
    """

    token_ids: torch.Tensor  # [R] int64
    positions: torch.Tensor  # [R] int64
    kv_indices: Ids  # [R], flat K/V rows
    logit_rows: torch.Tensor  # [num_logits] int64
    cu_seqlens: Ids  # [Np + 1]
    start_positions: Ids  # [Np]
    prefill_block_tables: BlockTables  # Np
    prefill_slots: StateSlots
    snapshot_slots: Ids  # [chunks of all prefills], -1: none
    kv_lens: Ids  # [N], K/V rows of each decoding sequence, its own included
    decode_block_tables: BlockTables  # N
    decode_slots: StateSlots

    @property
    def num_prefill_tokens(self) -> int:
        return self.cu_seqlens.host[-1]

    @property
    def num_decodes(self) -> int:
        return len(self.kv_lens)


def build_inputs(
    rows: list[ScheduledRow], read_slots: list[int], *, block_size: int, device: str = "cpu"
) -> ModelInputs:
    """Lay rows out for the model on its device. read_slots[i] is where row i finds its state (-1:
    zero)."""
    order = sorted(range(len(rows)), key=lambda i: not rows[i].is_prefill)  # stable
    prefills = [i for i in order if rows[i].is_prefill]
    decodes = [i for i in order if not rows[i].is_prefill]
    token_ids: list[int] = []
    positions: list[int] = []
    kv_indices: list[int] = []
    logit_rows = [0] * sum(row.needs_logits for row in rows)
    rank = {i: n for n, i in enumerate(i for i, row in enumerate(rows) if row.needs_logits)}
    cu_seqlens = [0]
    for i in order:
        row = rows[i]
        token_ids.extend(row.seq.token_ids[row.start : row.end])
        positions.extend(range(row.start, row.end))
        table = row.seq.block_table
        kv_indices.extend(
            table[p // block_size] * block_size + p % block_size for p in range(row.start, row.end)
        )
        if row.needs_logits:
            logit_rows[rank[i]] = len(token_ids) - 1
        if row.is_prefill:
            cu_seqlens.append(len(token_ids))
    return ModelInputs(
        token_ids=Ids(token_ids, device).tensor,
        positions=Ids(positions, device).tensor,
        kv_indices=Ids(kv_indices, device),
        logit_rows=Ids(logit_rows, device).tensor,
        cu_seqlens=Ids(cu_seqlens, device),
        start_positions=Ids([rows[i].start for i in prefills], device),
        prefill_block_tables=BlockTables([rows[i].seq.block_table for i in prefills], device),
        prefill_slots=_state_slots(rows, read_slots, prefills, device),
        snapshot_slots=Ids(_snapshot_slots([rows[i] for i in prefills]), device),
        kv_lens=Ids([rows[i].end for i in decodes], device),
        decode_block_tables=BlockTables([rows[i].seq.block_table for i in decodes], device),
        decode_slots=_state_slots(rows, read_slots, decodes, device),
    )


def _state_slots(
    rows: list[ScheduledRow], read_slots: list[int], which: list[int], device: str
) -> StateSlots:
    ops = [rows[i].op for i in which]
    write = [0 if op is None else op.linear_state_id for op in ops]
    return StateSlots(Ids([read_slots[i] for i in which], device), Ids(write, device))


def _snapshot_slots(prefills: list[ScheduledRow]) -> list[int]:
    slots: list[int] = []
    for row in prefills:
        wanted = dict(row.snapshots)
        ends = range(row.start + KERNEL_CHUNK, row.end + KERNEL_CHUNK, KERNEL_CHUNK)
        slots.extend(wanted.pop(end, -1) for end in ends)
        assert not wanted, f"snapshots off the kernel grid: {wanted}"
    return slots
