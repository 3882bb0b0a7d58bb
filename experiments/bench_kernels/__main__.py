"""How near is each kernel to what this device can do, and how far from what others have?

One layer of a real shape, random bfloat16 rows and float32 states. First every kernel is compared
with its baselines; then each is timed in turn with them. The roof of a call is the time its bytes
or its FLOPs take at the speed of a copy or of a matrix product measured in the same run.

    python -m experiments.bench_kernels
    python -m experiments.bench_kernels --shapes 9b --tokens 2048 --batches 1 8

Exit status: 0, 1 (and no times) if a kernel disagrees with a baseline, 2 for a refused option.
"""

import argparse
import gc
import os
import sys
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.bench_kernels import baselines
from experiments.bench_kernels.cases import Case, Layer, Sizes
from experiments.bench_kernels.cases_dense import dense_cases
from experiments.bench_kernels.cases_state import state_cases
from experiments.bench_kernels.ceilings import DEVICES, Device, Run, ceilings
from experiments.model_shapes import SHAPES
from experiments.options import count, results_file, thread_count
from experiments.results_io import RESULTS, ROOT, write_json
from kernels import KERNEL_CHUNK

FULL = dict(shapes=["0.8b", "9b"], tokens=[512, 2048], batches=[1, 8, 64], repeats=5)
QUICK = dict(shapes=["tiny"], tokens=[128], batches=[1, 2], repeats=1)
SHORT_SECONDS = 0.5  # a case that takes less in all is repeated up to ten times as often
TABLE_WIDTH = 118
QUICK_OUTPUT = ROOT / "build" / "bench_kernels_quick.json"

# ---- checks and times


def all_cases(device: Device, shapes: list[str], sizes: Sizes) -> list[Case]:
    """Of every shape, in the order of the table."""
    layers = [Layer(device, shape, SHAPES[shape]) for shape in shapes]
    makers = (state_cases, dense_cases)
    return [case for layer in layers for maker in makers for case in maker(layer, sizes)]


def disagreements(cases: list[Case], errors: list[dict[str, float]]) -> list[str]:
    """Which kernel is too far from which baseline; none if all is well."""
    return [
        f"{case} is off from {name} by {error:.2g}, more than {case.bar:g}"
        for case, found in zip(cases, errors, strict=True)
        for name, error in found.items()
        if not error <= case.bar
    ]


def measure(device: Device, case: Case, errors: dict[str, float], repeats: int) -> dict[str, Any]:
    """One row of the results, without its roof."""
    runs: dict[str, Run] = {"": case.run} | {b.name: b.run for b in case.baselines}
    once = sum(device.medians(runs, 1, case.reset).values())
    repeats = max(repeats, min(10 * repeats, int(SHORT_SECONDS / once)))
    seconds = device.medians(runs, repeats, case.reset)
    ours = seconds.pop("")
    baselines = {}
    for baseline in case.baselines:
        theirs = seconds[baseline.name] * case.scale(baseline)
        baselines[baseline.name] = {
            "seconds": theirs,
            "ratio": theirs / ours,
            "error": errors[baseline.name],
            "measured_tokens": baseline.tokens or case.sizes.get("tokens"),
        }
    return {
        "name": case.name,
        "shape": case.shape,
        "sizes": case.sizes,
        "bytes": case.work.num_bytes,
        "flops": case.work.flops,
        "seconds": ours,
        "repeats": repeats,
        "gb_per_s": 1e-9 * case.work.num_bytes / ours,
        "gflop_per_s": 1e-9 * case.work.flops / ours,
        "baselines": baselines,
    }


def roof(case: Case, seconds: float, peaks: dict[str, float]) -> dict[str, Any]:
    """What binds the call, and the share of its roof that it reached in these seconds."""
    roof_seconds, bound_by = case.work.roof(peaks)
    return {
        "roof_seconds": roof_seconds,
        "bound_by": bound_by,
        "fraction_of_roof": roof_seconds / seconds,
    }


