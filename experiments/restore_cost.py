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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cache.ops import LinearStateCacheOp, RestoreOutcome
from cache.state_pool import StatePool, StateShape, restore_linear_state_slots
from engine.builtin import BUILTIN_MODEL_DIR
from engine.config import DEVICES
from engine.model_config import ModelConfig
from experiments.model_shapes import SHAPES
from experiments.options import count
from experiments.plots import COLD, FIRST, TEXT, WARM, new_figure, save_figure
from experiments.results_io import memory_bytes
from experiments.timing import alternate
from experiments.ttft_vs_prefix import console, fill_in, finish, log_ms, new_parser
from kernels import ops_for
from kernels.ids import Ids

QUESTION = "What does it cost to restore a state?"
COPIES = ("per_layer", "fused", "plain")
MODELS = ("built-in", "0.8b", "9b")
SMALL = {"models": ["built-in", "0.8b", "9b"], "sequences": [1, 4], "repeats": 5}
FULL = {"models": list(MODELS), "sequences": [1, 4, 16], "repeats": 31}
LOOKS = {"per_layer": (FIRST, "layer by layer"), "fused": (WARM, "fused copy")}
LOOKS |= {"plain": (COLD, "plain copy_"), "redirect": (TEXT, "redirect")}


def state_shape(name: str) -> StateShape:
    """What a slot of a model holds: of the built-in one, or of a published shape in bfloat16."""
    if name == "built-in":
        c = ModelConfig.from_directory(BUILTIN_MODEL_DIR)
        heads = c.linear_num_key_heads, c.linear_num_value_heads
        dims = c.linear_key_head_dim, c.linear_value_head_dim
        layers, dtype = c.num_linear_layers, torch.float32
    else:
        d = SHAPES[name]
        heads = d["linear_num_key_heads"], d["linear_num_value_heads"]
        dims = d["linear_key_head_dim"], d["linear_value_head_dim"]
        layers, dtype = d["num_hidden_layers"] * 3 // 4, torch.bfloat16
    return StateShape(
        num_layers=layers,
        num_value_heads=heads[1],
        value_dim=dims[1],
        key_dim=dims[0],
        window_rows=3,
        conv_channels=2 * heads[0] * dims[0] + heads[1] * dims[1],
        window_dtype=dtype,
    )


