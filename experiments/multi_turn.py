"""Where does each turn of a conversation resume, and why not later?

Several conversations are served, one request at a time; a seed draws whose turn it is. The first
turn holds a document of facts; every turn asks for one, and the next prompt is the last one, its
answer and a new question.
The last prompt's end is the latest that a turn could resume from: an answer's states and K/V were
written while decoding and are not published. Smaller and smaller state pools show what is lost when
conversations evict each other's states. Token ids and every row of logits are compared with an
engine without cache.

    python -m experiments.multi_turn
    python -m experiments.multi_turn --small

Exit status: 0, 1 if a bit differs or a turn resumed elsewhere than its probe said, 2 for a refused
option.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cache.cached_sequence import CachedSequence
from cache.hashing import Namespace
from engine import LLM, EngineConfig, RequestOutput, SamplingParams
from engine.builtin import BUILTIN_MODEL_DIR
from experiments.cold_and_warm import first_difference, serve, warm_up
from experiments.options import count, results_file, thread_count
from experiments.plots import COLD, FIRST, LINE, WARM, new_figure, save_figure
from experiments.recall_documents import answer_turn, make_document, prompt, user_turn
from experiments.results_io import RESULTS, write_json

QUESTION = "Where does each turn of a conversation resume, and why not later?"
NUM_SEQS = 4
ORDER_SEED = 1
POOLS = (8, 16, 32, 64)
# Why a turn did not resume later than it did.
FIRST_TURN = "first turn"  # nothing of it was served before
LATEST = "latest"  # the last grid boundary of the prompt before it: later tokens were decoded
NO_STATE = "no state"  # K/V reaches further, but the state there was evicted, or found no slot
KV_GONE = "K/V gone"  # its blocks were evicted


@dataclass(frozen=True)
class Turn:
    """One request, and what the right answer to it is. `turn` counts from 1."""

    conversation: int
    turn: int
    prompt: list[int]
    answer: str


@dataclass(frozen=True)
class Row:
    """One turn with one pool. boundary: resumed from; latest: the last one that could be saved."""

    num_slots: int
    conversation: int
    turn: int
    prompt_tokens: int
    latest: int
    kv_reach: int
    boundary: int
    recomputed_tokens: int
    why_not_later: str
    miss_reason: str | None
    ttft_cold_ms: float
    ttft_ms: float
    answered: bool


# ---- the conversations


def conversation_turns(llm: LLM, *, conversations: int, turns: int, sentences: int) -> list[Turn]:
    """In the order they are served: whose turn is next is drawn, seeded."""
    numbers = range(1, conversations + 1)
    talks = {n: iter(_conversation(llm, n, turns=turns, sentences=sentences)) for n in numbers}
    order = [number for number in numbers for _ in range(turns)]
    random.Random(ORDER_SEED).shuffle(order)
    return [next(talks[number]) for number in order]


def _conversation(llm: LLM, number: int, *, turns: int, sentences: int) -> list[Turn]:
    """The answers in it are the right ones, whatever a model says."""
    assert llm.tokenizer is not None
    num_facts = max(turns, sentences // 8)
    document = make_document(number, num_facts=num_facts, num_sentences=sentences)
    asked = [document.facts[turn * num_facts // turns] for turn in range(turns)]
    ids = llm.tokenizer.encode(prompt(document, asked[0]))
    talk = [Turn(number, 1, ids, asked[0].sentence)]
    for turn, (before, fact) in enumerate(pairwise(asked), start=2):
        said = answer_turn(before.sentence) + user_turn(fact.question)
        ids = ids + llm.tokenizer.encode(said)
        talk.append(Turn(number, turn, ids, fact.sentence))
    return talk


def latest_boundaries(turns: Iterable[Turn], chunk_stride: int) -> list[int]:
    """For each turn the last grid boundary below the last token of the prompt before it."""
    ends: dict[int, int] = {}
    latest = []
    for turn in turns:
        latest.append(ends.get(turn.conversation, 0))
        ends[turn.conversation] = (len(turn.prompt) - 1) // chunk_stride * chunk_stride
    return latest


# ---- serving


@dataclass(frozen=True)
class Probe:
    """What the cache could serve just before a request: K/V, and state and K/V together."""

    kv_reach: int
    boundary: int


def probe(llm: LLM, ids: list[int]) -> Probe:
    """Look a prompt up, changing nothing."""
    namespace = Namespace(llm.model_config.fingerprint, "", "")
    match = llm.manager.match(CachedSequence(ids, namespace=namespace))
    return Probe(match.kv_reach, match.boundary)


def serve_turns(
    llm: LLM, turns: Sequence[Turn], params: SamplingParams
) -> list[tuple[Probe, RequestOutput]]:
    """One at a time, each looked up first."""
    served = []
    for turn in turns:
        found = probe(llm, turn.prompt)
        outputs = serve(llm, [turn.prompt], params, mode="serial", advance=lambda: None)
        served.append((found, outputs[0]))
    return served


def why_not_later(turn: int, latest: int, found: Probe) -> str:
    """The reason in one of the words above."""
    if turn == 1:
        return FIRST_TURN
    if found.boundary >= latest:
        return LATEST
    return NO_STATE if found.kv_reach >= latest else KV_GONE


def measure(options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """A row for each turn and pool, and every difference from the engine without cache."""
    config = {"max_num_seqs": NUM_SEQS, "checkpoint_every": options.checkpoint_every}
    cold = LLM(BUILTIN_MODEL_DIR, enable_prefix_caching=False, **config)
    turns = conversation_turns(
        cold,
        conversations=options.conversations,
        turns=options.turns,
        sentences=options.sentences,
    )
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, return_logits=True)
    warm_up(cold, len(turns[0].prompt))
    reference = [output for _, output in serve_turns(cold, turns, params)]
    num_blocks = _all_blocks(turns) if options.num_blocks is None else options.num_blocks
    rows: list[Row] = []
    failed: list[str] = []
    for num_slots in track(options.slots, "pools", console=Console(stderr=True)):
        pooled = EngineConfig(num_slots=num_slots, num_blocks=num_blocks, **config)
        llm = LLM.from_model(cold.worker.model, pooled, cold.tokenizer)
        warm_up(llm, len(turns[0].prompt))
        llm.manager.reset([])  # nothing is left of the warm-up
        served = serve_turns(llm, turns, params)
        rows += rows_of(num_slots, turns, reference, served, pooled.chunk_stride)
        failed += failures(num_slots, turns, reference, served)
    return rows, failed


def _all_blocks(turns: Sequence[Turn]) -> int:
    """Room for every block of every conversation, so that only states are evicted."""
    longest = max(len(turn.prompt) for turn in turns) // 64 + 2
    return 1 + longest * (max(turn.conversation for turn in turns) + 2) + 32


def rows_of(
    num_slots: int,
    turns: Sequence[Turn],
    reference: Sequence[RequestOutput],
    served: Sequence[tuple[Probe, RequestOutput]],
    chunk_stride: int,
) -> list[Row]:
    """One row a turn."""
    rows = []
    latest_ones = latest_boundaries(turns, chunk_stride)
    for turn, latest, cold, (found, output) in zip(
        turns, latest_ones, reference, served, strict=True
    ):
        assert cold.ttft_ms is not None and output.ttft_ms is not None
        row = Row(
            num_slots=num_slots,
            conversation=turn.conversation,
            turn=turn.turn,
            prompt_tokens=len(turn.prompt),
            latest=latest,
            kv_reach=found.kv_reach,
            boundary=output.boundary,
            recomputed_tokens=len(turn.prompt) - output.num_cached_tokens,
            why_not_later=why_not_later(turn.turn, latest, found),
            miss_reason=output.miss_reason,
            ttft_cold_ms=cold.ttft_ms,
            ttft_ms=output.ttft_ms,
            answered=output.text.strip().startswith(turn.answer),
        )
        rows.append(row)
    return rows


def failures(
    num_slots: int,
    turns: Sequence[Turn],
    reference: Sequence[RequestOutput],
    served: Sequence[tuple[Probe, RequestOutput]],
) -> list[str]:
    """Every bit that differs from cold, and every turn that did not resume where its probe said."""
    found = []
    for turn, cold, (probed, output) in zip(turns, reference, served, strict=True):
        name = f"{num_slots} slots, conversation {turn.conversation}, turn {turn.turn}"
        difference = first_difference(cold, output)
        if difference is not None:
            found.append(f"{name}: {difference}")
        if output.boundary != probed.boundary:
            found.append(f"{name}: resumed from {output.boundary}, probed {probed.boundary}")
    return found


# ---- report


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
    out = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=_LEGEND, caption_justify="left")
    headers = ("slots", "turn", "prompt", "latest", "K/V", "resumed", "again", "cold /\nwarm")
    for header in headers:
        out.add_column(header, justify="right", no_wrap=True)
    out.add_column("why not later", no_wrap=True)
    out.add_column("miss reason", no_wrap=True)
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
latest: nothing later was ever published, an answer is decoded; no state: K/V reached further."""


