"""What came out of serving concurrent clients? Table, chart and the sentence at the end."""

from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.plots import COLD, FIRST, WARM, log_ms, new_figure, save_figure
from experiments.tables import new_table


def table(rows: list[dict[str, Any]]) -> Table:
    """One line a run."""
    caption = (
        "ms: median / 95th percentile. TTFT: from handing in to the first token, waiting included; "
        "latency: to the last token; tokens/s: new ones. Three requests of four ask "
        "about a shared document."
    )
    headers = ("clients", "cache", "TTFT\nms", "shared\nTTFT, ms", "latency\nms")
    headers += ("requests\n/s", "tokens\n/s", "tokens\nhit", "bits\nequal")
    out = new_table(headers, caption)
    for row in rows:
        times = (
            " / ".join("-" if v is None else f"{v:.0f}" for v in pair)
            for pair in _pairs(row, "ttft", "ttft_shared", "latency")
        )
        out.add_row(
            str(row["clients"]),
            "on" if row["caching"] else "off",
            *times,
            f"{row['requests_per_s']:.1f}",
            f"{row['new_tokens_per_s']:.0f}",
            f"{row['token_hit_rate']:.0%}",
            "yes" if row["bits_equal"] else "NO",
            end_section=row["caching"],
        )
    return out


def _pairs(row: dict[str, Any], *names: str) -> list[tuple[float | None, float | None]]:
    return [(row[f"{name}_p50_ms"], row[f"{name}_p95_ms"]) for name in names]


def by_caching(rows: list[dict[str, Any]], caching: bool) -> list[dict[str, Any]]:
    """The rows with caching on, or those with caching off, by number of clients."""
    return [row for row in rows if row["caching"] is caching]


def conclusion(rows: list[dict[str, Any]]) -> str:
    """One sentence that answers the question; only for rows with equal bits."""
    off, on = by_caching(rows, False), by_caching(rows, True)
    return (
        f"From {on[0]['clients']} to {on[-1]['clients']} clients the median first token of a "
        f"request on a known document goes from {on[0]['ttft_shared_p50_ms']:.1f} to "
        f"{on[-1]['ttft_shared_p50_ms']:.0f} ms with caching (off: "
        f"{off[0]['ttft_shared_p50_ms']:.0f} to {off[-1]['ttft_shared_p50_ms']:.0f} ms) and the "
        f"throughput from {on[0]['requests_per_s']:.1f} to {on[-1]['requests_per_s']:.1f} "
        f"requests/s (off: {off[0]['requests_per_s']:.1f} to {off[-1]['requests_per_s']:.1f}); "
        f"{on[-1]['token_hit_rate']:.0%} of the prompt tokens are reused, and all outputs are "
        "those of a serial run without caching, bit for bit."
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """TTFT of requests on shared documents by number of clients, from the results file alone."""
    rows = results["rows"]
    off, on = by_caching(rows, False), by_caching(rows, True)
    times = on[-1]["requests_per_s"] / off[-1]["requests_per_s"]
    outcome = (
        f"at {on[-1]['clients']} clients {times:.1f} times the requests/s; "
        f"{on[-1]['token_hit_rate']:.0%} of prompt tokens reused; logits bit-equal"
    )
    figure, axes = new_figure(results["question"], outcome)
    looks = (
        (off, "ttft_shared", COLD, "caching off, shared document"),
        (on, "ttft_shared", WARM, "caching on, shared document: hits"),
        (on, "ttft_own", FIRST, "caching on, own document: misses"),
    )
    for run, name, color, label in looks:
        there = [row for row in run if row[f"{name}_p50_ms"] is not None]
        places = [row["clients"] for row in there]
        middle = [row[f"{name}_p50_ms"] for row in there]
        high = [row[f"{name}_p95_ms"] for row in there]
        axes.plot(places, middle, "o-", color=color, label=label)
        axes.fill_between(places, middle, high, color=color, alpha=0.15, linewidth=0)
    places = [row["clients"] for row in on]
    axes.set_xscale("log", base=2)
    log_ms(axes)
    axes.set_xticks(places, [str(place) for place in places])
    axes.set_xlabel("closed-loop clients (log scale)")
    axes.set_ylabel("time to first token, ms (log scale)\nline: median, shade: to the 95th %")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save_figure(figure, path)
