"""What is a case of the kernel benchmark? One call of a kernel beside others that do the same.

All return their results in one layout, from the same inputs, so that they can be compared before
they are timed. The cases themselves: `cases_state.py`, `cases_dense.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from experiments.bench_kernels.baselines import Tensors
from experiments.bench_kernels.ceilings import Device, Work

CHUNKED_BAR = 0.005  # fla's own bar for its chunked kernel
ATTENTION_BAR = 0.008  # its probabilities are rounded to bfloat16 too

RunTensors = Callable[[], Tensors]


@dataclass(frozen=True)
class Baseline:
    """Someone else's way. `tokens`: it takes only that many, its time is scaled to all of them."""

    name: str
    run: RunTensors
    tokens: int | None = None


@dataclass(frozen=True)
class Case:
    """One call. `bar`: largest relative error in the norm (0: equal); `reset` undoes the call."""

    name: str
    shape: str
    sizes: dict[str, int]
    run: RunTensors
    baselines: tuple[Baseline, ...]
    work: Work
    bar: float = CHUNKED_BAR
    reset: Callable[[], object] = lambda: None

    def errors(self) -> dict[str, float]:
        """The largest error of any result against each baseline, all from the same start."""
        self.reset()
        ours = [x.clone() for x in self.run()]
        found = {}
        for baseline in self.baselines:
            self.reset()
            theirs = baseline.run()
            mine = ours if baseline.tokens is None else [ours[0][: baseline.tokens]]
            found[baseline.name] = max(map(relative_error, mine, theirs))
        return found

    def scale(self, baseline: Baseline) -> float:
        """How many times longer the baseline takes for the whole call."""
        return 1.0 if baseline.tokens is None else self.sizes["tokens"] / baseline.tokens

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {value}" for name, value in self.sizes.items())
        return f"{self.shape} {self.name} ({sizes})"


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """norm(ours - theirs) / norm(theirs); infinite where a NaN or another shape is."""
    if ours.shape != theirs.shape:
        return float("inf")
    if torch.equal(ours, theirs):
        return 0.0
    ours, theirs = ours.double(), theirs.double()
    error = float((ours - theirs).norm() / theirs.norm())
    return error if error == error else float("inf")


@dataclass(frozen=True)
class Sizes:
    """How much each kernel gets. `chunk`: tokens of an attention prefill and rows of the MLP."""

    tokens: tuple[int, ...]
    batches: tuple[int, ...]
    chunk: int
    cached: int


class Layer:
    """Sizes of one layer of each kind, from an entry of `model_shapes.SHAPES`, on a device.

    H key heads, HV value heads, K and V their widths, W taps, C channels of the convolution; heads
    and kv of attention, D their width.
    """

    def __init__(self, device: Device, shape: str, config: dict[str, Any]) -> None:
        self.device, self.ops, self.shape, self.config = device, device.ops, shape, config
        self.H, self.HV = config["linear_num_key_heads"], config["linear_num_value_heads"]
        self.K, self.V = config["linear_key_head_dim"], config["linear_value_head_dim"]
        self.W = 4
        self.C = 2 * self.H * self.K + self.HV * self.V
        self.heads, self.kv = config["num_attention_heads"], config["num_key_value_heads"]
        self.D = config["head_dim"]

    @property
    def state_bytes(self) -> int:
        """Of one state, float32."""
        return 4 * self.HV * self.V * self.K

    def case(self, name: str, sizes: dict[str, int], **rest: Any) -> Case:
        return Case(name=name, shape=self.shape, sizes=sizes, **rest)
