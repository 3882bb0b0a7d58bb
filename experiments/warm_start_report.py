"""What came out of a warm start? Rows, table, chart and the sentence at the end."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from rich.box import SIMPLE_HEAD
from rich.table import Table

from engine import EngineConfig
from engine.model_config import ModelConfig
from experiments.cold_and_warm import MODES, PASSES, Measured
from experiments.plots import COLD, FIRST, LINE, TEXT, WARM, log_ms, new_figure, save_figure
from experiments.recall_documents import Fact
from experiments.results_io import machine_facts
from experiments.tables import new_table

QUESTION = "How much sooner does the first token come when the document is known?"
MOST_LABELLED = 6  # questions; the labels of more would overlap
_LOOKS = (
    ("cold", COLD, "o", "caching off"),
    ("fill", FIRST, "s", "caching on, first time: fills the cache"),
    ("warm", WARM, "D", "caching on, second time: hits"),
)
LOG_SCALE_FROM = 5.0  # ratio of the longest to the shortest time


@dataclass(frozen=True)
class RequestRow:
    """One request of one mode. Plain names are the second pass with caching on, `fill_` the first.

    bits_equal: token ids and logits of all three passes are those of the serial cold pass.
    """

    mode: str
    question: int
    prompt_tokens: int
    fill_num_cached_tokens: int
    num_cached_tokens: int
    boundary: int
    ttft_cold_ms: float
    ttft_fill_ms: float
    ttft_warm_ms: float
    bits_equal: bool

    @property
    def ratio(self) -> float:
        """Times that the first token comes sooner in the second pass than with caching off."""
        return self.ttft_cold_ms / self.ttft_warm_ms


def request_rows(measured: Measured) -> list[RequestRow]:
    """One row for each request of each mode."""
    rows = []
    for mode in MODES:
        passes = [measured.served[mode, pass_] for pass_ in PASSES]
        for number, (cold, fill, warm) in enumerate(zip(*passes, strict=True), start=1):
            row = RequestRow(
                mode=mode,
                question=number,
                prompt_tokens=warm.prompt_tokens,
                fill_num_cached_tokens=fill.num_cached_tokens,
                num_cached_tokens=warm.num_cached_tokens,
                boundary=warm.boundary,
                ttft_cold_ms=cold.ttft_ms,
                ttft_fill_ms=fill.ttft_ms,
                ttft_warm_ms=warm.ttft_ms,
                bits_equal=all(served.difference is None for served in (cold, fill, warm)),
            )
            rows.append(row)
    return rows


def results(
    model_name: str,
    model: ModelConfig,
    config: EngineConfig,
    rows: list[RequestRow],
    measured: Measured,
    failed: list[str],
) -> dict[str, Any]:
    """The content of the results file."""
    return {
        "question": QUESTION,
        "passed": not failed,
        "failures": failed,
        "conclusion": None if failed else conclusion(rows),
        "model": {
            "name": model_name,
            "fingerprint": model.fingerprint,
            "num_linear_layers": model.num_linear_layers,
            "num_full_layers": model.num_full_layers,
            "hidden_size": model.hidden_size,
        },
        "config": asdict(config),
        "requests": [asdict(row) | {"ratio": row.ratio} for row in rows],
        "stats": measured.stats,
    }


_HEADERS = (
    "mode",
    "#",
    "prompt\ntokens",
    "cached\n1st",
    "cached\nwarm",
    "bound-\nary",
    "cold\nms",
    "1st\nms",
    "warm\nms",
    "cold /\nwarm",
    "bits\nequal",
)
_LEGEND = """\
ms are TTFT: from handing a request in to its first token; concurrent: waiting included.
cold: caching off; 1st: caching on, the cache fills; warm: caching on, the same prompts again.
bits equal: token ids and every row of logits, in cold, 1st and warm, are those of serial cold."""


def table(rows: list[RequestRow]) -> Table:
    """One line a request, and what the columns mean."""
    out = new_table(_HEADERS, _LEGEND, left=_HEADERS[:1])
    for row in rows:
        out.add_row(
            row.mode,
            str(row.question),
            str(row.prompt_tokens),
            str(row.fill_num_cached_tokens),
            str(row.num_cached_tokens),
            str(row.boundary),
            f"{row.ttft_cold_ms:.1f}",
            f"{row.ttft_fill_ms:.1f}",
            f"{row.ttft_warm_ms:.1f}",
            f"{row.ratio:.1f}" if row.bits_equal else "-",  # a wrong answer has no speed
            "yes" if row.bits_equal else "NO",
            end_section=row.question == max(r.question for r in rows),
        )
    return out


def answers(measured: Measured, facts: list[Fact]) -> Table:
    """What was asked and answered one at a time with the cache warm, and whether it is so."""
    out = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for header in ("#", "question", "answer, warm", "the document says"):
        out.add_column(header)
    served = measured.served["serial", "warm"]
    for number, (fact, request) in enumerate(zip(facts, served, strict=True), start=1):
        right = request.answer == fact.sentence
        says = "the same" if right else fact.sentence
        out.add_row(str(number), fact.question, request.answer, says)
    return out


def stats_line(mode: str, stats: dict[str, int]) -> str:
    """What the caching engine of a mode counted."""
    return (
        f"{mode}: {stats['hits']} hits of {stats['queries']} queries, "
        f"{stats['tokens_reused']} tokens reused, {stats['saves']} states saved, "
        f"{stats['cold_starts']} cold starts; {stats['slots_checkpoint']} checkpoints in "
        f"{stats['slots_total']} slots, {stats['blocks_cached']} of {stats['blocks_total']} "
        "blocks cached"
    )


def _sooner(rows: list[RequestRow]) -> str:
    serial = [row for row in rows if row.mode == "serial"]
    cold, warm = (median(getattr(r, f"ttft_{p}_ms") for r in serial) for p in ("cold", "warm"))
    text = (
        f"the median first token of a repeated prompt comes {cold / warm:.1f} times sooner "
        f"than without the cache ({cold:.0f} ms to {warm:.0f} ms)"
    )
    new = [row.ttft_fill_ms for row in serial if row.fill_num_cached_tokens]
    if new:
        text += f", of a new question on the known document {cold / median(new):.1f} times"
    return text


def conclusion(rows: list[RequestRow]) -> str:
    """One sentence with the numbers; only for a run in which all bits are equal."""
    assert all(row.bits_equal for row in rows)
    facts = machine_facts()
    return (
        f"One at a time, {_sooner(rows)}; all {len(rows) * len(PASSES)} outputs are equal to the "
        f"last bit, measured on {facts['threads']} thread(s) of {facts['cpu']} with torch "
        f"{facts['torch']}."
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """TTFT by question, serial: cold, first time with the cache, second time."""
    names = [field.name for field in fields(RequestRow)]
    rows = [RequestRow(**{name: row[name] for name in names}) for row in results["requests"]]
    serial = [row for row in rows if row.mode == "serial"]
    ratio = median(r.ttft_cold_ms for r in serial) / median(r.ttft_warm_ms for r in serial)
    outcome = (
        f"{ratio:.1f} times sooner for a repeated prompt (median, serial); "
        "token ids and logits bit-equal"
    )
    figure, axes = new_figure(results["question"], outcome)
    times = [_draw_pass(axes, serial, *look) for look in _LOOKS]
    low, high = min(map(min, times)), max(map(max, times))
    if high / low >= LOG_SCALE_FROM:
        log_ms(axes)
        axes.set_ylim(low / 2, high * 2)
        axes.set_ylabel("time to first token, ms (log scale)")
    else:
        axes.set_ylim(0, high * 1.15)
        axes.set_ylabel("time to first token, ms")
    axes.set_xlim(0.5, len(serial) + 0.5)
    if len(serial) <= MOST_LABELLED:
        axes.set_xticks([r.question for r in serial], [f"question {r.question}" for r in serial])
    else:
        axes.set_xlabel("question")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for edge in serial[:-1]:
        axes.axvline(edge.question + 0.5, color=LINE, linewidth=0.8, zorder=0)
    figure.legend(loc="outside lower center", ncols=len(_LOOKS), frameon=False)
    save_figure(figure, path)


def _draw_pass(
    axes: Axes, rows: list[RequestRow], pass_: str, color: str, marker: str, label: str
) -> list[float]:
    """One series of points, each with its time and the tokens it reused; returns the times."""
    times = [getattr(row, f"ttft_{pass_}_ms") for row in rows]
    shift = {"cold": -0.22, "fill": 0.0, "warm": 0.22}[pass_]
    places = [row.question + shift for row in rows]
    axes.plot(places, times, marker, color=color, markersize=9, label=label)
    if len(rows) <= MOST_LABELLED:
        side = {"xytext": (0, 8), "va": "bottom"} if pass_ == "cold" else {"xytext": (0, -8)}
        style: dict[str, Any] = {"va": "top", "ha": "center", "fontsize": 7.5, "color": TEXT} | side
        for row, place, time in zip(rows, places, times, strict=True):
            cached = {"fill": row.fill_num_cached_tokens, "warm": row.num_cached_tokens}.get(pass_)
            note = f"{time:,.0f} ms" + (f"\n{cached:,} cached" if cached else "")
            axes.annotate(note, (place, time), textcoords="offset points", **style)
    return times
