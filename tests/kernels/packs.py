"""Inputs for kernel tests: packed rows, NaN-poisoned pools, and how results are compared."""

import itertools
from dataclasses import dataclass, field

import torch

from kernels import KERNEL_CHUNK

# Relative error in the norm by the dtype of the result, against a float64 reference that gets the
# same rounded inputs. In bfloat16 attention also rounds its probabilities, the others only once.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 3e-3}
ATTENTION_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the norm; NaN anywhere in `out` makes it NaN, which passes no `<`."""
    out, expected = out.double(), expected.double()
    if expected.numel() == 0:
        return 0.0 if out.shape == expected.shape else float("nan")
    norm = float(torch.linalg.vector_norm(expected))
    difference = float(torch.linalg.vector_norm(out - expected))
    return difference / max(norm, 1e-30)  # what underflows in float32 is as good as 0


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bit patterns of x, so that NaN equals NaN and 0.0 differs from -0.0."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integers[x.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*sizes, generator=generator(seed)).to(dtype)


@dataclass
class Pool:
    """Slots as the middle layer of three, strided like a real arena, poisoned with NaN.

    `view` [num_slots, *inner] is what an op gets; `everything` [num_slots, 3, *inner] also has the
    layers around it, which no op may touch.
    """

    everything: torch.Tensor

    @classmethod
    def poisoned(cls, num_slots: int, *inner: int, dtype: torch.dtype, filled=()) -> "Pool":
        """All NaN but the `filled` slots, whose values depend on nothing but the slot."""
        pool = cls(torch.full((num_slots, 3, *inner), float("nan"), dtype=dtype))
        for slot in filled:
            pool.view[slot] = normal(1000 + slot, *inner, dtype=dtype)
        return pool

    @property
    def view(self) -> torch.Tensor:
        return self.everything[:, 1]

    def double(self) -> "Pool":
        return Pool(self.everything.double())

    def clone(self) -> "Pool":
        return Pool(self.everything.clone())

    def untouched_but(self, before: "Pool", slots: set[int]) -> bool:
        """Only these slots of the view differ from `before`, bit for bit."""
        now = self.clone()
        for slot in slots:
            now.view[slot] = before.view[slot]
        return same_bits(now.everything, before.everything)


@dataclass(frozen=True)
class Pack:
    """Rows of one prefill: segment lengths, slots, and {chunk entry: slot} of its snapshots."""

    lengths: list[int]
    reads: list[int]
    writes: list[int]
    snapshots: dict[int, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_slots(self) -> int:
        return max([0, *self.reads, *self.writes, *self.snapshots.values()]) + 3

    @property
    def sources(self) -> tuple[int, ...]:
        return tuple(sorted({slot for slot in self.reads if slot > 0}))

    @property
    def written(self) -> set[int]:
        return {*self.writes, *self.snapshots.values()} - {0}

    def segments(self) -> list[slice]:
        ends = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        return [slice(a, b) for a, b in itertools.pairwise(ends)]

    def vectors(self) -> dict[str, torch.Tensor]:
        """The keyword arguments of a prefill op."""
        entries = [-1] * sum(-(-n // KERNEL_CHUNK) for n in self.lengths)
        for entry, slot in self.snapshots.items():
            entries[entry] = slot
        ids = {"read_slots": self.reads, "write_slots": self.writes, "snapshot_slots": entries}
        vectors = {name: torch.tensor(slots, dtype=torch.int64) for name, slots in ids.items()}
        return {"cu_seqlens": torch.tensor([0, *self.lengths]).cumsum(0), **vectors}


def delta_inputs(
    num_tokens: int, H: int, HV: int, K: int, V: int, dtype: torch.dtype, seed: int = 1
) -> tuple[torch.Tensor, ...]:
    """q, k, v, g, beta with decays slow enough for a state to matter hundreds of tokens later."""
    k = normal(seed, num_tokens, H, K, dtype=dtype)
    q = (normal(seed + 1, num_tokens, H, K) + k.float()).to(dtype)  # q.k away from zero
    v = normal(seed + 2, num_tokens, HV, V, dtype=dtype)
    g = -0.05 * torch.rand(num_tokens, HV, generator=generator(seed + 3)) ** 2
    beta = torch.rand(num_tokens, HV, generator=generator(seed + 4))
    return q, k, v, g, beta


def as_double(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(t.double() for t in tensors)


def real_tokens(pack: Pack) -> torch.Tensor:
    """A mask of the tokens outside padding rows, whose outputs mean nothing."""
    mask = torch.zeros(pack.num_tokens, dtype=torch.bool)
    for part, slot in zip(pack.segments(), pack.writes, strict=True):
        mask[part] = slot != 0
    return mask


# Slot 0 and the two last slots of a pool are never used.
PACKS = {
    "no rows": Pack([], [], []),
    "one token": Pack([1], [-1], [1]),
    "two tokens": Pack([2], [1], [2]),
    "three tokens in place": Pack([3], [1], [1]),
    "chunk - 1": Pack([63], [2], [1]),
    "chunk": Pack([64], [1], [1], {0: 2}),
    "chunk + 1": Pack([65], [-1], [2], {0: 1}),
    "two chunks and two tokens": Pack([130], [3], [1], {0: 2, 1: 4}),
    "empty segment": Pack([0], [1], [2]),
    "empty segment in place": Pack([0], [1], [1]),
    "empty fresh segment": Pack([0], [-1], [1]),
    "padding row": Pack([3, 2], [-1, 1], [0, 2]),
    "padding row reads slot 0": Pack([2, 3], [1, 0], [1, 0]),
    "rows of one source": Pack([5, 64, 1], [4, 4, 4], [1, 2, 3], {1: 6}),
    "mixed": Pack(
        [65, 0, 130, 1, 64, 2], [3, 3, -1, 9, 5, 0], [1, 2, 4, 6, 5, 0], {0: 7, 3: 8, 6: 10}
    ),
}


@dataclass(frozen=True)
class Steps:
    """Rows of steps: read slot a row, write slot a token, and how many tokens each row has."""

    reads: list[int]
    writes: list[int]
    lengths: list[int] | None = None

    @property
    def sources(self) -> tuple[int, ...]:
        return tuple(sorted({slot for slot in self.reads if slot > 0}))

    @property
    def written(self) -> set[int]:
        return {*self.writes} - {0}

    @property
    def num_tokens(self) -> int:
        return len(self.writes)

    def vectors(self) -> dict[str, torch.Tensor]:
        """The keyword arguments of a step op."""
        ids = {"read_slots": self.reads, "write_slots": self.writes}
        vectors = {name: torch.tensor(slots, dtype=torch.int64) for name, slots in ids.items()}
        if self.lengths is not None:
            vectors["cu_seqlens"] = torch.tensor([0, *self.lengths]).cumsum(0)
        return vectors

    def real_tokens(self) -> torch.Tensor:
        """A mask of the tokens outside padding rows, whose outputs mean nothing."""
        lengths = [1] * len(self.reads) if self.lengths is None else self.lengths
        lengths = torch.tensor(lengths, dtype=torch.int64)
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        alone = lengths[rows] == 1
        return ~(alone & (torch.tensor(self.writes) == 0))


STEPS = {
    "no rows": Steps([], []),
    "fresh": Steps([-1], [1]),
    "in place": Steps([2, 1, 5], [2, 1, 5]),
    "redirected": Steps([2, 3], [1, 4]),
    "one source": Steps([3, 3, 3], [1, 2, 4]),
    "padding": Steps([0, 2, 0, -1], [0, 2, 0, 0]),
    "mixed": Steps([4, 4, -1, 6, 0], [1, 2, 3, 6, 0]),
}
VERIFIES = {
    "one row of four": Steps([1], [2, 3, 4, 5], [4]),
    "rows of several lengths": Steps([1, -1, 6, 7], [2, 3, 4, 5, 8, 9, 10], [3, 1, 0, 3]),
    "states between are not kept": Steps([1], [0, 0, 2], [3]),
    "the last is not kept": Steps([1], [2, 3, 0], [3]),
    "nothing is kept": Steps([-1, 1], [0, 0, 2], [2, 1]),
    "one token in place beside drafts": Steps([1, 2], [1, 3, 4, 5], [1, 3]),
    "one source": Steps([1, 1], [2, 3, 4, 5], [2, 2]),
    "padding": Steps([0, 1, -1], [0, 2, 3, 0], [1, 2, 1]),
}
