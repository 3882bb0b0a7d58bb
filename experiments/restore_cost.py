"""What does it cost to restore a state?

A slot holds the states and convolution windows of all layers. It is brought from a checkpoint to a
live slot layer by layer, by the fused copy of the engine, or not at all (redirect: the first step
reads the checkpoint instead), beside a plain `copy_` of as many bytes. What redirect could cost is
looked for in that first step: one token through the mixers of all layers, reading the checkpoint
or its own slot. All ways must leave the same bytes.

    python -m experiments.restore_cost
    python -m experiments.restore_cost --sequences 1 8 --repeats 50

Exit status: 0, 1 if two ways leave other bytes, 2 for a refused option.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from engine.config import DEVICES
from experiments.command_line import fill_in, new_parser, question
from experiments.console import tracked
from experiments.options import count
from experiments.outcome import publish_rows, remove_results
from experiments.plots import COLD, FIRST, TEXT, WARM, log_ms, new_figure, save_figure
from experiments.restore_bench import COPIES, Bench, state_shape
from experiments.results_io import memory_bytes
from experiments.tables import new_table

QUESTION = question(__doc__)
MODELS = ("built-in", "0.8b", "9b")
SMALL = {"models": ["built-in", "0.8b", "9b"], "sequences": [1, 4], "repeats": 5}
FULL = {"models": list(MODELS), "sequences": [1, 4, 16], "repeats": 31}
LOOKS = {"per_layer": (FIRST, "layer by layer"), "fused": (WARM, "fused copy")}
LOOKS |= {"plain": (COLD, "plain copy_"), "redirect": (TEXT, "redirect")}


def measure(
    models: list[str], sequences: list[int], repeats: int, device: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for each model and number of sequences, and what was not as it must be."""
    rows, failures = [], []
    cases = [(model, num) for model in models for num in sequences]
    for model, num in tracked(cases, "slots"):
        bench = Bench(state_shape(model), num, device)
        found = bench.differences()
        failures += [f"{model}, {num} sequences: {failure}" for failure in found]
        mib = bench.shape.slot_bytes / 2**20
        row = {"model": model, "slot_mib": mib, "sequences": num, "bytes_equal": not found}
        row["num_layers"] = bench.shape.num_layers
        rows.append(row | bench.measure(repeats))
    return rows, failures


# ---- reporting


def table(rows: list[dict[str, Any]]) -> Table:
    """One line a model and number of sequences."""
    caption = (
        "ms: medians; in brackets GB/s, read and written. redirect: the whole call, 0 bytes. step: "
        "one token through the mixers of all layers, from its own slot; after a fused copy; and "
        "with redirect, from the checkpoint."
    )
    headers = ("slot", "seqs", "by layer\nms", "fused\nms", "plain\nms", "redirect\nms")
    headers += ("step\nms", "copy,\nstep ms", "redirect,\nstep ms", "bytes\nequal")
    out = new_table(headers, caption)
    last = max(row["sequences"] for row in rows)
    for row in rows:
        out.add_row(
            f"{row['model']}\n{row['slot_mib']:.2f} MiB",
            str(row["sequences"]),
            *(f"{row[f'{w}_ms']:.3g}\n({row[f'{w}_gb_per_s']:.1f})" for w in COPIES),
            f"{row['redirect_ms']:.3f}",
            *(f"{row[f'{w}_ms']:.3g}" for w in ("step", "copy_and_step", "redirect_and_step")),
            "yes" if row["bytes_equal"] else "NO",
            end_section=row["sequences"] == last,
        )
    return out


def conclusion(rows: list[dict[str, Any]]) -> str:
    """One sentence that answers the question, from the largest slot; only for equal bytes."""
    one = max((row for row in rows if row["sequences"] == rows[0]["sequences"]), key=_slot)
    fused = [row["fused_ms"] / row["plain_ms"] for row in rows]
    layers = [row["per_layer_ms"] / row["fused_ms"] for row in rows]
    steps = [row["redirect_and_step_ms"] / row["copy_and_step_ms"] for row in rows]
    return (
        f"Restoring {one['sequences']} slot(s) of {one['slot_mib']:.2f} MiB costs "
        f"{one['fused_ms']:.2f} ms as one fused copy ({one['fused_gb_per_s']:.1f} GB/s; a plain "
        f"copy_ of the bytes {one['plain_ms']:.2f} ms), {one['per_layer_ms']:.2f} ms layer by "
        f"layer and {one['redirect_ms']:.3f} ms with redirect, whose first step takes "
        f"{one['redirect_and_step_ms']:.2f} ms instead of {one['copy_and_step_ms']:.2f} ms for "
        f"copy and step; over all sizes the fused copy takes {min(fused):.2f} to "
        f"{max(fused):.2f} times the plain one, layer by layer {min(layers):.2f} to "
        f"{max(layers):.2f} times the fused one, redirect and step {min(steps):.2f} to "
        f"{max(steps):.2f} times copy and step; all ways leave the same bytes."
    )


def _slot(row: dict[str, Any]) -> float:
    return row["slot_mib"]


def draw(results: dict[str, Any], path: Path) -> None:
    """Time of each way by slot and number of sequences, from the results file alone."""
    rows = results["rows"]
    big = max(rows, key=lambda row: (row["slot_mib"], -row["sequences"]))
    outcome = (
        f"{big['slot_mib']:.1f} MiB: fused {big['fused_ms']:.2f} ms, plain copy_ "
        f"{big['plain_ms']:.2f} ms, redirect {1e3 * big['redirect_ms']:.0f} µs; the same bytes"
    )
    figure, axes = new_figure(results["question"], outcome)
    width = 0.8 / len(LOOKS)
    for i, (way, (color, label)) in enumerate(LOOKS.items()):
        places = [place + (i - (len(LOOKS) - 1) / 2) * width for place in range(len(rows))]
        axes.bar(places, [row[f"{way}_ms"] for row in rows], width, color=color, label=label)
    log_ms(axes)
    low = min(row["redirect_ms"] for row in rows)
    axes.set_ylim(10 ** math.floor(math.log10(low)) / 2, None)
    names = [f"{row['model']}\n{row['slot_mib']:.3g} MiB\nx {row['sequences']}" for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=8)
    axes.set_ylabel("ms (log scale)")
    figure.legend(loc="outside lower center", ncols=len(LOOKS), frameon=False, fontsize=9)
    save_figure(figure, path)


# ---- command line


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Options. Bad ones exit with status 2."""
    parser = new_parser("restore_cost", __doc__)
    parser.add_argument("--models", choices=MODELS, nargs="+", help="whose slots")
    parser.add_argument("--sequences", type=count, nargs="+", help="restored at once")
    parser.add_argument("--repeats", type=count, help="of each time; their median counts")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="where the pool lies")
    options = parser.parse_args(argv)
    fill_in(options, SMALL, FULL)
    options.sequences = sorted(set(options.sequences))
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no such device here")
    largest = max(state_shape(model).slot_bytes for model in options.models)
    needed = (4 * max(options.sequences) + 1) * largest  # two copies of the live slots to compare
    if options.device == "cpu" and needed > memory_bytes():
        parser.error(f"{needed / 1e9:.1f} GB are needed; this machine has less")
    return options


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    remove_results(options.json)
    rows, failures = measure(options.models, options.sequences, options.repeats, options.device)
    return publish_rows(
        options, QUESTION, rows, failures, table=table, conclusion=conclusion, draw=draw
    )


if __name__ == "__main__":
    sys.exit(main())
