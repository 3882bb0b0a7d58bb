"""What the scheduler tells the worker about one row's linear state: ids only, never hashes."""

import struct
from dataclasses import dataclass
from enum import IntEnum

NO_SLOT = -1
_LAYOUT = struct.Struct("<BiBiq")  # version, live slot, restore requested, source slot, boundary
_VERSION = 1


class RestoreOutcome(IntEnum):
    """Result of one op. The value is what `has_initial_state` becomes; NOT_REQUESTED leaves it."""

    COLD_START = 0
    RESTORED = 1
    NOT_REQUESTED = 2


@dataclass(frozen=True)
class LinearStateCacheOp:
    """One row of one step.

    linear_state_id: the live slot that the step writes.
    restore_requested: the row must start from a source; a bit of its own, so that 'asked for a
        restore, no source resolved' survives serialisation and becomes COLD_START.
    restore_src_slot_id: the source slot, or NO_SLOT.
    boundary: tokens the source stands for; the worker checks it against the row.
    """

    linear_state_id: int
    restore_requested: bool = False
    restore_src_slot_id: int = NO_SLOT
    boundary: int = 0

    def to_bytes(self) -> bytes:
        return _LAYOUT.pack(
            _VERSION,
            self.linear_state_id,
            self.restore_requested,
            self.restore_src_slot_id,
            self.boundary,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "LinearStateCacheOp":
        """Inverse of `to_bytes`; ValueError for another length, version or flag."""
        if len(data) != _LAYOUT.size:
            raise ValueError(f"a cache op has {_LAYOUT.size} bytes, got {len(data)}")
        version, live, requested, source, boundary = _LAYOUT.unpack(data)
        if version != _VERSION:
            raise ValueError(f"cache op version {_VERSION} expected, got {version}")
        if requested not in (0, 1):
            raise ValueError(f"restore_requested must be 0 or 1, got {requested}")
        return cls(live, bool(requested), source, boundary)
