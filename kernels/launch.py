"""How Triton kernels are launched: one place for fixed options, targets, and for looking on.

Nothing is autotuned: another tiling or number of warps is another order of additions, so other
bits, and tuning a kernel that works in place would corrupt the pool. Tiles are fixed for each
target in the module of the kernel.
"""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton

from kernels.recorded_graph import launch_observer
from kernels.slot_rules import require

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
INTERPRETED = bool(triton.knobs.runtime.interpret)  # decided when triton is imported


@dataclass(frozen=True)
class Target:
    """What a kernel is compiled for: 'sm_80', 'sm_90', 'sm_100' or 'gfx942', and how wide it is."""

    name: str
    num_processors: int = 132

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("gfx")


@dataclass(frozen=True)
class Launch:
    """One launch as it was asked for."""

    kernel: Any  # triton.JITFunction
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constexprs: dict[str, Any]
    options: dict[str, Any]


_recording: ContextVar[tuple[Target, list[Launch]] | None] = ContextVar("recording", default=None)


@contextmanager
def recording(target: Target) -> Iterator[list[Launch]]:
    """Inside, launches are written down for `target` and not run: tensors may be on 'meta'."""
    launches: list[Launch] = []
    token = _recording.set((target, launches))
    try:
        yield launches
    finally:
        _recording.reset(token)


def target_of(device: torch.device) -> Target:
    """The target of the kernels that run on this device."""
    recorded = _recording.get()
    return recorded[0] if recorded is not None else _device_target(device)


@functools.lru_cache
def _device_target(device: torch.device) -> Target:
    if device.type != "cuda":
        return Target("sm_90", num_processors=4)  # the interpreter
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
    else:  # 10.3 takes the tiles of 10.0; 8.6 and 8.9 have less shared memory than 8.0
        major, minor = properties.major, properties.minor
        name = f"sm_{major}0" if major == 10 else f"sm_{major}{minor}"
    supported = name in TARGETS
    require(supported, f"GPU {properties.name!r}", f"one of {TARGETS}", name)
    return Target(name, properties.multi_processor_count)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (triton's own is for kernels too and takes microseconds.)"""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int,
    num_stages: int,
    **constexprs: Any,
) -> None:
    """Run `kernel` on `grid`; an empty grid runs nothing. Multiplications and additions stay two
    roundings (no fused ones), whatever the compiler's default."""
    if math.prod(grid) == 0:
        return
    options = dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False)
    recorded = _recording.get()
    if recorded is not None:
        recorded[1].append(Launch(kernel, grid, args, constexprs, options))
        return
    observer = launch_observer.get()
    if observer is None:
        kernel[grid](*args, **constexprs, **options)
    else:
        observer(functools.partial(kernel[grid], *args, **constexprs, **options))


def require_runnable(device: torch.device) -> None:
    """ValueError unless Triton kernels can run on tensors of this device."""
    if _recording.get() is not None or device.type == "cuda":
        return
    if not (INTERPRETED and device.type == "cpu"):
        raise ValueError(
            f"device: expected 'cuda', or 'cpu' with TRITON_INTERPRET=1 set at start, got {device}"
        )
