"""What came out of the regression? Tables, chart and the sentence at the end."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.plots import COLD, FIRST, WARM, log_ms, new_figure, save_figure
from experiments.regression_rows import GUIDELLM, OFF, OPENAI, Row
from experiments.regression_workloads import BRANCHES, OWN, SHARED, TALKS
from experiments.tables import new_table

CONCURRENT, SERIAL = "concurrent", "serial"
MODES = (SERIAL, CONCURRENT)
WORKLOADS = (SHARED, TALKS, BRANCHES, OWN)
REUSING = (SHARED, TALKS, BRANCHES)
SERVER_COLORS = {OFF: COLD, "copy": FIRST, "redirect": WARM}


def table(rows: Sequence[Row]) -> Table:
    """One line a pass."""
    caption = (
        "TTFT: ms at the client, median / 95th percentile. new/s: new tokens. sooner, faster: "
        "ratios to caching off with as many clients. cached: prompt tokens that the server says it "
        "reused; due: those expected from the placement rules if requests come one by one. differ: "
        "answers unlike the reference. *: by GuideLLM."
    )
    words = ("workload", "cache")
    headers = ("workload", "clients", "cache", "TTFT", "sooner", "new/s", "faster", "cached")
    out = new_table((*headers, "due", "differ"), caption, left=words, narrow=True)
    for row, after in zip_longest(rows, rows[1:]):
        out.add_row(
            row["workload"] + ("*" if row["client"] == GUIDELLM else ""),
            str(row["clients"]),
            row["server"],
            f"{row['ttft_p50_ms']:.0f} / {row['ttft_p95_ms']:.0f}",
            _two(row["ttft_p50_ratio"], row["ttft_p95_ratio"]),
            f"{row['new_tokens_per_s']:.0f}",
            _one(row["new_tokens_ratio"]),
            str(row["cached_tokens"]),
            str(row.get("expected_cached_tokens", "-")),
            str(row.get("outputs_that_differ", "-")),
            end_section=after is None or after["workload"] != row["workload"],
        )
    return out


def _one(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _two(first: float | None, second: float | None) -> str:
    return "-" if first is None or second is None else f"{first:.1f} / {second:.1f}"


def in_order(rows: Sequence[Row]) -> list[Row]:
    """By workload, mode, client and server, as they were run."""
    servers = list(dict.fromkeys(row["server"] for row in rows))
    return sorted(
        rows,
        key=lambda row: (
            WORKLOADS.index(row["workload"]),
            MODES.index(row["mode"]),
            row["client"] == GUIDELLM,
            servers.index(row["server"]),
        ),
    )


def turn_table(turns: Sequence[Row]) -> Table:
    """What exactness costs a conversation: one line a setting and turn."""
    caption = (
        "Means over the conversations; one client, who thinks between turns. least: where an exact "
        "one must resume without idle prefill. again: tokens recomputed. differ: answers unlike "
        "the reference, allowed where exact is false."
    )
    words = ("setting", "why not later")
    headers = (
        "setting", "turn", "prompt", "least", "resumed", "again", "TTFT\nms", "differ", words[1]
    )  # fmt: skip
    out = new_table(headers, caption, left=words, narrow=True)
    for row, after in zip_longest(turns, turns[1:]):
        tokens = ("prompt_tokens", "expected_boundary", "boundary", "recomputed_tokens")
        out.add_row(
            row["setting"],
            str(row["turn"]),
            *(f"{row[name]:.0f}" for name in tokens),
            f"{row['ttft_p50_ms']:.1f}",
            str(row["outputs_that_differ"]),
            ", ".join(f"{count} {why}" for why, count in sorted(row["limit_reasons"].items())),
            end_section=after is None or after["setting"] != row["setting"],
        )
    return out


def find(rows: Sequence[Row], workload: str, mode: str, server: str, client: str = OPENAI) -> Row:
    """The row of one pass. KeyError if there is none."""
    wanted = {"workload": workload, "mode": mode, "server": server, "client": client}
    for row in rows:
        if all(row[name] == value for name, value in wanted.items()):
            return row
    raise KeyError(f"no pass {wanted}")


def conclusion(rows: Sequence[Row], turns: Sequence[Row], recorded: Sequence[Row] = ()) -> str:
    """One sentence; only for a run without failures."""

    def sooner(workload: str) -> list[float]:
        return [find(rows, workload, mode, "redirect")["ttft_p50_ratio"] for mode in MODES]

    shared = sooner(SHARED)
    clients = find(rows, SHARED, CONCURRENT, "redirect")["clients"]
    one, many = map(_factor, shared)
    others = [f"{name} {' and '.join(map(_factor, sooner(name)))}" for name in (TALKS, BRANCHES)]
    outputs = sum(row.get("outputs", 0) for row in rows if row["server"] != OFF)
    outputs += sum(row["conversations"] for row in turns if row["exact"])
    loose = [row for row in turns if not row["exact"]]
    graphed = sum(row["outputs"] for row in recorded if row["server"] != OFF)
    also = f" (and {graphed} from recorded graphs)" if graphed else ""
    return (
        f"{'Yes' if min(shared) > 1 else 'No'}: at the client the median first token on a shared "
        f"prefix comes {one} times sooner than without caching with one client and {many} times "
        f"with {clients} ({', '.join(others)}; nothing to reuse "
        f"{' and '.join(map(_factor, sooner(OWN)))}), and all {outputs} exact answers with caching "
        f"have the tokens and log-probabilities of a serial run without it{also}; a conversation's "
        f"turn recomputes {_recomputed(turns)} tokens, and of "
        f"{sum(row['conversations'] for row in loose)} answers not asked to be exact "
        f"{sum(row['outputs_that_differ'] for row in loose)} differ."
    )


def _recomputed(turns: Sequence[Row]) -> str:
    """Tokens a turn in each setting: all have as many turns of as many conversations."""
    settings: dict[str, list[float]] = {}
    for row in turns:
        settings.setdefault(row["setting"], []).append(row["recomputed_tokens"])
    return ", ".join(f"{sum(v) / len(v):.0f} ({name})" for name, v in settings.items())


def _factor(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 1.995 else f"{ratio:.1f}"


def draw(results: dict[str, Any], path: Path) -> None:
    """Median first token of each workload and server, to the 95th percentile, from the file."""
    rows = results["rows"]
    outcome = "time to first token at the client; all exact answers equal, token by token"
    figure, axes = new_figure(results["question"], outcome)
    groups = [(workload, mode) for mode in MODES for workload in WORKLOADS]
    servers = [name for name in SERVER_COLORS if any(row["server"] == name for row in rows)]
    width = 0.8 / len(servers)
    for i, server in enumerate(servers):
        places = [g - 0.4 + (i + 0.5) * width for g in range(len(groups))]
        mine = [find(rows, *group, server) for group in groups]
        middle = [row["ttft_p50_ms"] for row in mine]
        above = [row["ttft_p95_ms"] - row["ttft_p50_ms"] for row in mine]
        label = "caching off" if server == OFF else f"caching on, {server}"
        axes.bar(places, middle, width, color=SERVER_COLORS[server], label=label)
        axes.errorbar(places, middle, [[0] * len(above), above], fmt="none", ecolor="#9ca3af")
        guided = [
            (places[groups.index((row["workload"], row["mode"]))], row["ttft_p50_ms"])
            for row in rows
            if row["client"] == GUIDELLM and row["server"] == server
        ]
        if guided:
            marks: Any = {"color": "black", "mfc": "w", "ms": 4, "linestyle": "none", "marker": "D"}
            axes.plot(*zip(*guided, strict=True), **marks, label=None if i else "by GuideLLM")
    log_ms(axes)
    axes.set_ylim(bottom=1)
    names = [f"{workload.replace('-', '-' + chr(10))}" for workload, _ in groups]
    axes.set_xticks(range(len(groups)), names, fontsize=8.5)
    axes.axvline(len(WORKLOADS) - 0.5, color="#9ca3af", linewidth=0.8)
    for half, mode in enumerate(MODES):
        clients = max(row["clients"] for row in rows if row["mode"] == mode)
        text = f"{mode}, {clients} client{'s' if clients > 1 else ''}"
        middle_x = (half + 0.5) / len(MODES)
        axes.text(middle_x, 0.97, text, transform=axes.transAxes, ha="center", va="top")
    axes.set_ylabel("ms (log scale); bar: median, line: to the 95th %")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    save_figure(figure, path)
