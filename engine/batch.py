"""One step: which rows run, and the tensors the model sees."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from cache.cached_sequence import WholeHit, WholeSave
from cache.ops import LinearStateCacheOp
from engine.sequence import Sequence
from kernels import KERNEL_CHUNK
from kernels.ids import BlockTables, Ids


@dataclass(frozen=True)
class ScheduledRow:
    """One sequence computes its tokens [start, end) in this step.

    op: its linear state, None for a model without recurrent layers.
    snapshots: (boundary, slot) to store on the way; boundaries strictly inside (start, end).
    scratch: of a verify row, the slots that get the state after each token of [start, end): the
        first of them is known, the others are drafts.
    whole: its whole prompt was found: start == end, nothing is computed.
    keeps: what is copied for the next one with this prompt.
    needs_logits: whether the next token is still to be chosen when it is scheduled (not when known
        tokens are replayed).
    """

    seq: Sequence
    start: int
    end: int
    op: LinearStateCacheOp | None
    snapshots: tuple[tuple[int, int], ...] = ()
    scratch: tuple[int, ...] = ()
    whole: WholeHit | None = None
    keeps: WholeSave | None = None
    needs_logits: bool = field(init=False)

    def __post_init__(self) -> None:
        assert (self.start == self.end) == (self.whole is not None), "a row of no tokens"
        last = self.end - self.num_drafts
        object.__setattr__(self, "needs_logits", last == self.seq.num_chosen)

    @property
    def num_drafts(self) -> int:
        return max(0, len(self.scratch) - 1)

    @property
    def is_prefill(self) -> bool:
        return self.start < self.seq.num_prompt_tokens


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
    write: Ids  # [N]; of decodes one for each of their rows


@dataclass(frozen=True)
class HiddenRows:
    """The model's last hidden row travels with the state: the draft head starts from it."""

    firsts: Ids  # first packed row of each sequence
    reads: Ids  # the slot that each starts from, -1: none
    kept: Ids  # packed rows whose hidden state is kept ...
    slots: Ids  # ... and the slots where


@dataclass(frozen=True)
class LateTokens:
    """Tokens that the step before has chosen and nobody has read back."""

    rows: Ids  # packed rows that they belong in
    sources: Ids  # their places among the tokens that the step before chose


@dataclass(frozen=True)
class ModelInputs:
    """Packed rows: the prefill tokens of all sequences, then those of decoding ones: one each, and
    after it the drafts to verify.

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
    kv_lens: Ids  # [N], K/V rows that each decoding row sees, its own included
    decode_block_tables: BlockTables  # N
    decode_slots: StateSlots
    decode_cu_seqlens: Ids | None = None  # [sequences + 1], None: one row each
    hidden: HiddenRows | None = None  # None: the model does not draft
    late: LateTokens | None = None

    @property
    def num_prefill_tokens(self) -> int:
        return self.cu_seqlens.host[-1]

    @property
    def num_decodes(self) -> int:
        return len(self.kv_lens)


def build_inputs(
    rows: list[ScheduledRow],
    read_slots: list[int],
    *,
    block_size: int,
    device: str = "cpu",
    drafts: Seq[Seq[int]] | None = None,
    chosen_before: Mapping[Sequence, int] = MappingProxyType({}),
) -> ModelInputs:
    """Lay rows out for the model on its device. read_slots[i] is where row i finds its state (-1:
    zero). drafts[i]: what row i is to verify; None: the model does not draft. chosen_before: places
    of the tokens that the step before has chosen (`LateTokens`)."""
    order = sorted(range(len(rows)), key=lambda i: not rows[i].is_prefill)  # stable
    prefills = [i for i in order if rows[i].is_prefill]
    decodes = [i for i in order if not rows[i].is_prefill]
    token_ids: list[int] = []
    positions: list[int] = []
    kv_indices: list[int] = []
    logit_rows: dict[int, range] = {}
    cu_seqlens, decode_cu_seqlens = [0], [0]
    late: dict[int, int] = {}
    for i in order:
        row, guessed = rows[i], () if drafts is None else drafts[i]
        assert len(guessed) == row.num_drafts, f"{len(guessed)} drafts for {row.num_drafts} rows"
        known: Iterable[int] = row.seq.token_ids[row.start : row.end - row.num_drafts]
        if row.start == row.seq.num_tokens:
            late[len(token_ids)] = chosen_before[row.seq]
            known = (0,)  # until the step runs
        token_ids.extend(known)
        token_ids.extend(guessed)
        positions.extend(range(row.start, row.end))
        kv_indices.extend(_kv_rows(row.seq, range(row.start, row.end), block_size))
        if row.needs_logits:
            logit_rows[i] = range(len(token_ids) - 1 - row.num_drafts, len(token_ids))
        if row.is_prefill:
            cu_seqlens.append(len(token_ids))
        else:
            decode_cu_seqlens.append(len(token_ids) - cu_seqlens[-1])
    verified = [(i, end) for i in decodes for end in range(rows[i].start + 1, rows[i].end + 1)]
    several = len(verified) > len(decodes)
    decode_reads = [read_slots[i] for i in decodes]
    decode_writes = [slot for i in decodes for slot in _write_slots(rows[i])]
    return ModelInputs(
        token_ids=Ids(token_ids, device).tensor,
        positions=Ids(positions, device).tensor,
        kv_indices=Ids(kv_indices, device),
        logit_rows=Ids([r for i in sorted(logit_rows) for r in logit_rows[i]], device).tensor,
        cu_seqlens=Ids(cu_seqlens, device),
        start_positions=Ids([rows[i].start for i in prefills], device),
        prefill_block_tables=BlockTables([rows[i].seq.block_table for i in prefills], device),
        prefill_slots=StateSlots(
            Ids([read_slots[i] for i in prefills], device),
            Ids([slot for i in prefills for slot in _write_slots(rows[i])], device),
        ),
        snapshot_slots=Ids(_snapshot_slots([rows[i] for i in prefills]), device),
        kv_lens=Ids([end for _, end in verified], device),
        decode_block_tables=BlockTables([rows[i].seq.block_table for i, _ in verified], device),
        decode_slots=StateSlots(Ids(decode_reads, device), Ids(decode_writes, device)),
        decode_cu_seqlens=Ids(decode_cu_seqlens, device) if several else None,
        late=_late_tokens(late, device),
        hidden=None
        if drafts is None
        else _hidden_rows([rows[i] for i in order], [read_slots[i] for i in order], device=device),
    )


def _late_tokens(late: dict[int, int], device: str) -> LateTokens | None:
    """Of packed rows and the places of their tokens."""
    if not late:
        return None
    return LateTokens(Ids(list(late), device), Ids(list(late.values()), device))


def _kv_rows(seq: Sequence, positions: range, block_size: int) -> list[int]:
    table = seq.block_table
    return [table[p // block_size] * block_size + p % block_size for p in positions]


def _write_slots(row: ScheduledRow) -> tuple[int, ...]:
    """Of a row's end, or of each token of a verify row. 0: there is no state."""
    if row.scratch:
        return row.scratch
    return (0 if row.op is None else row.op.linear_state_id,)


