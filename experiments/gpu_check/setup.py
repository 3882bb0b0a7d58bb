"""What does a check of the kernels need? Random inputs, poisoned memory, comparisons."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from experiments.gpu_check.sizes import Sizes
from kernels import Ops, ops_for
from kernels.ids import BlockTables, Ids


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """norm(out - expected) / norm(expected); NaN where a NaN or another shape is."""
    if out.shape != expected.shape:
        return float("nan")
    if not expected.numel():
        return 0.0
    out, expected = out.double(), expected.double()
    norm = float(torch.linalg.vector_norm(expected))
    return float(torch.linalg.vector_norm(out - expected)) / max(norm, 1e-30)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bit patterns: NaN equals NaN, and 0.0 is not -0.0."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integers[x.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


@dataclass(frozen=True)
class Check:
    """One comparison. error: None where it was of bits (bar 0) or is no number."""

    name: str
    passed: bool
    bar: float
    error: float | None = None
    detail: str = ""


@dataclass
class Bench:
    """Where checks run and are written down. `say` prints a line at once."""

    sizes: Sizes
    seed: int
    say: Callable[[str], None]
    stopwatch: Any = None  # timings.Stopwatch, on a GPU
    facts: dict[str, float] = field(default_factory=dict)  # ceilings: of one part for the next
    checks: list[Check] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ops: Ops = ops_for(self.sizes.device, implementation="triton")
        self.device = torch.empty(0, device=self.sizes.device).device  # "cuda:0", as tensors say
        self.generator = torch.Generator(self.device)
        self.begin("")

    def begin(self, part: str) -> None:
        """Forget the last part's results; random numbers depend on the seed and the part."""
        self.generator.manual_seed(zlib.crc32(f"{self.seed}/{part}".encode()))
        self.checks, self.timings = [], []

    # ---- tensors

    def normal(self, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = self.sizes.dtype if dtype is None else dtype
        x = torch.empty(sizes, device=self.device, dtype=dtype)
        return x.normal_(generator=self.generator)

    def uniform(self, *sizes: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """float32."""
        x = torch.empty(sizes, device=self.device)
        return x.uniform_(low, high, generator=self.generator)

    def ids(self, values: Sequence[int]) -> Ids:
        return Ids(values, self.device)

    def tables(self, tables: Sequence[Sequence[int]]) -> BlockTables:
        return BlockTables(tables, self.device)

    # ---- results

    def close(self, name: str, out: torch.Tensor, expected: torch.Tensor, bar: float) -> None:
        """An error of at most `bar`; no NaN in `out`."""
        found = error(out, expected)
        number = found if found < float("inf") else None  # neither NaN nor infinity in JSON
        self._add(Check(name, found <= bar, bar, number, "" if number is not None else "no number"))

    def equal(self, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        """The same bits."""
        same = same_bits(a, b)
        far = "" if same else f"error {error(a, b):.2g}, {list(a.shape)} and {list(b.shape)}"
        self._add(Check(name, same, 0.0, 0.0 if same else None, far))

    def holds(self, name: str, ok: bool, detail: str = "") -> None:
        self._add(Check(name, bool(ok), 0.0, None, detail))

    def _add(self, check: Check) -> None:
        self.checks.append(check)
        number = "-" if check.error is None else f"{check.error:.2e}"
        mark = "ok  " if check.passed else "FAIL"
        self.say(f"  {mark} {check.name}: {number} (bar {check.bar:g}) {check.detail}".rstrip())


@contextmanager
def nan_outputs() -> Iterator[None]:
    """Fresh tensors of torch.empty and new_empty hold NaN inside, so what is not written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Pool:
    """Slots as the middle one of three layers, strided as in an arena, poisoned with NaN.

    `view` [num_slots, *inner] is what an op gets; the layers around it no op may touch.
    """

    def __init__(self, everything: torch.Tensor) -> None:
        self.everything = everything

    @classmethod
    def poisoned(
        cls, bench: Bench, num_slots: int, *inner: int, dtype: torch.dtype, filled: set[int]
    ) -> "Pool":
        size = (num_slots, 3, *inner)
        pool = cls(torch.full(size, float("nan"), dtype=dtype, device=bench.device))
        for slot in sorted(filled):
            pool.view[slot] = bench.normal(*inner, dtype=dtype)
        return pool

    @property
    def view(self) -> torch.Tensor:
        return self.everything[:, 1]

    def clone(self) -> "Pool":
        return Pool(self.everything.clone())

    def check(
        self, bench: Bench, name: str, before: "Pool", expected: dict[int, torch.Tensor], bar: float
    ) -> None:
        """The expected slots are near (bar 0: equal), and nothing else of the pool changed."""
        slots = sorted(expected)
        if slots:
            found = self.view[slots]
            wanted = torch.stack([expected[slot].double() for slot in slots])
            if bar:
                bench.close(f"{name}: {len(slots)} slots", found, wanted, bar)
            else:
                bench.equal(f"{name}: {len(slots)} slots", found, wanted.to(found.dtype))
        now = self.clone()
        now.view[slots] = before.view[slots]
        bench.equal(f"{name}: other slots untouched", now.everything, before.everything)


@contextmanager
def alike_rows() -> Iterator[None]:
    """The interpreter's tl.dot adds in one order in all rows of a tile inside, as a tensor core
    does; numpy's own matmul does not."""
    import numpy

    def matmul(a: Any, b: Any, dtype: Any = None) -> Any:
        a, b = a.astype(dtype), b.astype(dtype)
        total = numpy.zeros((a.shape[0], b.shape[1]), dtype)
        for k in range(a.shape[1]):
            total += a[:, k, None] * b[None, k]
        return total

    original = numpy.matmul
    numpy.matmul = matmul
    try:
        yield
    finally:
        numpy.matmul = original
