"""How packed rows are cut into the pieces that programs of a kernel take.

Made on the host from ids that were checked before, uploaded once, and kept for as long as the same
`Ids` come again: all layers of a forward pass share them.
"""

import functools
from typing import NamedTuple

import torch

from kernels.constants import KERNEL_CHUNK
from kernels.ids import Ids
from kernels.slot_rules import segments

_CHUNK_COLUMNS, _ROW_COLUMNS = 4, 5  # of `ChunkTable`; the kernels index them by number


class ChunkTable(NamedTuple):
    """Prefills cut into chunks of `KERNEL_CHUNK` tokens, counted from the start of each row.

    chunks [num_chunks, 4] int64: row, first token in the pack, tokens, snapshot slot (-1: none).
        An empty row has one chunk without tokens, so that its state can be copied.
    rows [num_rows, 5] int64: first token, tokens, first chunk, read slot, write slot.
    """

    chunks: torch.Tensor
    rows: torch.Tensor


@functools.lru_cache(32)
def chunk_table(
    cu_seqlens: Ids, read_slots: Ids, write_slots: Ids, snapshot_slots: Ids
) -> ChunkTable:
    """The table of these (checked) prefills, on the device of the ids."""
    snapshots = iter(snapshot_slots.host)
    chunks: list[list[int]] = []
    rows: list[list[int]] = []
    pairs = segments(cu_seqlens.host, num_tokens=cu_seqlens.host[-1])
    for row, (start, end) in enumerate(pairs):
        rows.append([start, end - start, len(chunks), read_slots.host[row], write_slots.host[row]])
        if start == end:
            chunks.append([row, start, 0, -1])
        for first in range(start, end, KERNEL_CHUNK):
            chunks.append([row, first, min(KERNEL_CHUNK, end - first), next(snapshots)])
    device = cu_seqlens.tensor.device
    return ChunkTable(
        Ids([x for chunk in chunks for x in chunk], device).tensor.view(-1, _CHUNK_COLUMNS),
        Ids([x for row in rows for x in row], device).tensor.view(-1, _ROW_COLUMNS),
    )


@functools.lru_cache(32)
def one_token_each(num_rows: int, device: torch.device) -> Ids:
    """The offsets of rows of one token."""
    return Ids(range(num_rows + 1), device)