def _hidden_rows(packed: list[ScheduledRow], reads: list[int], *, device: str) -> HiddenRows:
    """Of rows in their packed order: what each starts from and what it leaves, for drafting."""
    firsts: list[int] = []
    kept: list[tuple[int, int]] = []
    first = 0
    for row in packed:
        firsts.append(first)
        end = first + row.end - row.start
        writes = _write_slots(row)
        kept += zip(range(end - len(writes), end), writes, strict=True)
        kept += [(first + boundary - row.start - 1, slot) for boundary, slot in row.snapshots]
        first = end
    return HiddenRows(
        firsts=Ids(firsts, device),
        reads=Ids(reads, device),
        kept=Ids([row for row, _ in kept], device),
        slots=Ids([slot for _, slot in kept], device),
    )


def draft_inputs(
    rows: Seq[ScheduledRow], depth: int, *, block_size: int, device: str = "cpu"
) -> ModelInputs:
    """Rows of the draft head alone: of each sequence the position `depth` after its known end."""
    none = Ids([], device)
    positions = [row.start + depth for row in rows]
    kv_rows = [
        _kv_rows(row.seq, range(p, p + 1), block_size)[0]
        for row, p in zip(rows, positions, strict=True)
    ]
    return ModelInputs(
        token_ids=none.tensor,
        positions=Ids(positions, device).tensor,
        kv_indices=Ids(kv_rows, device),
        logit_rows=none.tensor,
        cu_seqlens=Ids([0], device),
        start_positions=none,
        prefill_block_tables=BlockTables([], device),
        prefill_slots=StateSlots(none, none),
        snapshot_slots=none,
        kv_lens=Ids([p + 1 for p in positions], device),
        decode_block_tables=BlockTables([row.seq.block_table for row in rows], device),
        decode_slots=StateSlots(none, none),
        decode_cu_seqlens=None,
        hidden=None,
    )


def _snapshot_slots(prefills: list[ScheduledRow]) -> list[int]:
    slots: list[int] = []
    for row in prefills:
        wanted = dict(row.snapshots)
        ends = range(row.start + KERNEL_CHUNK, row.end + KERNEL_CHUNK, KERNEL_CHUNK)
        slots.extend(wanted.pop(end, -1) for end in ends)
        assert not wanted, f"snapshots off the kernel grid: {wanted}"
    return slots
