"""How is a call timed, and what is its time a fraction of?

A window is some calls one after the other, each on other memory, so that the cache holds none of
it; it is timed between two events on the device while the host runs ahead. A result is the median
of at least `REPEATS` windows, divided by their number of calls.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from experiments.gpu_check.setup import Bench

Call = Callable[[], object]

REPEATS = 21
LONG_SECONDS = 3.0  # windows that take longer in all are repeated fewer times, but not below FEWEST
FEWEST = 5
_CYCLES_PER_SECOND = 2.0e9
_LONGEST_SLEEP = 0.05
_CACHE_BYTES = 256 << 20


class Stopwatch(Protocol):
    """Seconds of one window of calls."""

    warm: bool  # only compile: run everything once and time nothing

    def window(self, calls: Sequence[Call]) -> float: ...

    def wall(self, call: Call) -> float: ...


class CudaStopwatch:
    """CUDA events on the current stream, behind a delay that lets the host enqueue the window."""

    def __init__(self, *, warm: bool = False) -> None:
        self.warm = warm
        self._sweep = torch.zeros(_CACHE_BYTES // 4, device="cuda")
        self._host_seconds: dict[int, float] = {}

    def window(self, calls: Sequence[Call]) -> float:
        if self.warm:
            calls[0]()
            torch.cuda.synchronize()
            return 0.0
        self._sweep.sum()  # a read leaves no dirty lines behind
        self._delay(1.5 * self._host_seconds.get(id(calls), 0.004) + 2e-4)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began = time.perf_counter()
        start.record()
        for call in calls:
            call()
        end.record()
        self._host_seconds = {id(calls): time.perf_counter() - began}
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3

    def _delay(self, seconds: float) -> None:
        sleep = getattr(torch.cuda, "_sleep", None)
        if sleep is not None:
            sleep(int(min(seconds, _LONGEST_SLEEP) * _CYCLES_PER_SECOND))
        else:  # about 60 us each
            for _ in range(int(min(seconds, _LONGEST_SLEEP) / 6e-5)):
                self._sweep.sum()

    def wall(self, call: Call) -> float:
        """Seconds until the host has the result: launches and device."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - began


def median_seconds(stopwatch: Stopwatch, calls: Sequence[Call], repeats: int = REPEATS) -> float:
    """Of one call of the window; 0.0 if this is the warm-up."""
    first = stopwatch.window(calls)
    if stopwatch.warm:
        return 0.0
    second = stopwatch.window(calls)
    fitting = int(LONG_SECONDS / max(first, second, 1e-9))
    repeats = max(FEWEST, min(repeats, fitting))
    return statistics.median(stopwatch.window(calls) for _ in range(repeats)) / len(calls)


def median_wall(stopwatch: Stopwatch, call: Call, repeats: int = REPEATS) -> float:
    """Median wall seconds of a call; 0.0 if this is the warm-up."""
    stopwatch.wall(call)
    if stopwatch.warm:
        return 0.0
    return statistics.median(stopwatch.wall(call) for _ in range(repeats))


def fraction(part: float, whole: float) -> float | None:
    """part / whole; None where there is no whole."""
    return part / whole if whole > 0 else None


def row(
    bench: Bench,
    name: str,
    calls: Sequence[Call],
    *,
    num_bytes: float = 0,
    flops: float = 0,
    baselines: dict[str, Sequence[Call]] | None = None,
    goal: float | None = None,
    note: str = "",
) -> float:
    """Time a call and its baselines, write the row down and print it; the call's seconds.

    goal: the share of the roof that is aimed at. The roof: the later of bytes at the copy ceiling
    and FLOPs at the matmul ceiling, both measured in this run.
    """
    seconds = median_seconds(bench.stopwatch, calls)
    others: dict[str, Any] = {}
    for other, theirs in (baselines or {}).items():
        try:
            their_seconds = median_seconds(bench.stopwatch, theirs)
        except Exception as problem:  # a baseline that can't run is no fault of ours
            others[other] = {"ms": None, "ratio": None, "problem": _short(problem)}
        else:
            others[other] = {"ms": 1e3 * their_seconds, "ratio": fraction(their_seconds, seconds)}
    if not bench.stopwatch.warm:
        result = summary(name, seconds, bench.facts, num_bytes=num_bytes, flops=flops, goal=goal)
        write(bench, result | {"baselines": others, "note": note})
    return seconds


def summary(
    name: str,
    seconds: float,
    ceilings: dict[str, float],
    *,
    num_bytes: float = 0,
    flops: float = 0,
    goal: float | None = None,
) -> dict[str, Any]:
    """What a time means beside the ceilings `bytes_per_s` and `flops_per_s`."""
    copy, matmul = ceilings.get("bytes_per_s", 0.0), ceilings.get("flops_per_s", 0.0)
    from_bytes = num_bytes / copy if copy else 0.0
    from_flops = flops / matmul if matmul else 0.0
    reached = fraction(max(from_bytes, from_flops), seconds)
    return {
        "name": name,
        "ms": 1e3 * seconds,
        "bytes": num_bytes,
        "flops": flops,
        "gb_per_s": fraction(1e-9 * num_bytes, seconds),
        "tflop_per_s": fraction(1e-12 * flops, seconds),
        "fraction_of_copy": fraction(from_bytes, seconds),
        "fraction_of_roof": reached,
        "bound_by": "bytes" if from_bytes >= from_flops else "flops",
        "goal": goal,
        "goal_met": None if goal is None or reached is None else reached >= goal,
    }


def write(bench: Bench, result: dict[str, Any]) -> None:
    """Write a row down and print it."""
    bench.timings.append(result)
    text = f"  {result['name']}: {result['ms']:.4f} ms"
    if result.get("bytes") or result.get("flops"):
        text += f", {result['gb_per_s']:.0f} GB/s, {result['tflop_per_s']:.1f} TFLOP/s"
        if result["fraction_of_roof"]:
            text += f", {100 * result['fraction_of_roof']:.0f} % of the roof ({result['bound_by']})"
    if result.get("goal") is not None:
        text += f", goal {100 * result['goal']:.0f} %: {'met' if result['goal_met'] else 'MISSED'}"
    for other, found in result.get("baselines", {}).items():
        if found["ratio"] is None:
            text += f"; {other}: did not run: {found.get('problem')}"
        else:
            text += f"; {other} {found['ms']:.4f} ms = {found['ratio']:.2f}x"
    note = result.get("note")
    bench.say(f"{text}; {note}" if note else text)


def _short(problem: Exception) -> str:
    lines = str(problem).splitlines() or [""]
    return f"{type(problem).__name__}: {lines[0][:160]}"


def ceilings(bench: Bench) -> None:
    """How fast does torch copy, and multiply in the model's dtype? The roofs of all others."""
    times = bench.sizes.times
    source = bench.uniform(times.copied_bytes // 4)
    target = torch.empty_like(source)
    copy = [lambda: target.copy_(source)]
    num_bytes = 2 * times.copied_bytes
    seconds = row(bench, f"ceiling: copy_ of {times.copied_bytes} bytes", copy, num_bytes=num_bytes)
    n = times.product
    x, y = bench.normal(n, n), bench.normal(n, n)
    out = torch.empty_like(x)
    product = [lambda: torch.mm(x, y, out=out)]
    product_seconds = row(bench, f"ceiling: matmul of {n}", product, flops=2 * n**3)
    if not bench.stopwatch.warm:
        bench.facts["bytes_per_s"] = num_bytes / seconds
        bench.facts["flops_per_s"] = 2 * n**3 / product_seconds


PARTS = {"ceilings": ceilings}
