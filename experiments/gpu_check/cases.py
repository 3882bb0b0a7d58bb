"""Which packs and steps do the checks run? Rows of every kind, with the slots they use."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from experiments.gpu_check.setup import Bench
from kernels import KERNEL_CHUNK


@dataclass(frozen=True)
class Rows:
    """Slots of a pack (snapshots not None) or of steps, write slots then one a token."""

    offsets: list[int]
    reads: list[int]
    writes: list[int]
    snapshots: list[int] | None = None

    @property
    def num_tokens(self) -> int:
        return self.offsets[-1]

    @property
    def segments(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(self.offsets))

    @property
    def num_slots(self) -> int:
        """Slot 0, those in use, and two that nobody uses."""
        return max([0, *self.reads, *self.writes, *(self.snapshots or [])]) + 3

    @property
    def sources(self) -> set[int]:
        return {slot for slot in self.reads if slot > 0}

    def live(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of `x` that mean something: a padding row's output does not."""
        keep = [
            t
            for row, (start, end) in enumerate(self.segments)
            for t in range(start, end)
            if self.snapshots is None or self.writes[row] > 0
        ]
        padding = set()
        if self.snapshots is None:
            padding = {s for s, e in self.segments if e == s + 1 and self.writes[s] == 0}
        return x[[t for t in keep if t not in padding]]

    def vectors(self, bench: Bench) -> dict[str, Any]:
        """Keyword arguments of the ops, on the device."""
        ids = dict(cu_seqlens=self.offsets, read_slots=self.reads, write_slots=self.writes)
        if self.snapshots is not None:
            ids["snapshot_slots"] = self.snapshots
        return {name: bench.ids(values) for name, values in ids.items()}

    def core_slots(self) -> tuple[Any, ...]:
        """Arguments of reference.prefill_slots or step_slots after the pool."""
        rest = () if self.snapshots is None else (self.snapshots,)
        return self.segments, self.reads, self.writes, *rest


def pack(lengths: tuple[int, ...]) -> Rows:
    """These prefills, cold, redirected and in place in turn, every other full chunk snapshot, and
    two rows more: padding, and one without tokens."""
    lengths = (*lengths, 3, 0)
    slots = itertools.count(1)
    reads, writes, snapshots = [], [], []
    for row, length in enumerate(lengths):
        padding = row == len(lengths) - 2
        kind = ("redirect", "cold", "in place")[row % 3]
        read = -1 if kind == "cold" or padding else next(slots)
        reads.append(read)
        writes.append(0 if padding else read if kind == "in place" and read > 0 else next(slots))
        for chunk in range(-(-length // KERNEL_CHUNK)):
            full = (chunk + 1) * KERNEL_CHUNK <= length
            snapshots.append(next(slots) if full and chunk % 2 == 0 else -1)
    return Rows([0, *itertools.accumulate(lengths)], reads, writes, snapshots)


def steps(num_rows: int, tokens: int = 1) -> Rows:
    """Rows of that many tokens: cold, redirected and (of one token) in place; each eighth row is
    padding, or, of several tokens, keeps only its last state."""
    slots = itertools.count(1)
    reads, writes = [], []
    for row in range(num_rows):
        kind = ("redirect", "cold", "in place")[row % 3]
        eighth = row % 8 == 5
        read = -1 if kind == "cold" or (eighth and tokens == 1) else next(slots)
        reads.append(read)
        for t in range(tokens):
            if eighth and (tokens == 1 or t < tokens - 1):
                writes.append(0)
            else:
                in_place = kind == "in place" and tokens == 1
                writes.append(read if in_place else next(slots))
    return Rows([tokens * row for row in range(num_rows + 1)], reads, writes)


def delta_inputs(bench: Bench, T: int, H: int, HV: int) -> tuple[torch.Tensor, ...]:
    """q, k, v, g, beta; decays so slow that a state matters hundreds of tokens later."""
    width = bench.sizes.width
    k = bench.normal(T, H, width)
    q = bench.normal(T, H, width) + k  # q.k away from zero
    g = -0.05 * bench.uniform(T, HV).square_()
    return q, k, bench.normal(T, HV, width), g, bench.uniform(T, HV)


@dataclass(frozen=True)
class NetInputs:
    """What a GDN mixer gets in a step: rows that are slices of a wider array."""

    qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    weight: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    def __getitem__(self, rows: slice) -> tuple[torch.Tensor, ...]:
        rest = (self.weight, self.A_log, self.dt_bias)
        return (self.qkv[rows], self.a[rows], self.b[rows], *rest)


def net_inputs(bench: Bench, T: int, ratio: int) -> NetInputs:
    s = bench.sizes
    H, HV = s.key_heads, s.key_heads * ratio
    C = (2 + ratio) * H * s.width
    rest = -2 * HV % 16  # rows start at multiples of 16 bytes
    qkv, a, b, _ = bench.normal(T, C + 2 * HV + rest).split([C, HV, HV, rest], -1)
    weight = bench.normal(C, 4).mul_(0.5)
    A_log, dt_bias = bench.uniform(HV, low=-4.0, high=1.0), bench.uniform(HV, low=-6.0, high=-2.0)
    return NetInputs(qkv, a, b, weight, A_log, dt_bias)


class Cache:
    """K/V of sequences of these lengths in shuffled blocks of 64; everything else is NaN."""

    def __init__(self, bench: Bench, kv_lens: list[int]) -> None:
        s = bench.sizes
        needed = [-(-n // 64) for n in kv_lens]
        num_blocks = sum(needed) + 2
        size = (2, num_blocks, 64, s.kv, s.D)
        whole = torch.full(size, float("nan"), dtype=s.dtype, device=bench.device)
        self.k, self.v = whole
        order = torch.randperm(num_blocks - 1, generator=bench.generator, device=bench.device)
        free = [block + 1 for block in order.tolist()]
        self.tables = [[free.pop() for _ in range(n)] for n in needed]
        for kv_len, table in zip(kv_lens, self.tables, strict=True):
            where = torch.arange(kv_len, device=bench.device)
            blocks = torch.tensor(table, device=bench.device)[where // 64]
            for cache in (self.k, self.v):
                cache[blocks, where % 64] = bench.normal(kv_len, s.kv, s.D)


def queries(bench: Bench, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q, and a gate whose heads lie between others, as in the model's projection."""
    s = bench.sizes
    return bench.normal(rows, s.heads, s.D), bench.normal(rows, s.heads, 2, s.D)[:, :, 1]
