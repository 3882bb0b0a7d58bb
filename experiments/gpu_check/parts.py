"""How do the parts of a GPU check run, one after the other, whatever happens in one of them?"""

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from experiments.gpu_check import children
from experiments.gpu_check.setup import Bench

NEEDS_GPU = "skipped: needs a GPU"
NOT_RUN = "not run"

Run = Callable[[Bench], None]


class Budget:
    """Seconds that are left."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        return self._end - self._clock()


@dataclass(frozen=True)
class Part:
    """Some checks or timings. seconds: what it may take on a GPU, to see whether it still fits."""

    group: str
    name: str
    run: Run
    seconds: float


def run_part(bench: Bench, part: Part) -> dict[str, Any]:
    """One part to its end, whatever happens in it."""
    bench.begin(part.name)
    began = time.monotonic()
    on_gpu = bench.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trace = None
    try:
        with torch.inference_mode():
            part.run(bench)
        if on_gpu:
            torch.cuda.synchronize()
    except Exception:
        trace = traceback.format_exc()
        bench.say(trace)
    wrong = trace is not None or any(not check.passed for check in bench.checks)
    compiling = bench.stopwatch is not None and bench.stopwatch.warm
    empty = not (bench.checks or bench.timings or compiling)
    result = {
        "group": part.group,
        "name": part.name,
        "status": "failed" if wrong or empty else "passed",
        "seconds": round(time.monotonic() - began, 2),
        "checks": [asdict(check) for check in bench.checks],
        "timings": bench.timings,
        "traceback": trace,
    }
    bench.checks, bench.timings = [], []
    gc.collect()
    if on_gpu and alive():
        result["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        torch.cuda.empty_cache()
    return result


def alive() -> bool:
    """Whether the device still answers: after an illegal access nothing does, in this process."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def run_all(
    bench: Bench, parts: list[Part], budget: Budget, save: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Results of the parts in order; `save` hears of them before and after each."""
    results: list[dict[str, Any]] = []
    on_gpu = bench.device.type == "cuda"
    for i, part in enumerate(parts):
        head = {"group": part.group, "name": part.name}
        if part.group == "C" and not on_gpu:
            results.append({**head, "status": NEEDS_GPU})
            continue
        if budget.left() < (part.seconds if on_gpu else 0.0):
            results.append({**head, "status": NOT_RUN})
            bench.say(f"{part.group}: {part.name}: {NOT_RUN}, {budget.left():.0f} s are left")
            continue
        bench.say(f"{part.group}: {part.name}")
        save([*results, {**head, "status": "running"}])
        results.append(run_part(bench, part))
        bench.say(f"{part.group}: {part.name}: {results[-1]['status']}, {results[-1]['seconds']} s")
        save(results)
        if on_gpu and not alive():
            bench.say("The device no longer answers: the other parts run in a fresh process")
            rest = {later.name: later.group for later in parts[i + 1 :]}
            return results + children.continue_elsewhere(rest, bench.seed, budget.left())
    return results


def verdict(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What the results come to."""

    def named(*statuses: str) -> list[str]:
        return [r["name"] for r in results if r["status"] in statuses]

    failed = named("failed", "running")  # running: the process ended in it
    checks = [check for r in results for check in r.get("checks", ())]
    timings = [timing for r in results for timing in r.get("timings", ())]
    unchecked = [r["name"] for r in results if r["status"] == NOT_RUN and r["group"] != "C"]
    return {
        "passed": not failed and not unchecked and bool(results),
        "num_checks": len(checks),
        "num_failed_checks": sum(not check["passed"] for check in checks),
        "parts_passed": named("passed"),
        "parts_failed": failed,
        "parts_not_run": named(NOT_RUN),
        "parts_skipped": named(NEEDS_GPU),
        "goals_missed": [t["name"] for t in timings if t.get("goal_met") is False],
    }