class Bench:
    """A pool with `num` checkpoints in slots 1 to num, and their live slots behind them."""

    def __init__(self, shape: StateShape, num: int, device: str) -> None:
        self.shape, self.num, self.device = shape, num, device
        self.pool = StatePool(1 + 2 * num, shape, device)
        self.sources = list(range(1, num + 1))
        self.live = list(range(num + 1, 2 * num + 1))
        generator = torch.Generator().manual_seed(0)
        for slot in self.sources:  # one layer is drawn, the others are multiples of it
            for view in (self.pool.states, self.pool.windows):
                drawn = torch.randn(view.shape[2:], generator=generator)
                scale = torch.arange(1, shape.num_layers + 1).view(-1, *[1] * drawn.ndim)
                view[slot] = (drawn * scale).to(device, view.dtype)
        self.step_inputs = self._step_inputs(generator)
        self.ops = ops_for(device)
        self.requests = [
            LinearStateCacheOp(live, True, source, 64)
            for live, source in zip(self.live, self.sources, strict=True)
        ]

    # ---- the ways

    def per_layer(self) -> None:
        for source, live in zip(self.sources, self.live, strict=True):
            for view in (self.pool.states, self.pool.windows):
                for layer in range(self.shape.num_layers):
                    view[live, layer].copy_(view[source, layer])

    def fused(self) -> list[RestoreOutcome]:
        return restore_linear_state_slots(self.pool, self.requests, [1] * self.num)

    def plain(self) -> None:
        arena, num = self.pool.arena, self.num
        arena[num + 1 : 2 * num + 1].copy_(arena[1 : num + 1])

    def redirect(self) -> list[RestoreOutcome]:
        return restore_linear_state_slots(self.pool, self.requests, [1] * self.num, copy=False)

    # ---- the first step after it

    def _step_inputs(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """One token a sequence, as every layer's mixer sees it."""
        s = self.shape

        def drawn(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator)

        wide = {"qkv": drawn(self.num, s.conv_channels), "a": drawn(self.num, s.num_value_heads)}
        wide["b"] = drawn(self.num, s.num_value_heads)
        wide["conv_weight"] = drawn(s.conv_channels, s.window_rows + 1)
        wide = {name: x.to(self.device, s.window_dtype) for name, x in wide.items()}
        heads = {name: drawn(s.num_value_heads).to(self.device) for name in ("A_log", "dt_bias")}
        return wide | heads

    def step(self, read: list[int]) -> torch.Tensor:
        """One token through the mixers of all layers, written to the live slots: [L, N, HV, V]."""
        slots = {"read_slots": Ids(read, self.device), "write_slots": Ids(self.live, self.device)}
        key_heads = self._num_key_heads
        return torch.stack(
            [
                self.ops.gated_delta_net_step(
                    **self.step_inputs,
                    windows=self.pool.windows[:, layer],
                    states=self.pool.states[:, layer],
                    num_key_heads=key_heads,
                    **slots,
                )
                for layer in range(self.shape.num_layers)
            ]
        )

    @property
    def _num_key_heads(self) -> int:
        s = self.shape
        return (s.conv_channels - s.num_value_heads * s.value_dim) // (2 * s.key_dim)

    # ---- what must hold

    def live_bytes(self) -> torch.Tensor:
        """A copy of what the live slots hold."""
        return self.pool.arena[self.num + 1 :].clone()

    def differences(self) -> list[str]:
        """Each way whose bytes are not those of the checkpoints, or that changes a checkpoint."""
        arena, num = self.pool.arena, self.num
        checkpoints = arena[1 : num + 1].clone()
        found = []
        for way in COPIES:
            arena[num + 1 :].zero_()
            getattr(self, way)()
            if not torch.equal(self.live_bytes(), checkpoints):
                found.append(f"{way}: the live slots are not the checkpoints")
        self.fused()
        outputs, after = self.step(self.live), self.live_bytes()
        for view in (self.pool.states, self.pool.windows):
            view[num + 1 :] = math.nan  # redirect must not read what is there
        outcomes = self.redirect()
        redirected = self.step(self.sources)
        if outcomes != [RestoreOutcome.RESTORED] * num:
            found.append(f"redirect: {outcomes}")
        if not torch.equal(redirected, outputs):
            found.append("redirect: the first step gives other outputs than after a copy")
        if not torch.equal(self.live_bytes(), after):
            found.append("redirect: the first step leaves other states than after a copy")
        if not torch.equal(arena[1 : num + 1], checkpoints):
            found.append("a checkpoint was changed")
        return found

    # ---- times

    def measure(self, repeats: int) -> dict[str, float]:
        """Milliseconds (medians), and GB/s of bytes read and written."""
        runs: dict[str, Callable[[], object]] = {
            "per_layer": self.per_layer,
            "fused": self.fused,
            "plain": self.plain,
            "redirect": self.redirect,
            "step": lambda: self.step(self.live),
            "copy_and_step": lambda: (self.fused(), self.step(self.live)),
            "redirect_and_step": lambda: (self.redirect(), self.step(self.sources)),
        }
        times = alternate({name: self._waited(run) for name, run in runs.items()}, repeats)
        moved = 2e-9 * self.num * self.shape.slot_bytes
        return {f"{name}_ms": 1e3 * time for name, time in times.items()} | {
            f"{name}_gb_per_s": moved / times[name] for name in COPIES
        }

    def _waited(self, run: Callable[[], object]) -> Callable[[], object]:
        """The run, until the device has done it."""
        if self.device == "cpu":
            return run
        return lambda: (run(), torch.cuda.synchronize())


def measure(
    models: list[str], sequences: list[int], repeats: int, device: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for each model and number of sequences, and what was not as it must be."""
    rows, failures = [], []
    cases = [(model, num) for model in models for num in sequences]
    for model, num in track(cases, "slots", console=Console(stderr=True), transient=True):
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
    out = Table(box=SIMPLE_HEAD, padding=(0, 1), caption=caption, caption_justify="left")
    headers = ("slot", "seqs", "by layer\nms", "fused\nms", "plain\nms", "redirect\nms")
    headers += ("step\nms", "copy,\nstep ms", "redirect,\nstep ms", "bytes\nequal")
    for header in headers:
        out.add_column(header, justify="right", no_wrap=True)
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
    figure, axes = new_figure(QUESTION, outcome)
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
    rows, failures = measure(options.models, options.sequences, options.repeats, options.device)
    if not failures:  # the times of wrong answers say nothing
        console().print(table(rows))
    content = {"question": QUESTION, "conclusion": None if failures else conclusion(rows)}
    return finish(options, content | {"rows": rows}, failures, draw)


if __name__ == "__main__":
    sys.exit(main())
