"""Is every kernel right on this GPU, are its bits what the cache needs, and how fast is it?

    python -m experiments.gpu_check                       # one GPU, under five minutes
    TRITON_INTERPRET=1 python -m experiments.gpu_check    # no GPU: tiny shapes, no timings

A: every op against float64.
B: bits (cuts, neighbours, repeats; hit = miss through the engine; replayed graph = eager step).
C: times as ratios to a copy, to others and to a roof.
A part that raises is a failed part, and the next one runs; parts that no longer fit into the time
are listed as not run.

Exit status: 0, 1 if anything of A or B failed or was not run or C raised, 2 without a GPU.
"""

import argparse
import faulthandler
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch

from experiments.gpu_check import (
    bits,
    bits_rows,
    children,
    correctness,
    correctness_rows,
    engine,
    graphs,
    timings,
    timings_dense,
    timings_model,
    timings_state,
)
from experiments.gpu_check.parts import Budget, Part, Run, run_all, run_part, verdict
from experiments.gpu_check.setup import Bench, alike_rows
from experiments.gpu_check.sizes import FULL, TINY, Sizes
from experiments.options import results_file
from experiments.options import seconds as positive_seconds
from experiments.results_io import RESULTS, write_json
from kernels.launch import INTERPRETED

BUDGET_SECONDS = 270.0  # imports come before, and the last part may take longer
MEMORY_BYTES = 40 << 30


def all_parts() -> list[Part]:
    """In the order they run, most valuable first."""
    groups: list[tuple[str, dict[str, Run], float]] = [
        ("A", correctness.PARTS | correctness_rows.PARTS, 5.0),
        ("B", bits.PARTS | bits_rows.PARTS | engine.PARTS | graphs.PARTS, 8.0),
        ("C", timings.PARTS | timings_state.PARTS, 10.0),
        ("C", timings_dense.PARTS | timings_model.PARTS | graphs.TIMES, 12.0),
    ]
    return [
        Part(group, name, run, seconds)
        for group, parts, seconds in groups
        for name, run in parts.items()
    ]


@contextmanager
def quiet_interpreter() -> Iterator[None]:
    """numpy tells of every NaN that it meets, and the poison is NaN."""
    with warnings.catch_warnings(), alike_rows():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description=(__doc__ or "").splitlines()[0])
    names = [part.name for part in all_parts()]
    parser.add_argument("--output", type=results_file, default=RESULTS / "gpu_check.json")
    parser.add_argument("--seed", type=int, help="of the random inputs (a fresh one)")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART")
    parser.add_argument(
        "--budget", type=positive_seconds, default=BUDGET_SECONDS, help="%(default)s seconds"
    )
    parser.add_argument("--no-warm-up", action="store_true", help="compile in this process alone")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.seed is None:
        options.seed = time.time_ns() % 1_000_000_007
    return options


def choose_sizes() -> Sizes | None:
    """What can run here; None: nothing."""
    if INTERPRETED:
        return TINY
    return FULL if torch.cuda.is_available() else None


def main(argv: list[str] | None = None) -> int:
    """Run the parts, print, write JSON; the exit status."""
    options = parse_options(argv)
    budget = Budget(options.budget)
    sizes = choose_sizes()
    if sizes is None:
        print(
            "gpu_check: torch finds no GPU here; run it on one, or set TRITON_INTERPRET=1 for the "
            "checks at tiny shapes",
            file=sys.stderr,
        )
        return 2
    parts = [part for part in all_parts() if part.name in options.parts]

    def say(line: str) -> None:
        print(line, flush=True)

    on_gpu = sizes.device == "cuda"
    stopwatch = None
    if on_gpu:
        faulthandler.dump_traceback_later(max(1.0, budget.left()) + 12, exit=True)
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, MEMORY_BYTES / total))
        stopwatch = timings.CudaStopwatch(warm=options.compile_only)
    bench = Bench(sizes, options.seed, say, stopwatch)
    if options.compile_only:
        return int(any(run_part(bench, part)["status"] == "failed" for part in parts))
    facts = children.machine(on_gpu)
    content: dict[str, Any] = {
        "mode": "cuda" if on_gpu else "interpreter",
        "seed": options.seed,
        "sizes": {k: str(v) if k == "dtype" else v for k, v in asdict(sizes).items()},
        "gpu": facts,
    }
    for name, value in facts.items():
        say(f"{name}: {value}")
    say(f"{sizes.name}; seed {options.seed}; {len(parts)} parts; results: {options.output}")

    def save(results: list[dict[str, Any]]) -> None:
        write_json(
            options.output, {**content, **verdict(results), "passed": False, "parts": results}
        )

    if on_gpu and not options.no_warm_up:
        content["warm_up"] = children.warm_up(
            [part.name for part in parts], options.seed, min(110.0, budget.left() / 2), say
        )
    results: list[dict[str, Any]] = []
    try:
        with nullcontext() if on_gpu else quiet_interpreter():
            results = run_all(bench, parts, budget, save)
    finally:
        if on_gpu:
            faulthandler.cancel_dump_traceback_later()
        outcome = verdict(results)
        content |= {"facts": bench.facts, "seconds": round(options.budget - budget.left(), 1)}
        write_json(options.output, {**content, **outcome, "parts": results})
    for name in ("parts_failed", "parts_not_run", "parts_skipped", "goals_missed"):
        say(f"{name}: {', '.join(outcome[name]) or 'none'}")
    word = "passed" if outcome["passed"] else "FAILED"
    say(f"gpu_check: {word}: {outcome['num_checks']} checks, {content['seconds']} s")
    return 0 if outcome["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
