"""What did the replays show? Table, chart and the sentence at the end."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter
from rich.table import Table

from experiments.plots import COLD, FIRST, WARM, new_figure, save_figure
from experiments.tables import new_table

Rows = Sequence[dict[str, Any]]
NAMES = {"claude": "coding agents", "mooncake": "chat"}
_COMB = "prompt_end+branch+comb(8192)"
_LEGEND = """\
Prefill work, 1 = of a cache that keeps the state of every grid boundary. K/V unlimited.
e: prompt ends; b: branches. unlimited: with slots for every state that the placement saves.
belady: knows the future, counts all states alike."""


def table(rows: Rows) -> Table:
    """One line a trace, placement and policy; one column a number of slots."""
    slots = sorted({row["slots"] for row in rows if row["slots"] is not None})
    headers = ("trace", "saved at", "policy", *(str(each) for each in slots), "all")
    out = new_table(headers, _LEGEND, left=headers[:3], narrow=True)
    lines: dict[tuple[str, str, str], dict[int | None, float]] = {}
    for row in rows:
        line = lines.setdefault((row["trace"], row["placement"], row["policy"]), {})
        line[row["slots"]] = row["work"]
    for (trace, placement, policy), line in lines.items():
        cells = [f"{line[each]:.2f}" if each in line else "" for each in (*slots, None)]
        short = placement.replace("prompt_end+branch", "e+b")
        out.add_row(NAMES[trace], short, policy, *cells)
    return out


def work(rows: Rows, trace: str, policy: str, slots: int, placement: str = _COMB) -> float:
    wanted = {"trace": trace, "policy": policy, "slots": slots, "placement": placement}
    return next(row["work"] for row in rows if wanted.items() <= row.items())


def conclusion(rows: Rows) -> str:
    """What the learnt values save against LRU with the same slots, in both traces."""
    parts = []
    for trace, name in NAMES.items():
        found = [
            f"{work(rows, trace, 'value', slots):.2f} with {slots} slots "
            f"(LRU {work(rows, trace, 'lru', slots):.2f}, Belady "
            f"{work(rows, trace, 'belady', slots):.2f})"
            for slots in (64, 128)
        ]
        parts.append(f"{name}: {', '.join(found)}")
    return (
        "Prefill work over the least possible, states at prompt ends, branches and every 8,192 "
        f"tokens, evicted by learnt value: {'; '.join(parts)}."
    )


_LOOKS = {"lru": (COLD, "o"), "value": (WARM, "D"), "belady": (FIRST, "^")}


def draw(results: dict[str, Any], path: Path) -> None:
    """Work by slots: both traces, three policies."""
    figure, axes = new_figure(results["question"], "states at prompt ends, branches, each 8,192")
    for trace, style in (("claude", "-"), ("mooncake", ":")):
        for policy, (color, marker) in _LOOKS.items():
            wanted = {"trace": trace, "policy": policy, "placement": _COMB}
            mine = [row for row in results["rows"] if wanted.items() <= row.items()]
            x, y = [row["slots"] for row in mine], [row["work"] for row in mine]
            label = f"{NAMES[trace]}, {policy}"
            axes.plot(x, y, marker + style, color=color, markersize=5, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.set_xlabel("slots for checkpoints (log scale)")
    axes.set_ylabel("prefill work over the least possible (log scale)")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    save_figure(figure, path)
