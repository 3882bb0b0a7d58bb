"""Where does each turn of a conversation resume, and why not later?

Several conversations are served, one request at a time; a seed draws whose turn it is. The first
turn holds a document of facts; every turn asks for one, and the next prompt is the last one, its
answer and a new question.
All turns are exact and follow each other at once, so the last prompt's end is the latest that a
turn could resume from: exact requests leave nothing that decoding wrote, and no idle step prefills
an answer (`experiments.regression` has both). Smaller and smaller state pools show what is lost
when conversations evict each other's states. Token ids and every row of logits are compared with
an engine without cache.

    python -m experiments.multi_turn
    python -m experiments.multi_turn --small

Exit status: 0, 1 if a bit differs or a turn resumed elsewhere than its probe said, 2 for a refused
option.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

import torch

from cache.cached_sequence import CachedSequence
from cache.hashing import Namespace
from cache.placement import CHECKPOINT_EVERY
from engine import LLM, EngineConfig, RequestOutput, SamplingParams
from experiments.cold_and_warm import first_difference, serve, warm_up
from experiments.command_line import add_model, fill_in, new_parser, question, refused
from experiments.console import console, tracked
from experiments.conversations import Turn, conversation_turns, latest_boundaries
from experiments.engines import check_length, load, same_weights
from experiments.multi_turn_report import (
    FIRST_TURN,
    KV_GONE,
    LATEST,
    NO_STATE,
    aggregated,
    conclusion,
    draw,
    table,
)
from experiments.options import count
from experiments.outcome import asked, failed, publish, remove_results

QUESTION = question(__doc__)
SMALL = {"conversations": 8, "sentences": 120}
FULL = {"conversations": 8, "sentences": 400}
NUM_SEQS = 4
POOLS = (8, 16, 32, 64)


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


def measure(
    cold: LLM, turns: Sequence[Turn], options: argparse.Namespace
) -> tuple[list[Row], list[str]]:
    """A row for each turn and pool, and every difference from the engine without cache."""
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, return_logits=True)
    warm_up(cold, len(turns[0].prompt))
    reference = [output for _, output in serve_turns(cold, turns, params)]
    num_blocks = _all_blocks(turns) if options.num_blocks is None else options.num_blocks
    rows: list[Row] = []
    found: list[str] = []
    for num_slots in tracked(options.slots, "pools"):
        pooled = replace(
            cold.config, enable_prefix_caching=True, num_slots=num_slots, num_blocks=num_blocks
        )
        llm = same_weights(cold, pooled, len(turns[0].prompt))
        llm.manager.reset([])  # nothing is left of the warm-up
        served = serve_turns(llm, turns, params)
        rows += rows_of(num_slots, turns, reference, served, pooled.chunk_stride)
        found += failures(num_slots, turns, reference, served)
    return rows, found


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


# ---- command line


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Options. Bad ones exit with status 2."""
    parser = new_parser("multi_turn", __doc__)
    add_model(parser)
    parser.add_argument("--conversations", type=count, help="that take turns")
    parser.add_argument("--turns", type=count, default=8, help="of each conversation")
    parser.add_argument("--sentences", type=count, help="of each document, about 7.5 tokens each")
    parser.add_argument("--slots", type=count, nargs="+", default=POOLS, help="sizes of the pool")
    parser.add_argument("--num-blocks", type=count, help="of K/V (default: room for everything)")
    parser.add_argument("--checkpoint-every", type=count, default=CHECKPOINT_EVERY, help="tokens")
    parser.add_argument("--max-tokens", type=count, default=8, help="new tokens of each answer")
    options = parser.parse_args(argv)
    fill_in(options, SMALL, FULL)
    options.slots = sorted(set(options.slots))
    if options.turns < 2:
        parser.error(f"--turns {options.turns}: a conversation has at least 2")
    return options


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    try:
        config = EngineConfig(
            enable_prefix_caching=False,
            max_num_seqs=NUM_SEQS,
            checkpoint_every=options.checkpoint_every,
        )
        cold = load(options.model, config)
        sizes = {name: getattr(options, name) for name in ("conversations", "turns", "sentences")}
        turns = conversation_turns(cold, **sizes)
        check_length(cold, max(len(turn.prompt) for turn in turns))
        remove_results(options.json)
        rows, found = measure(cold, turns, options)
    except (ValueError, OSError) as error:
        return refused("multi_turn", error)
    if found:
        return failed(found)
    written = [asdict(row) for row in rows]
    by_turn = aggregated(written)
    results: dict[str, Any] = {
        "question": QUESTION,
        "conclusion": conclusion(written),
        "rows": written,
        "by_turn": by_turn,
        "answered": mean(row.answered for row in rows),
        "options": asked(options),
    }
    console().print(table(by_turn))
    console().print(f"Right answers: {100 * results['answered']:.0f} %.")
    return publish(options.json, results, [], draw)


if __name__ == "__main__":
    sys.exit(main())
