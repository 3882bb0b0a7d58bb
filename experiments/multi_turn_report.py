"""What came out of the conversations? Lines by turn, table, chart and the sentence at the end."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.table import Table

from experiments.plots import COLD, FIRST, LINE, WARM, new_figure, save_figure
from experiments.tables import new_table

# Why a turn did not resume later than it did.
FIRST_TURN = "first turn"  # nothing of it was served before
LATEST = "latest"  # the last grid boundary of the prompt before it: later tokens were decoded
NO_STATE = "no state"  # K/V reaches further, but the state there was evicted, or found no slot
KV_GONE = "K/V gone"  # its blocks were evicted


def aggregated(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a pool and turn, over the conversations."""
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["num_slots"], row["turn"]), []).append(row)
    return [_aggregate(num_slots, turn, group) for (num_slots, turn), group in groups.items()]


def _aggregate(num_slots: int, turn: int, group: list[dict[str, Any]]) -> dict[str, Any]:
    means = ("prompt_tokens", "latest", "kv_reach", "boundary", "recomputed_tokens")
    cold, warm = (median(row[name] for row in group) for name in ("ttft_cold_ms", "ttft_ms"))
    return {
        "num_slots": num_slots,
        "turn": turn,
        **{name: mean(row[name] for row in group) for name in means},
        "ttft_ratio": cold / warm,
        "reasons": dict(Counter(row["why_not_later"] for row in group)),
        "misses": dict(Counter(row["miss_reason"] for row in group if row["miss_reason"])),
    }


def table(lines: Sequence[dict[str, Any]]) -> Table:
    """Means over the conversations."""
    words = ("why not later", "miss reason")
    headers = ("slots", "turn", "prompt", "latest", "K/V", "resumed", "again", "cold /\nwarm")
    out = new_table((*headers, *words), _LEGEND, left=words, narrow=True)
    for line, after in zip(lines, [*lines[1:], None], strict=True):
        tokens = ("prompt_tokens", "latest", "kv_reach", "boundary", "recomputed_tokens")
        out.add_row(
            str(line["num_slots"]),
            str(line["turn"]),
            *(f"{line[name]:.0f}" for name in tokens),
            f"{line['ttft_ratio']:.1f}",
            _counted(line["reasons"]),
            _counted(line["misses"]),
            end_section=after is None or after["num_slots"] != line["num_slots"],
        )
    return out


_LEGEND = """\
Tokens, means over the conversations. latest: the last boundary that could be saved before;
K/V: how far it reached; resumed: boundary; again: tokens recomputed; cold / warm: of median TTFT.
latest: nothing later was there, exact requests leave no decode states.
no state: K/V reached further."""


def _counted(reasons: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence: the largest pool's resumptions, and what smaller pools lose."""
    later = [row for row in rows if row["turn"] > 1]
    pools = sorted({row["num_slots"] for row in later}, reverse=True)
    by_pool = {pool: [row for row in later if row["num_slots"] == pool] for pool in pools}
    largest = by_pool[pools[0]]
    ratio = median(row["ttft_cold_ms"] for row in largest) / median(r["ttft_ms"] for r in largest)
    text = (
        f"With {pools[0]} slots {_share(largest):.0f} % of the later turns resume at the last "
        f"boundary of the prompt before; of {mean(row['prompt_tokens'] for row in later):,.0f} "
        f"tokens {_again(largest):.0f} are computed again, because exact requests leave no decode "
        f"states, and the first token comes {ratio:.1f} times sooner than without cache"
    )
    fewer = [f"{_again(by_pool[pool]):.0f} with {pool} slots" for pool in pools[1:]]
    return f"{text}; {', '.join(fewer)}." if fewer else f"{text}."


def _again(rows: Sequence[dict[str, Any]]) -> float:
    """Tokens computed again, the mean of the turns."""
    return mean(row["recomputed_tokens"] for row in rows)


def _share(rows: Sequence[dict[str, Any]]) -> float:
    """Percent of the turns that resumed at the latest boundary."""
    return 100 * mean(row["why_not_later"] == LATEST for row in rows)


def draw(results: dict[str, Any], path: Path) -> None:
    """Boundary resumed from, by turn: a line a pool, between the prompt's end and nothing."""
    lines = aggregated(results["rows"])
    outcome = "tokens, means over the conversations; bit-equal to cold"
    figure, axes = new_figure(results["question"], outcome)
    pools = sorted({line["num_slots"] for line in lines})
    largest = [line for line in lines if line["num_slots"] == pools[-1]]
    numbers = [line["turn"] for line in largest]
    axes.plot(numbers, [r["prompt_tokens"] for r in largest], "-", color=COLD, label="prompt's end")
    axes.plot(numbers, [r["latest"] for r in largest], "_", color=COLD, ms=26, label="latest saved")
    styles = ("o-", "s--", "^-.", "D:", "v-", "P--")
    for i, num_slots in enumerate(pools):
        mine = [line["boundary"] for line in lines if line["num_slots"] == num_slots]
        color = WARM if num_slots == pools[-1] else FIRST
        style = styles[i % len(styles)]
        axes.plot(numbers, mine, style, color=color, ms=6, label=f"resumed, {num_slots} slots")
    axes.axhline(0, color=LINE)
    axes.set_xticks(numbers, [f"turn {number}" for number in numbers])
    axes.set_ylabel("tokens, mean")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    save_figure(figure, path)
