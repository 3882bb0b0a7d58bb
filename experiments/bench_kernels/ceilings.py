"""How fast can this device copy, read and multiply? The roofs kernels are held against, and clocks.

A `Device` is all a benchmark needs to know of one: which ops, where tensors are made, how a call is
timed. Every timed call starts cold: the last-level cache is swept before it, as it is between two
calls of one layer in a model, by the weights of all the others.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels import KERNEL_CHUNK, ops_for
from kernels.ids import BlockTables, Ids
from kernels.linear import PackedLinear

Run = Callable[[], object]

_ASSUMED_CACHE_BYTES = 64 << 20
_CACHE_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # "32768K"


class Device:
    """The CPU. Raises ValueError where there are no kernels for the device type."""

    type = "cpu"
    delta_rate = "float32_bmm"  # what the products of the delta rule are made of
    has_reference = True  # kernels.reference works on CPU tensors

    def __init__(self, *, quick: bool = False) -> None:
        self.ops = ops_for(self.type)
        self.cache_bytes = 1 << 16 if quick else self._cache_bytes()
        self._sweep = torch.zeros(self.cache_bytes, device=self.type)  # float32: four times it
        self._generator = torch.Generator(self.type).manual_seed(0)

    def _cache_bytes(self) -> int:
        try:
            return int(_CACHE_SIZE.read_text().strip().removesuffix("K")) << 10
        except (OSError, ValueError):
            return _ASSUMED_CACHE_BYTES

    # ---- tensors

    def normal(self, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        empty = torch.empty(sizes, dtype=dtype, device=self.type)
        return empty.normal_(generator=self._generator)

    def uniform(self, *sizes: int) -> torch.Tensor:
        """float32, from 0 to 1."""
        return torch.rand(sizes, device=self.type, generator=self._generator)

    def ids(self, *values: int) -> Ids:
        return Ids(values, self._torch_device)

    def tables(self, *tables: range) -> BlockTables:
        return BlockTables(tables, self._torch_device)

    @property
    def _torch_device(self) -> torch.device:
        return self._sweep.device

    # ---- times

    def synchronise(self) -> None:
        """Wait until nothing is running."""

    def seconds(self, run: Run) -> float:
        """One call, from a swept cache."""
        self._sweep.add_(1.0)  # reads and writes: a fill could go past the cache
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def medians(self, runs: dict[str, Run], repeats: int, reset: Run) -> dict[str, float]:
        """Median seconds of each, in turn, so that a drift of the machine hits all alike.

        `reset` comes before every call and is not timed.
        """
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repeats):
            for name, run in runs.items():
                reset()
                times[name].append(self.seconds(run))
        return {name: statistics.median(values) for name, values in times.items()}

    # ---- what others have for this device only

    def fla_chunk_kernel(self) -> Any | None:
        """fla's `chunk_gated_delta_rule`, where it runs and can be imported."""
        return None

    @property
    def name(self) -> str:
        return self.type


class CudaDevice(Device):
    """A GPU, timed by CUDA events. Written without one at hand and never run: see it work first.

    The delta rule is held against bfloat16 products there, the fastest a kernel could choose.
    """

    type = "cuda"
    delta_rate = "bfloat16_linear"
    has_reference = False

    def _cache_bytes(self) -> int:
        return torch.cuda.get_device_properties(0).L2_cache_size

    def synchronise(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, run: Run) -> float:
        """One call, from a swept cache; its launch hides behind the sweep."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._sweep.add_(1.0)
        start.record()
        run()
        end.record()
        self.synchronise()
        return 1e-3 * start.elapsed_time(end)

    def fla_chunk_kernel(self) -> Any | None:
        if importlib.util.find_spec("fla") is None:
            return None
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(0)


DEVICES: dict[str, type[Device]] = {"cpu": Device, "cuda": CudaDevice}


# ---- ceilings


@dataclass(frozen=True)
class Work:
    """What a call must do at least: bytes it moves, each counted once, and floating-point
    operations, a multiplication and an addition being two. `rate` names the ceiling of these."""

    num_bytes: int
    flops: int
    rate: str

    def roof(self, ceilings: dict[str, float]) -> tuple[float, str]:
        """Seconds below which it can't be done, and what binds: max(bytes / B, FLOPs / F)."""
        bandwidth = max(ceilings["copy"], ceilings["read"])
        by_bytes, by_flops = self.num_bytes / bandwidth, self.flops / ceilings[self.rate]
        return max((by_bytes, "bytes"), (by_flops, self.rate))


def ceilings(device: Device, value_heads: int, head_dim: int, *, quick: bool) -> dict[str, float]:
    """Bytes or FLOPs a second, the best of some calls each.

    copy: in and out, of a buffer eight times the cache; read: its sum; float32_bmm: torch.bmm at
    the delta rule's own shape, queries and keys of a chunk [HV, 2 C, K] times states [HV, K, V];
    bfloat16_linear: PackedLinear, the better of 2048 rows, 4096 x 4096, and 512 rows, 1024 x 7168.
    Quick ones are tiny and no ceilings.
    """
    repeats = 2 if quick else 10
    source = torch.ones(2 * device.cache_bytes, device=device.type)  # float32
    target = torch.ones_like(source)
    num_bytes = source.numel() * source.itemsize
    rows = device.normal(value_heads, 2 * KERNEL_CHUNK, head_dim, dtype=torch.float32)
    states = device.normal(value_heads, head_dim, head_dim, dtype=torch.float32)
    linears = [(64, 128, 128)] if quick else [(2048, 4096, 4096), (512, 1024, 7168)]

    def best(amount: int, run: Run, times: int = repeats) -> float:
        return amount / min(device.seconds(run) for _ in range(times))

    def linear(num_rows: int, num_in: int, num_out: int) -> float:
        x, layer = device.normal(num_rows, num_in), PackedLinear(device.normal(num_out, num_in))
        return best(2 * num_rows * num_in * num_out, partial(layer, x))

    bmm_flops = 2 * rows.numel() * head_dim
    return {
        "copy": best(2 * num_bytes, lambda: target.copy_(source)),
        "read": best(num_bytes, source.sum),
        "float32_bmm": best(bmm_flops, lambda: torch.bmm(rows, states), 5 * repeats),
        "bfloat16_linear": max(linear(*shape) for shape in linears),
    }