def _counted(reasons: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence: the largest pool's resumptions, and what smaller pools lose."""
    later = [row for row in rows if row["turn"] > 1]
    pools = sorted({row["num_slots"] for row in later}, reverse=True)
    largest = [row for row in later if row["num_slots"] == pools[0]]
    at_latest = _share(largest)
    behind = mean(row["prompt_tokens"] - row["boundary"] for row in largest)
    ratio = median(row["ttft_cold_ms"] for row in largest) / median(r["ttft_ms"] for r in largest)
    text = (
        f"With {pools[0]} slots {at_latest:.0f} % of the later turns resume at the last boundary "
        f"of the prompt before, on average {behind:.0f} tokens before their end, because an answer "
        f"is decoded and not published, and their first token comes {ratio:.1f} times sooner than "
        "without cache"
    )
    fewer = [
        f"{num_slots} slots {_share([r for r in later if r['num_slots'] == num_slots]):.0f} %"
        for num_slots in pools[1:]
    ]
    return (
        f"{text}; with {', '.join(fewer)}, the others for want of a state." if fewer else f"{text}."
    )


def _share(rows: Sequence[dict[str, Any]]) -> float:
    """Percent of the turns that resumed at the latest boundary."""
    return 100 * mean(row["why_not_later"] == LATEST for row in rows)


def draw(results: dict[str, Any], path: Path) -> None:
    """Boundary resumed from, by turn: a line a pool, between the prompt's end and nothing."""
    lines = aggregated(results["rows"])
    figure, axes = new_figure(QUESTION, "tokens, means over the conversations; bit-equal to cold")
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


# ---- command line


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False, markup=False)
    try:
        rows, failed = measure(options)
    except (ValueError, OSError) as error:
        print(f"multi_turn: error: {error}", file=sys.stderr)
        return 2
    if failed:
        print("\n".join(["FAILED", *failed]), file=sys.stderr)
        return 1
    written = [asdict(row) for row in rows]
    by_turn = aggregated(written)
    results = {
        "question": QUESTION,
        "conclusion": conclusion(written),
        "rows": written,
        "by_turn": by_turn,
        "answered": mean(row.answered for row in rows),
        "options": {name: value for name, value in vars(options).items() if name != "json"},
    }
    console.print(table(by_turn))
    write_json(options.json, results)
    draw(results, options.json.with_suffix(".png"))
    console.print(f"Right answers: {100 * results['answered']:.0f} %.")
    console.print(results["conclusion"])
    return 0


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Options; sizes that are not given are those of --small or of the full run."""
    parser = argparse.ArgumentParser(prog="multi_turn", description=QUESTION, allow_abbrev=False)
    parser.add_argument("--conversations", type=count, help="that take turns")
    parser.add_argument("--turns", type=count, default=8, help="of each conversation")
    parser.add_argument("--sentences", type=count, help="of each document, about 7.5 tokens each")
    parser.add_argument("--slots", type=count, nargs="+", default=POOLS, help="sizes of the pool")
    parser.add_argument("--num-blocks", type=count, help="of K/V (default: room for everything)")
    parser.add_argument("--checkpoint-every", type=count, default=512, help="tokens")
    parser.add_argument("--max-tokens", type=count, default=8, help="new tokens of each answer")
    parser.add_argument("--threads", type=thread_count, default=1, help="of torch")
    parser.add_argument("--small", action="store_true", help="under a minute")
    parser.add_argument("--json", type=results_file, default=RESULTS / "multi_turn.json")
    options = parser.parse_args(argv)
    sizes = {"conversations": 8, "sentences": 120 if options.small else 400}
    for name, size in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    options.slots = sorted(set(options.slots))
    if options.turns < 2:
        parser.error("--turns: a conversation has at least 2")
    return options


if __name__ == "__main__":
    sys.exit(main())
