"""One step: which rows run, and the tensors the model sees."""

from dataclasses import dataclass, field

import torch

from cache.ops import LinearStateCacheOp
from engine.sequence import Sequence
from kernels import KERNEL_CHUNK


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

    read: torch.Tensor  # [N] int64, -1: zero state
    write: torch.Tensor  # [N] int64


@dataclass(frozen=True)
class ModelInputs:
    """Packed rows: the prefill tokens of all sequences, then one row a decoding one.

    R rows in all: the first P belong to Np prefills, the other N decode.
    """

    token_ids: torch.Tensor  # [R] int64
    positions: torch.Tensor  # [R] int64
    kv_indices: torch.Tensor  # [R] int64, flat K/V rows
    logit_rows: torch.Tensor  # [num_logits] int64
    cu_seqlens: torch.Tensor  # [Np + 1] int64
    start_positions: list[int]  # Np
    prefill_block_tables: list[list[int]]  # Np
    prefill_slots: StateSlots
    snapshot_slots: torch.Tensor  # [chunks of all prefills] int64, -1: none
    kv_lens: list[int]  # N, K/V rows of each decoding sequence, its own included
    decode_block_tables: list[list[int]]  # N
    decode_slots: StateSlots

    @property
    def num_prefill_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def num_decodes(self) -> int:
        return len(self.kv_lens)


def build_inputs(
    rows: list[ScheduledRow], read_slots: list[int], *, block_size: int
) -> ModelInputs:
    """Lay rows out for the model. read_slots[i] is where row i finds its state (-1: zero)."""
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
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        kv_indices=torch.tensor(kv_indices),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        cu_seqlens=torch.tensor(cu_seqlens),
        start_positions=[rows[i].start for i in prefills],
        prefill_block_tables=[list(rows[i].seq.block_table) for i in prefills],
        prefill_slots=_state_slots(rows, read_slots, prefills),
        snapshot_slots=_snapshot_slots([rows[i] for i in prefills]),
        kv_lens=[rows[i].end for i in decodes],
        decode_block_tables=[list(rows[i].seq.block_table) for i in decodes],
        decode_slots=_state_slots(rows, read_slots, decodes),
    )


def _state_slots(rows: list[ScheduledRow], read_slots: list[int], which: list[int]) -> StateSlots:
    ops = [rows[i].op for i in which]
    write = [0 if op is None else op.linear_state_id for op in ops]
    return StateSlots(
        torch.tensor([read_slots[i] for i in which], dtype=torch.int64),
        torch.tensor(write, dtype=torch.int64),
    )


def _snapshot_slots(prefills: list[ScheduledRow]) -> torch.Tensor:
    slots: list[int] = []
    for row in prefills:
        wanted = dict(row.snapshots)
        ends = range(row.start + KERNEL_CHUNK, row.end + KERNEL_CHUNK, KERNEL_CHUNK)
        slots.extend(wanted.pop(end, -1) for end in ends)
        assert not wanted, f"snapshots off the kernel grid: {wanted}"
    return torch.tensor(slots, dtype=torch.int64)
