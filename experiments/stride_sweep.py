"""How far apart should checkpoints be?

Sweeps `checkpoint_every` on a model and on real traces. The model answers questions about documents
and every question again: its tokens must be those of an engine without cache. Then two traces are
replayed without a model, in unlimited memory. All with and without the state at the end of each
prompt.

    python -m experiments.stride_sweep --traces DIR
    python -m experiments.stride_sweep --small

Exit status: 0, 1 if an answer differs from that without cache, 2 for a refused option.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from engine import LLM, EngineConfig, RequestOutput, SamplingParams
from experiments.cold_and_warm import serve, warm_up
from experiments.command_line import add_model, fill_in, new_parser, question, refused
from experiments.console import console, tracked
from experiments.engines import check_length, load, same_weights
from experiments.options import count
from experiments.outcome import asked, failed, publish, remove_results
from experiments.recall_documents import Document, Fact, filler_sentence, make_document, user_turn
from experiments.save_policies import GRID, INTERVALS, PARTS, POLICIES, Row
from experiments.stride_sweep_report import conclusion, draw, table
from experiments.trace_replay import trace_rows
from experiments.traces import (
    CLAUDE_FILE,
    DEFAULT_TRACES,
    MOONCAKE_FILE,
    Request,
    claude_sessions,
    mooncake_requests,
)

QUESTION = question(__doc__)
SMALL = {"documents": 2, "questions": 2, "sentences": 160, "sessions": 20, "requests": 1000}
FULL = {"documents": 4, "questions": 4, "sentences": 600, "sessions": 350, "requests": 20_000}
REMARKS = 20  # sentences before a question, about 140 tokens


# ---- the model


def document_prompts(
    llm: LLM, *, documents: int, questions: int, sentences: int
) -> list[list[int]]:
    """A first question on every document, then a second one on each, and so on."""
    assert llm.tokenizer is not None
    facts = max(questions, sentences // 8)
    texts = [make_document(i, num_facts=facts, num_sentences=sentences) for i in range(documents)]
    return [
        llm.tokenizer.encode(long_question(text, text.facts[q * facts // questions], seed=q))
        for q in range(questions)
        for text in texts
    ]


def long_question(document: Document, fact: Fact, *, seed: int) -> str:
    """The document, then what only this user says: longer than a step of the grid."""
    rng = random.Random(seed)
    remarks = " ".join(filler_sentence(rng) for _ in range(REMARKS))
    return user_turn(f"{document.text} {remarks} {fact.question}")


def reusable_tokens(prompts: Sequence[list[int]]) -> int:
    """Tokens in whole blocks, below the final token, that an earlier prompt began with."""
    total = 0
    seen: set[tuple[int, ...]] = set()
    for ids in prompts:
        prefixes = [tuple(ids[:end]) for end in range(GRID, len(ids) + 1, GRID)]
        last = (len(ids) - 1) // GRID
        total += GRID * sum(prefix in seen for prefix in prefixes[:last])
        seen.update(prefixes)
    return total


def engine_rows(
    cold: LLM, prompts: list[list[int]], max_tokens: int
) -> tuple[list[Row], list[str]]:
    """One row an interval: all questions, then all of them again. And what differs from cold."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    warm_up(cold, len(prompts[0]))
    expected = serve(cold, prompts, params, mode="serial", advance=_nothing)
    found: list[str] = []
    rows = [_cold_row(prompts, expected)]
    settings = [(every, end) for end in (True, False) for every in INTERVALS]
    for every, prompt_end in tracked(settings, PARTS["engine"]):
        config = _roomy(cold.config, prompts, every, prompt_end)
        llm = same_weights(cold, config, len(prompts[0]))
        saves = llm.stats().saves
        outputs = serve(llm, prompts * 2, params, mode="serial", advance=_nothing)
        found += _differences(every, expected * 2, outputs)
        checkpoints = llm.stats().saves - saves
        shape = llm.worker.model.state_shape
        assert shape is not None and not llm.stats().state_evictions
        row = Row("engine", every, prompt_end=prompt_end, branch=True)
        _fill(row, prompts * 2, checkpoints, checkpoints * shape.slot_bytes)
        row.reused_tokens = sum(output.num_cached_tokens for output in outputs)
        row.ttft_new_ms, row.ttft_repeat_ms = _ttft(
            outputs[: len(prompts)], outputs[len(prompts) :]
        )
        rows.append(row)
    return rows, found


