"""flash-linear-attention's chunk kernel behind the op interface: a baseline and a cross-check.

That kernel knows no slots: the states are gathered, it runs, and the results are scattered. It has
no snapshots either, so a row with snapshots is run piece by piece, each up to the next one. It is
autotuned, so its bits may change from one process to the next: exactness is not promised here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels import validate
from kernels.constants import KERNEL_CHUNK
from kernels.ids import IdVector

ChunkRule = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def load_chunk_rule() -> ChunkRule:
    """fla's `chunk_gated_delta_rule`; ImportError with the fix where fla is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        raise ImportError(
            "delta_rule='fla' needs flash-linear-attention: pip install flash-linear-attention"
        ) from error
    return chunk_gated_delta_rule


class FlaPrefill:
    """`gated_delta_prefill` of the op interface on top of a chunk rule with fla's signature."""

    def __init__(self, rule: ChunkRule) -> None:
        self._rule = rule

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
        *,
        cu_seqlens: IdVector,
        read_slots: IdVector,
        write_slots: IdVector,
        snapshot_slots: IdVector,
    ) -> torch.Tensor:
        """See reference.gated_delta_prefill; o [T, HV, V] float32."""
        slots: dict[str, Any] = dict(read_slots=read_slots, write_slots=write_slots)
        slots.update(cu_seqlens=cu_seqlens, snapshot_slots=snapshot_slots)
        segments = validate.gated_delta(q, k, v, g, beta, states, **slots)
        reads, writes, snaps = validate.as_lists(
            read_slots=read_slots, write_slots=write_slots, snapshot_slots=snapshot_slots
        )
        o = torch.empty(v.shape, dtype=torch.float32, device=v.device)
        live = [torch.zeros_like(states[0]) if slot < 0 else states[slot] for slot in reads]
        for pieces in _rounds(segments, writes, snaps):
            rows = [row for row, _, _, _ in pieces]
            spans = [(lo, hi) for _, lo, hi, _ in pieces]
            inputs = [torch.cat([x[lo:hi] for lo, hi in spans])[None] for x in (q, k, v, g, beta)]
            lengths = torch.tensor([0, *(hi - lo for lo, hi in spans)])
            out, final = self._rule(
                *inputs,
                initial_state=torch.stack([live[row] for row in rows]),
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                state_v_first=True,
                cu_seqlens=lengths.cumsum(0).to(q.device),
            )
            at = 0
            for i, (row, lo, hi, slot) in enumerate(pieces):
                o[lo:hi] = out[0, at : at + hi - lo]
                at += hi - lo
                live[row] = final[i]
                if slot > 0:
                    states[slot] = final[i]
        for state, write in zip(live, writes, strict=True):
            if write > 0:
                states[write] = state
        return o


def _rounds(
    segments: validate.Segments, writes: Sequence[int], snapshots: Sequence[int]
) -> list[list[tuple[int, int, int, int]]]:
    """Pieces (row, first token, end, snapshot slot or -1) of each round, one a row that has more.

    A piece ends at a snapshot or with its row; padding rows have none.
    """
    rounds: list[list[tuple[int, int, int, int]]] = []
    chunk = 0
    for row, ((start, end), write) in enumerate(zip(segments, writes, strict=True)):
        first, pieces = start, []
        for lo in range(start, end, KERNEL_CHUNK):
            hi = min(lo + KERNEL_CHUNK, end)
            if snapshots[chunk] > 0 or hi == end:
                pieces.append((row, first, hi, snapshots[chunk]))
                first = hi
            chunk += 1
        for number, piece in enumerate(pieces if write > 0 else []):
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(piece)
    return rounds
