"""What came out of the sweep? Table, chart and the sentence at the end."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from rich.table import Table

from experiments.plots import COLD, FIRST, WARM, new_figure, save_figure
from experiments.save_policies import INTERVALS, NEVER, PARTS
from experiments.tables import new_table

ENOUGH = 0.95  # of the reusable tokens


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line a policy and workload."""
    out = new_table(_HEADERS, _LEGEND, left=_HEADERS[:1], narrow=True)
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        times = [row["ttft_new_ms"], row["ttft_repeat_ms"]]
        out.add_row(
            PARTS.get(row["part"], row["part"]),
            _where(row),
            f"{row['reused_tokens'] / 1e3:,.0f}",
            f"{100 * row['hit_rate']:.1f}",
            f"{100 * row['share_of_reusable']:.1f}",
            f"{row['checkpoints']:,}",
            f"{row['checkpoints_per_request']:.2f}",
            f"{row['bytes'] / 1e6:,.1f}" if row["bytes"] < 1e9 else f"{row['bytes'] / 1e6:,.0f}",
            *("" if ms is None else f"{ms:.1f}" for ms in times),
            end_section=after is None or after["part"] != row["part"],
        )
    return out


_HEADERS = (
    "workload",
    "saved at",
    "k tokens\nreused",
    "hit\nrate %",
    "of re-\nusable %",
    "check-\npoints",
    "a re-\nquest",
    "MB",
    "new\nms",
    "again\nms",
)
_LEGEND = """\
saved at: every so many tokens; e: the prompt's end; b: where prompts part.
of reusable: an infinite cache that could resume at every 64 tokens has 100 %.
MB: of the model's own states; for traces at 51.5 MB a checkpoint (Qwen3.5-9B).
new, again: median TTFT of new questions and of the same questions asked again."""


def _where(row: dict[str, Any]) -> str:
    marks = [*(["e"] if row["prompt_end"] else []), *(["b"] if row["branch"] else [])]
    return "+".join([str(row["every"] or ""), *marks]).strip("+") or "-"


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence: for each workload the longest interval that reuses nearly everything."""
    parts = [part for part in PARTS if any(row["part"] == part for row in rows)]
    return (
        f"Beside the states at prompt ends and where prompts part, so far that they still reuse "
        f"{100 * ENOUGH:.0f} % of what an infinite cache could: "
        f"{'; '.join(_finding(part, rows) for part in parts)}."
    )


def _finding(part: str, rows: Sequence[dict[str, Any]]) -> str:
    mine = [row for row in rows if row["part"] == part and row["branch"]]
    with_end = [row for row in mine if row["prompt_end"]]
    without = [row for row in mine if not row["prompt_end"]]
    text = f"{PARTS[part]}: {_farthest(with_end)}"
    if without:
        text += f", without prompt ends {_farthest(without)}"
    dense = next(row for row in with_end if row["every"] == INTERVALS[0])
    return f"{text}, where every {INTERVALS[0]} saves {dense['checkpoints_per_request']:.1f}"


def _farthest(rows: Sequence[dict[str, Any]]) -> str:
    """Of the rows that reuse enough, the one with the longest interval; none at all is longest."""
    enough = [row for row in rows if row["share_of_reusable"] >= ENOUGH]
    if not enough:
        return "no interval is short enough"
    row = max(enough, key=lambda row: row["every"] or NEVER)
    interval = "no interval" if row["every"] is None else f"every {row['every']} tokens"
    return (
        f"{interval} ({100 * row['share_of_reusable']:.1f} % with "
        f"{row['checkpoints_per_request']:.2f} checkpoints a request)"
    )


_LABELLED = (64, 2048, 8192, None)
_LOOKS = {
    ("engine", True): (COLD, "^-"),
    ("engine", False): (COLD, "v:"),
    ("claude", True): (WARM, "D-"),
    ("claude", False): (WARM, "o:"),
    ("mooncake", True): (FIRST, "D-"),
    ("mooncake", False): (FIRST, "o:"),
}


def draw(results: dict[str, Any], path: Path) -> None:
    """Share of the reusable tokens that is reused, by checkpoints a request."""
    figure, axes = new_figure(results["question"], "beside the points: tokens between checkpoints")
    lowest = 100.0
    for (part, prompt_end), look in _LOOKS.items():
        rows = [
            row
            for row in results["rows"]
            if (row["part"], row["prompt_end"], row["branch"]) == (part, prompt_end, True)
        ]
        if rows:
            rows.sort(key=lambda row: row["every"] or NEVER)
            lowest = min(lowest, _draw_series(axes, rows, *look))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlabel("checkpoints saved a request (log scale)")
    axes.set_ylabel("reused, % of what an infinite cache could")
    axes.set_ylim(max(0, lowest - 6), 103)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    save_figure(figure, path)


def _draw_series(axes: Axes, rows: list[dict[str, Any]], color: str, style: str) -> float:
    """One line; the intervals are written beside some points. Returns its lowest percentage."""
    part, with_end = PARTS[rows[0]["part"]], rows[0]["prompt_end"]
    x = [row["checkpoints_per_request"] for row in rows]
    y = [100 * row["share_of_reusable"] for row in rows]
    label = f"{part}, {'with' if with_end else 'without'} prompt-end states"
    axes.plot(x, y, style, color=color, markersize=5, label=label)
    for row, *place in zip(rows, x, y, strict=True):
        if with_end and row["every"] in _LABELLED:
            text = str(row["every"] or "none")
            offset: dict[str, Any] = {"textcoords": "offset points", "xytext": (5, -11)}
            axes.annotate(text, place, fontsize=7.5, color=color, **offset)
    return min(y)
