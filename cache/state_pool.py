"""The memory of all recurrent states: one byte arena, one contiguous span per slot.

The only module of this package that touches tensors.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cache.ops import LinearStateCacheOp, RestoreOutcome
from kernels import Ops, ops_for

logger = logging.getLogger(__name__)

_ALIGN_BYTES = (
    64  # 16 float32 elements: 16-byte accesses in every layer, whole strides in every dtype
)


@dataclass(frozen=True)
class StateShape:
    """What one slot holds: L layers of a state [HV, V, K] float32 and a window [W-1, C], and for
    drafting the last hidden row of the model [hidden_size] (0: none)."""

    num_layers: int
    num_value_heads: int
    value_dim: int
    key_dim: int
    window_rows: int
    conv_channels: int
    window_dtype: torch.dtype
    hidden_size: int = 0

    @property
    def states_bytes(self) -> int:
        return self.num_layers * self.num_value_heads * self.value_dim * self.key_dim * 4

    @property
    def windows_bytes(self) -> int:
        size = self.num_layers * self.window_rows * self.conv_channels
        return size * self.window_dtype.itemsize

    @property
    def windows_offset(self) -> int:
        return _round_up(self.states_bytes)

    @property
    def hidden_offset(self) -> int:
        return self.windows_offset + _round_up(self.windows_bytes)

    @property
    def slot_bytes(self) -> int:
        return self.hidden_offset + _round_up(self.hidden_size * self.window_dtype.itemsize)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class StatePool:
    """arena [num_slots, slot_bytes] uint8, and strided views of it.

    states  [num_slots, L, HV, V, K] float32, K contiguous
    windows [num_slots, L, W-1, C] in the model's dtype, the oldest token first
    hidden  [num_slots, hidden_size] in the model's dtype
    In a memory that K/V shares the slots are as far apart as its pages.
    A slot is one contiguous span with all layers: restoring, offloading or loading it is one copy.
    Slot 0 is padding. The pool owns the memory, `LinearStateBlockManager` owns the ids.
    """

    def __init__(
        self,
        num_slots: int,
        shape: StateShape,
        device: str = "cpu",
        ops: Ops | None = None,
        memory: torch.Tensor | None = None,
    ) -> None:
        """ops: what copies slots; None: what the device takes by itself. memory: uint8
        [num_slots, at least slot_bytes], zeroed, to lie in; None: its own."""
        self.shape = shape
        self._ops = ops_for(torch.device(device).type) if ops is None else ops
        self.num_slots = num_slots
        if memory is None:
            memory = torch.zeros(num_slots, shape.slot_bytes, dtype=torch.uint8, device=device)
        assert memory.shape[0] == num_slots and memory.shape[1] >= shape.slot_bytes, memory.shape
        self.arena = memory[:, : shape.slot_bytes]
        self.states = self._view(
            torch.float32,
            0,
            (shape.num_layers, shape.num_value_heads, shape.value_dim, shape.key_dim),
        )
        self.windows = self._view(
            shape.window_dtype,
            shape.windows_offset,
            (shape.num_layers, shape.window_rows, shape.conv_channels),
        )
        self.hidden = self._view(shape.window_dtype, shape.hidden_offset, (shape.hidden_size,))

    def _view(self, dtype: torch.dtype, offset_bytes: int, inner: tuple[int, ...]) -> torch.Tensor:
        typed = self.arena.view(dtype)  # [num_slots, slot_bytes / itemsize]
        start = offset_bytes // dtype.itemsize
        return typed[:, start : start + math.prod(inner)].unflatten(1, inner)

    def copy(self, sources: list[int], destinations: list[int]) -> None:
        """Copy whole slots, all layers, states and windows, in one call."""
        self._ops.copy_slots(self.arena, sources, destinations)


def restore_linear_state_slots(
    pool: StatePool,
    ops: Sequence[LinearStateCacheOp],
    has_initial_state: list[int],
    *,
    copy: bool = True,
) -> list[RestoreOutcome]:
    """Bring every row that asked for it to its source's state, before the forward that reads it.

    Sets has_initial_state[row] to 1 (RESTORED) or 0 (COLD_START: no source, id out of range, or
    the copy failed); rows without a request keep their value. Returns the outcome of each row. All
    valid rows are copied in one call; if it fails, row by row, so that one bad row harms no other.
    copy=False ("redirect") checks the same and copies nothing: the caller reads the source itself.

    ValueError before anything is copied: lengths differ, a live slot out of range or named twice,
    or a live slot that is another row's source.
    """
    _validate_batch(pool, ops, has_initial_state)
    outcomes = [RestoreOutcome.NOT_REQUESTED] * len(ops)
    rows = []
    for row, op in enumerate(ops):
        if not op.restore_requested:
            continue
        if 0 < op.restore_src_slot_id < pool.num_slots:
            outcomes[row] = RestoreOutcome.RESTORED
            if copy and op.restore_src_slot_id != op.linear_state_id:
                rows.append(row)
        else:
            logger.warning("row %d starts cold: source slot %d", row, op.restore_src_slot_id)
            outcomes[row] = RestoreOutcome.COLD_START
    if rows and not _copied(pool, [ops[row] for row in rows]):
        for row in rows:
            if not _copied(pool, [ops[row]]):
                outcomes[row] = RestoreOutcome.COLD_START
    for row, outcome in enumerate(outcomes):
        if outcome is not RestoreOutcome.NOT_REQUESTED:
            has_initial_state[row] = int(outcome)
    return outcomes


def _copied(pool: StatePool, ops: list[LinearStateCacheOp]) -> bool:
    try:
        pool.copy([op.restore_src_slot_id for op in ops], [op.linear_state_id for op in ops])
    except RuntimeError as error:  # what a device raises: the rows can still be computed cold
        logger.warning("restore of %d slots failed: %s", len(ops), error)
        return False
    return True


def _validate_batch(
    pool: StatePool, ops: Sequence[LinearStateCacheOp], has_initial_state: list[int]
) -> None:
    if len(has_initial_state) != len(ops):
        raise ValueError(f"{len(ops)} ops but {len(has_initial_state)} has_initial_state entries")
    live = [op.linear_state_id for op in ops]
    for slot in live:
        if not 0 < slot < pool.num_slots:
            raise ValueError(f"live slot must be in [1, {pool.num_slots}), got {slot}")
    if len(set(live)) != len(live):
        raise ValueError(f"live slots must be distinct, got {live}")
    for row, op in enumerate(ops):
        source = op.restore_src_slot_id
        if op.restore_requested and source in live and live.index(source) != row:
            raise ValueError(f"source slot {source} of row {row} is written by another row")
