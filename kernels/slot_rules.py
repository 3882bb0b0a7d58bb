"""Which slots the rows of one call may read, write and snapshot. Lists of ids in, ValueError out.

Shared by all state ops (a row is one sequence of the call):

1. a read slot is -1 (zero state) or in [0, num_slots); only a padding row reads slot 0;
2. a write slot is 0 (padding: nothing is written) or in [1, num_slots); no slot has two writers;
3. a slot that one row reads is never written by another (a row may read and write the same slot);
4. a snapshot slot is -1 (none) or in [1, num_slots), follows a full chunk of a row that is not
   padding, and is used once and by nothing else in the call;
5. steps have a write slot for each token; a row of several tokens doesn't write the slot it reads.
"""

import itertools
from collections.abc import Sequence

from kernels.constants import KERNEL_CHUNK

Segments = Sequence[tuple[int, int]]


def require(condition: bool, what: str, expected: object, actual: object) -> None:
    """Raise ValueError naming `what`, the expected and the actual value, unless it holds."""
    if not condition:
        raise ValueError(f"{what}: expected {expected}, got {actual}")


def segments(cu_seqlens: Sequence[int], *, num_tokens: int) -> list[tuple[int, int]]:
    """The (start, end) of each packed segment; they start at 0 and cover the pack in order."""
    ok = len(cu_seqlens) >= 1 and cu_seqlens[0] == 0 and cu_seqlens[-1] == num_tokens
    require(ok, "cu_seqlens", f"offsets from 0 to {num_tokens}", list(cu_seqlens))
    pairs = list(itertools.pairwise(cu_seqlens))
    ascending = all(start <= end for start, end in pairs)
    require(ascending, "cu_seqlens", "ascending offsets", list(cu_seqlens))
    return pairs


def row_slots(
    read_slots: Sequence[int],
    write_slots: Sequence[int],
    *,
    num_rows: int,
    num_slots: int,
) -> None:
    """Rules 1 to 3 of the module docstring, and one read and one write slot a row."""
    require(len(write_slots) == num_rows, "number of write slots", num_rows, len(write_slots))
    _reads_and_writes(read_slots, write_slots, range(num_rows), num_rows, num_slots)


def step_slots(
    read_slots: Sequence[int], write_slots: Sequence[int], pairs: Segments, *, num_slots: int
) -> None:
    """Rules 1 to 3 and 5: one read slot a row, one write slot a token."""
    writers = [row for row, (start, end) in enumerate(pairs) for _ in range(start, end)]
    num_tokens = len(writers)
    require(len(write_slots) == num_tokens, "number of write slots", num_tokens, len(write_slots))
    _reads_and_writes(read_slots, write_slots, writers, len(pairs), num_slots)
    for row, (read, (start, end)) in enumerate(zip(read_slots, pairs, strict=True)):
        in_place = end - start > 1 and read > 0 and read in write_slots[start:end]
        what = f"write slots of row {row}, which has {end - start} tokens"
        require(not in_place, what, f"none of them the read slot {read}", write_slots[start:end])


def _reads_and_writes(
    read_slots: Sequence[int],
    write_slots: Sequence[int],
    writer_rows: Sequence[int],
    num_rows: int,
    num_slots: int,
) -> None:
    """Rules 1 to 3; writer_rows[i] is the row that write slot i belongs to."""
    require(len(read_slots) == num_rows, "number of read slots", num_rows, len(read_slots))
    writers: dict[int, int] = {}
    for i, (row, slot) in enumerate(zip(writer_rows, write_slots, strict=True)):
        require(0 <= slot < num_slots, f"write slot of row {row}", f"in [0, {num_slots})", slot)
        if slot != 0:
            first = writers.setdefault(slot, i)
            rows = f"rows {writer_rows[first]}, {row}"
            require(first == i, f"writers of slot {slot}", "one row", rows)
    live_rows = {writer_rows[i] for i in writers.values()}
    for row, slot in enumerate(read_slots):
        require(-1 <= slot < num_slots, f"read slot of row {row}", f"in [-1, {num_slots})", slot)
        reads_padding = slot == 0 and row in live_rows
        require(not reads_padding, f"read slot of row {row}", "-1 or a slot above 0", slot)
        writer = writer_rows[writers[slot]] if slot in writers else row
        what = f"writer of slot {slot}, which row {row} reads"
        require(writer == row, what, "no other row", f"row {writer}")


def snapshots(
    snapshot_slots: Sequence[int],
    pairs: Segments,
    read_slots: Sequence[int],
    write_slots: Sequence[int],
    *,
    num_slots: int,
) -> None:
    """Rule 4; `snapshot_slots` has one entry a chunk, counted from the start of each segment."""
    num_chunks = sum(-(-(end - start) // KERNEL_CHUNK) for start, end in pairs)
    num_snapshots = len(snapshot_slots)
    require(num_snapshots == num_chunks, "number of snapshot slots", num_chunks, num_snapshots)
    used = {*read_slots, *write_slots}
    remaining = iter(snapshot_slots)
    for row, (start, end) in enumerate(pairs):
        for chunk_end in range(start + KERNEL_CHUNK, end + KERNEL_CHUNK, KERNEL_CHUNK):
            slot = next(remaining)
            if slot == -1:
                continue
            what = f"snapshot slot of row {row} after token {min(chunk_end, end) - start}"
            require(1 <= slot < num_slots, what, f"-1 or in [1, {num_slots})", slot)
            require(chunk_end <= end, what, f"-1 (not {KERNEL_CHUNK} tokens)", slot)
            require(write_slots[row] != 0, what, "-1 in a padding row", slot)
            require(slot not in used, what, "a slot of its own", slot)
            used.add(slot)