def _cold_row(prompts: list[list[int]], outputs: list[RequestOutput]) -> Row:
    """The same questions without cache; a repeated one takes as long as a new one."""
    row = Row("cold", None, prompt_end=False, branch=False)
    _fill(row, prompts, 0, 0)
    row.ttft_new_ms, row.ttft_repeat_ms = _ttft(outputs, outputs)
    return row


def _fill(row: Row, prompts: list[list[int]], checkpoints: int, num_bytes: int) -> None:
    row.requests, row.prompt_tokens = len(prompts), sum(map(len, prompts))
    row.reusable_tokens = reusable_tokens(prompts)
    row.checkpoints, row.bytes = checkpoints, num_bytes


def _ttft(new: list[RequestOutput], repeated: list[RequestOutput]) -> tuple[float, float]:
    first, second = (median(float(o.ttft_ms or 0) for o in outputs) for outputs in (new, repeated))
    return first, second


def _roomy(
    cold: EngineConfig, prompts: list[list[int]], every: int, prompt_end: bool
) -> EngineConfig:
    """Pools in which nothing is evicted, the warm-up's blocks and states included."""
    blocks = sum(len(ids) // GRID + 2 for ids in prompts) + 64
    return replace(
        cold,
        enable_prefix_caching=True,
        checkpoint_every=every,
        placement=f"every({every})+branch" + "+prompt_end" * prompt_end,
        num_slots=blocks,
        num_blocks=2 * blocks,
    )


def _differences(
    every: int, expected: list[RequestOutput], outputs: list[RequestOutput]
) -> list[str]:
    return [
        f"checkpoint_every {every}, request {i}: tokens {out.token_ids}, cold {reference.token_ids}"
        for i, (reference, out) in enumerate(zip(expected, outputs, strict=True), start=1)
        if reference.token_ids != out.token_ids
    ]


def _nothing() -> None:
    return None


# ---- command line


def read_traces(options: argparse.Namespace) -> tuple[dict[str, list[Request]], dict[str, str]]:
    """Requests by part, and for each part that can't run the reason."""
    files = {"claude": CLAUDE_FILE, "mooncake": MOONCAKE_FILE}
    not_run = {
        part: f"Not run: the {PARTS[part]} trace. The folder of --traces has no {name}."
        for part, name in files.items()
        if not (options.traces / name).is_file()
    }
    traces: dict[str, list[Request]] = {}
    if "claude" not in not_run:
        traces["claude"] = claude_sessions(options.traces, sessions=options.sessions)
    if "mooncake" not in not_run:
        traces["mooncake"] = mooncake_requests(options.traces, requests=options.requests)
    return traces, not_run


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Options. Bad ones exit with status 2."""
    parser = new_parser("stride_sweep", __doc__)
    add_model(parser)
    parser.add_argument("--documents", type=count, help="for the model")
    parser.add_argument("--questions", type=count, help="on each document")
    parser.add_argument("--sentences", type=count, help="of each document, about 7.5 tokens each")
    parser.add_argument("--max-tokens", type=count, default=8, help="new tokens of each answer")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES, help="folder of the traces")
    parser.add_argument("--sessions", type=count, help="of the coding-agent trace")
    parser.add_argument("--requests", type=count, help="of the chat trace")
    options = parser.parse_args(argv)
    fill_in(options, SMALL, FULL)
    return options


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    try:
        traces, not_run = read_traces(options)
        cold = load(options.model, EngineConfig(enable_prefix_caching=False, max_num_seqs=1))
        sizes = {name: getattr(options, name) for name in ("documents", "questions", "sentences")}
        prompts = document_prompts(cold, **sizes)
        check_length(cold, max(map(len, prompts)))
    except (ValueError, OSError) as error:
        return refused("stride_sweep", error)
    remove_results(options.json)
    for reason in not_run.values():
        console().print(reason)
    rows, found = engine_rows(cold, prompts, options.max_tokens)
    if found:
        return failed(found)
    for part, requests in traces.items():
        rows += trace_rows(part, requests, POLICIES)
    written = [row.as_dict() for row in rows]
    results: dict[str, Any] = {
        "question": QUESTION,
        "conclusion": conclusion(written),
        "rows": written,
        "not_run": not_run,
        "options": asked(options),
    }
    console().print(table(written))
    return publish(options.json, results, [], draw)


if __name__ == "__main__":
    sys.exit(main())
