"""What did the replays show? Table, chart and the sentence at the end."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter
from rich.table import Table

from cache.placement import USUAL
from experiments.plots import COLD, FIRST, WARM, new_figure, save_figure
from experiments.tables import new_table

Rows = Sequence[dict[str, Any]]
NAMES = {"claude": "coding agents", "mooncake": "chat"}
_COMB = USUAL
_LEGEND = """\
Prefill work, 1 = of a cache that keeps the state of every grid boundary. K/V unlimited.
e: prompt ends, e(64): 64 tokens above them; b: branches. draw: of the coding agents' session
starts, for those policies that were given several. unlimited: with slots for every state that the
placement saves. belady: knows the future, counts all states alike."""
_BUDGET_LEGEND = """\
Prefill work, 1 = of a cache that keeps everything. The bytes are
split once for all (the best of a few splits), or shared by pages
that hold a state or K/V."""


def table(rows: Rows) -> Table:
    """One line a trace, placement and policy; one column a number of slots."""
    rows = [row for row in rows if row["budget_gb"] is None]
    slots = sorted({row["slots"] for row in rows if row["slots"] is not None})
    headers = ("trace", "draw", "saved at", "policy", *(str(each) for each in slots), "all")
    out = new_table(headers, _LEGEND, left=headers[:4], narrow=True)
    lines: dict[tuple[str, int, str, str], dict[int | None, float]] = {}
    for row in rows:
        key = (row["trace"], row["seed"], row["placement"], row["policy"])
        lines.setdefault(key, {})[row["slots"]] = row["work"]
    for (trace, seed, placement, policy), line in lines.items():
        cells = [f"{line[each]:.2f}" if each in line else "" for each in (*slots, None)]
        short = placement.replace("prompt_end", "e").replace("branch", "b")
        out.add_row(NAMES[trace], str(seed), short, policy, *cells)
    return out


def budget_table(rows: Rows) -> Table:
    """One line a trace and budget: the best split, and one budget for both."""
    headers = ("trace", "GB", "best split", "K/V of it", "shared", "K/V at its end")
    out = new_table(headers, _BUDGET_LEGEND, left=headers[:1], narrow=True)
    for best, shared in budget_pairs(rows):
        out.add_row(
            NAMES[best["trace"]],
            str(best["budget_gb"]),
            f"{best['work']:.2f}",
            f"{best['kv_share']:.0%}",
            f"{shared['work']:.2f}",
            f"{shared['kv_share']:.0%}",
        )
    return out


def budget_pairs(rows: Rows) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Of each trace and budget: the best split, and the shared memory."""
    with_budget = [row for row in rows if row["budget_gb"] is not None]
    shared = {
        (row["trace"], row["budget_gb"]): row for row in with_budget if row["memory"] == "shared"
    }
    best = [row for row in with_budget if row.get("best_split")]
    return [(row, shared[row["trace"], row["budget_gb"]]) for row in best]


def budget_conclusion(rows: Rows) -> str:
    """Whether one budget is as good as the best split of it, to 5 %."""
    ratios = [(shared["work"] / best["work"], best) for best, shared in budget_pairs(rows)]
    if not ratios:
        return "The longest prompt fits no budget."
    (least, _), (most, at) = (pick(ratios, key=lambda pair: pair[0]) for pick in (min, max))
    verdict = "within" if most <= 1.05 else "NOT within"
    return (
        f"K/V and states in one budget of 50 to 500 GB take {least:.2f} to {most:.2f} times the "
        f"work of the best static split (most: {NAMES[at['trace']]}, {at['budget_gb']} GB): "
        f"{verdict} 5 %."
    )


def works(rows: Rows, trace: str, policy: str, slots: int, placement: str = _COMB) -> list[float]:
    """Of all draws, the first one first."""
    wanted = {"trace": trace, "policy": policy, "slots": slots, "placement": placement}
    return [row["work"] for row in rows if wanted.items() <= row.items()]


def learnt(rows: Rows, trace: str, slots: int) -> str:
    """The mean of the draws and, of several, their range."""
    found = works(rows, trace, "value", slots)
    spread = f" [{min(found):.2f} to {max(found):.2f}]" if len(found) > 1 else ""
    return f"{sum(found) / len(found):.2f}{spread}"


def conclusion(rows: Rows) -> str:
    """What the learnt values save against LRU with the same slots, in both traces."""
    parts = []
    for trace, name in NAMES.items():
        found = [
            f"{learnt(rows, trace, slots)} with {slots} slots "
            f"(LRU {works(rows, trace, 'lru', slots)[0]:.2f}, Belady "
            f"{works(rows, trace, 'belady', slots)[0]:.2f})"
            for slots in (64, 128)
        ]
        parts.append(f"{name}: {', '.join(found)}")
    return (
        "Prefill work over the least possible, states at prompt ends and 64 tokens above, at "
        "branches and every 8,192 tokens, evicted by learnt value (mean and range of the draws of "
        f"session starts): {'; '.join(parts)}. {budget_conclusion(rows)}"
    )


_LOOKS = {"lru": (COLD, "o"), "value": (WARM, "D"), "belady": (FIRST, "^")}


def draw(results: dict[str, Any], path: Path) -> None:
    """Work by slots: both traces, three policies."""
    figure, axes = new_figure(
        results["question"], "states at and near prompt ends, at branches, each 8,192"
    )
    for trace, style in (("claude", "-"), ("mooncake", ":")):
        for policy, (color, marker) in _LOOKS.items():
            wanted = {"trace": trace, "policy": policy, "placement": _COMB}
            wanted |= {"seed": 0, "budget_gb": None}
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