def measure_shape(
    device: Device,
    shape: str,
    cases: list[tuple[Case, dict[str, float]]],
    options: argparse.Namespace,
    console: Console,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows and ceilings of one shape; ceilings are the best of those before and after its rows."""

    def peaks() -> dict[str, float]:
        heads, width = SHAPES[shape]["linear_num_value_heads"], SHAPES[shape]["linear_key_head_dim"]
        with console.status(f"{shape}: ceilings"):
            return ceilings(device, heads, width, quick=options.quick)

    before, rows = peaks(), []
    for case, errors in cases:
        with console.status(str(case)):
            rows.append(measure(device, case, errors, options.repeats))
    after = peaks()
    best = {name: max(before[name], after[name]) for name in before}
    pairs = zip(cases, rows, strict=True)
    return [row | roof(case, row["seconds"], best) for (case, _), row in pairs], best


# ---- tables


def results_table(shape: str, rows: list[dict[str, Any]], ceiling: dict[str, float]) -> Table:
    """The rows of one shape. `x` is how many times as long a baseline takes."""
    peaks = ", ".join(f"{name} {1e-9 * value:.0f}" for name, value in ceiling.items())
    table = Table(title=f"{shape}: ceilings in GB/s and GFLOP/s: {peaks}", box=SIMPLE_HEAD)
    for name in ("kernel", "MB", "MFLOP", "ms", "GB/s", "GFLOP/s", "of roof", "others"):
        table.add_column(name, justify="left" if name in ("kernel", "others") else "right")
    for row in rows:
        sizes = ", ".join(f"{name} {value}" for name, value in row["sizes"].items())
        figures = (
            1e-6 * row["bytes"],
            1e-6 * row["flops"],
            1e3 * row["seconds"],
            row["gb_per_s"],
            row["gflop_per_s"],
        )
        others = ", ".join(
            f"{name} {found['ratio']:.2f}x{scaled_from(row, found)}"
            for name, found in row["baselines"].items()
        )
        roof = f"{100 * row['fraction_of_roof']:.0f} % {row['bound_by']}"
        table.add_row(f"{row['name']}\n{sizes}", *(f"{x:.3g}" for x in figures), roof, others)
    return table


def scaled_from(row: dict[str, Any], baseline: dict[str, Any]) -> str:
    """Says so if a baseline was measured on fewer tokens."""
    measured, tokens = baseline["measured_tokens"], row["sizes"].get("tokens")
    return "" if measured == tokens else f" (at {measured} tokens, scaled to {tokens})"


def errors_table(cases: list[Case], errors: list[dict[str, float]]) -> Table:
    """Relative errors in the norm, and their bars."""
    table = Table("kernel", "error", "bar", title="relative errors", box=SIMPLE_HEAD)
    for case, found in zip(cases, errors, strict=True):
        text = ", ".join(f"{name} {error:.1e}" for name, error in found.items())
        table.add_row(str(case), text, f"{case.bar:g}")
    return table


# ---- command line


def shape_name(text: str) -> str:
    """One of `model_shapes.SHAPES`."""
    if text not in SHAPES:
        raise argparse.ArgumentTypeError(f"{text!r}; expected one of {', '.join(SHAPES)}")
    return text


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Options. Bad ones exit with status 2."""
    parser = argparse.ArgumentParser(
        prog="bench_kernels", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    defaults = {name: " ".join(map(str, FULL[name])) for name in ("shapes", "tokens", "batches")}
    parser.add_argument("--shapes", type=shape_name, nargs="+", help=defaults["shapes"])
    parser.add_argument(
        "--tokens",
        type=count,
        nargs="+",
        help=f"of a prefill, multiples of 64: {defaults['tokens']}",
    )
    parser.add_argument(
        "--batches", type=count, nargs="+", help=f"rows of a step: {defaults['batches']}"
    )
    parser.add_argument("--repeats", type=count, help=f"of each figure, at least {FULL['repeats']}")
    parser.add_argument("--threads", type=thread_count, help="of torch (2, or all if fewer)")
    there = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=DEVICES, default=there, help="%(default)s is there")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run? no ceilings")
    parser.add_argument(
        "--output", type=results_file, help="results file (results/bench_kernels.json)"
    )
    options = parser.parse_args(argv)
    for name, value in (QUICK if options.quick else FULL).items():
        setattr(options, name, getattr(options, name) or value)
    options.output = options.output or (
        QUICK_OUTPUT if options.quick else RESULTS / "bench_kernels.json"
    )
    options.threads = options.threads or min(2, os.cpu_count() or 1)
    for tokens in options.tokens:
        if tokens % KERNEL_CHUNK:
            parser.error(f"--tokens {tokens}: must be a multiple of {KERNEL_CHUNK}")
    try:
        options.device = DEVICES[options.device](quick=options.quick)
    except (ValueError, RuntimeError, AssertionError) as error:  # no kernels, or no such device
        parser.error(f"--device {options.device}: {error}")
    return options


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What was measured, for the results file."""
    return {
        "device": options.device.name,
        "quick": options.quick,
        "shapes": options.shapes,
        "cache_bytes_swept": options.device.cache_bytes,
        "baselines": baselines.versions(),
    }


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status: 1, and no times, if a kernel is wrong."""
    options = parse_options(argv)
    device, quick = options.device, options.quick
    console = Console(width=max(TABLE_WIDTH, Console().width))
    torch.set_num_threads(options.threads)
    sizes = Sizes(
        tuple(options.tokens),
        tuple(options.batches),
        chunk=64 if quick else 512,
        cached=128 if quick else 4096,
    )
    with console.status("Does every kernel agree with its baselines?"):
        cases = all_cases(device, options.shapes, sizes)
        errors = [case.errors() for case in cases]
    found = disagreements(cases, errors)
    content = settings(options) | {"agree": not found}
    console.print(errors_table(cases, errors))
    if found:
        write_json(options.output, content | {"disagreements": found})
        print("\n".join(["FAILED: wrong results, nothing timed", *found]), file=sys.stderr)
        return 1
    gc.freeze()
    peaks, rows = {}, []
    for shape in options.shapes:
        mine = [pair for pair in zip(cases, errors, strict=True) if pair[0].shape == shape]
        found, peaks[shape] = measure_shape(device, shape, mine, options, console)
        console.print(results_table(shape, found, peaks[shape]))
        rows += found
    above = [f"{row['shape']} {row['name']}" for row in rows if row["fraction_of_roof"] > 1]
    write_json(
        options.output,
        content | {"ceilings_per_s": peaks, "cases": rows, "above_roof": above},
    )
    if above and not quick:
        console.print(
            f"Above the roof: {', '.join(above)}. A formula is wrong, or the ceilings were slowed "
            "by another process: repeat on a quiet machine."
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
