"""How far apart should checkpoints be? Sweeps `checkpoint_every` on a model and on real traces.

The built-in model answers questions about documents and every question again: its tokens must be
those of an engine without cache. Then two traces are replayed without a model, in unlimited memory,
with and without the state at the end of each prompt. The replay drives the LINEAR leaf itself
(`LinearStateBlockManager`) with the trace's prefix ids in place of hashes; the K/V leaf is a set of
ids, because with unlimited memory only that matters. The engine always saves at a prompt's end, so
its own rows are with that state only.

    python -m experiments.stride_sweep --traces DIR
    python -m experiments.stride_sweep --small

Exit status: 0, 1 if an answer differs from that without cache, 2 for a refused option.
"""

import argparse
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cache.cached_sequence import CachedSequence
from cache.hashing import HashDomain
from cache.linear_state_block_manager import LinearStateBlockManager
from engine import LLM, EngineConfig, RequestOutput, SamplingParams
from engine.builtin import BUILTIN_MODEL_DIR
from experiments.cold_and_warm import serve, warm_up
from experiments.options import count, results_file, thread_count
from experiments.plots import COLD, FIRST, WARM, new_figure, save_figure
from experiments.recall_documents import Document, Fact, filler_sentence, make_document, user_turn
from experiments.results_io import RESULTS, write_json
from experiments.traces import (
    CLAUDE_FILE,
    DEFAULT_TRACES,
    MOONCAKE_FILE,
    Request,
    claude_sessions,
    mooncake_requests,
)

QUESTION = "How far apart should checkpoints be?"
GRID = 64  # chunk_stride and block_size
INTERVALS = tuple(GRID << i for i in range(8))  # 64 to 8192
REMARKS = 20  # sentences before a question, about 140 tokens
ENOUGH = 0.95  # of the reusable tokens
NEVER = 1 << 40  # an interval that no prompt reaches
CHECKPOINT_BYTES_9B = 51_500_000  # of Qwen3.5-9B
PARTS = {"engine": "built-in model", "claude": "coding agent", "mooncake": "chat"}


@dataclass(frozen=True)
class Policy:
    """Where states are saved: every `every` tokens (None: never), at prompt ends, at branches."""

    every: int | None
    prompt_end: bool
    branch: bool = True


POLICIES = (
    *(Policy(every, end) for end in (True, False) for every in INTERVALS),
    Policy(None, True),
    Policy(512, False, branch=False),
)


@dataclass
class Row:
    """One policy on one workload. reusable_tokens: what an infinite cache of blocks would reuse."""

    part: str
    every: int | None
    prompt_end: bool
    branch: bool
    requests: int = 0
    prompt_tokens: int = 0
    reusable_tokens: int = 0
    reused_tokens: int = 0
    checkpoints: int = 0
    bytes: int = 0
    ttft_new_ms: float | None = None
    ttft_repeat_ms: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "hit_rate": self.reused_tokens / self.prompt_tokens,
            "share_of_reusable": self.reused_tokens / max(1, self.reusable_tokens),
            "checkpoints_per_request": self.checkpoints / self.requests,
        }


# ---- traces: the cache alone


class ChosenLeaf(LinearStateBlockManager):
    """The LINEAR leaf of the engine, with room for everything; can leave out the prompt's end."""

    def __init__(self, policy: Policy, num_blocks: int) -> None:
        super().__init__(
            num_blocks + 3,  # padding, a live slot and one to rotate to
            HashDomain("linear", GRID),
            checkpoint_every=policy.every or NEVER,
            max_num_seqs=1,
        )
        self._policy = policy

    def _is_save_point(self, seq: CachedSequence, boundary: int) -> bool:
        if self._policy.prompt_end:
            return super()._is_save_point(seq, boundary)
        return boundary % self.checkpoint_every == 0 or boundary == seq.branch_boundary


@dataclass(frozen=True)
class Prompt:
    """A request of a trace: ids of its whole blocks, and how far earlier K/V serves it."""

    num_tokens: int
    ids: list[int]
    reach: int


def prompts_of(requests: Iterable[Request]) -> tuple[list[Prompt], int]:
    """Prompts in order, and the number of different blocks. A prompt's K/V is there at once."""
    known: set[int] = set()
    prompts = []
    for request in requests:
        ids = request.block_ids(GRID)
        blocks = next((i for i, id_ in enumerate(ids) if id_ not in known), len(ids))
        last = max(0, request.input_tokens - 1) // GRID
        prompts.append(Prompt(request.input_tokens, ids, min(blocks, last) * GRID))
        known.update(ids)
    return prompts, len(known)


def replay(prompts: Iterable[Prompt], num_blocks: int, policy: Policy) -> tuple[int, int]:
    """(tokens reused, checkpoints saved): each prompt probes, resumes, saves and leaves."""
    leaf = ChosenLeaf(policy, num_blocks)
    reused = 0
    for each in prompts:
        seq = CachedSequence(())
        seq.num_prompt_tokens = each.num_tokens
        seq.linear_state_hashes = each.ids  # type: ignore[assignment]  # ids are prefix hashes too
        boundary = _deepest(leaf, each)
        if boundary:
            reused += boundary
            seq.num_computed_tokens = boundary
            leaf.set_source(seq, leaf.mount(seq, boundary))
        if policy.branch:
            seq.branch_boundary = each.reach
        assert leaf.allocate_for_sequence(seq), "memory is unlimited"
        leaf.plan_snapshots(seq, seq.num_computed_tokens, each.num_tokens)
        seq.num_computed_tokens = each.num_tokens
        leaf.commit(seq)
        leaf.release(seq)
    assert not leaf.saves_skipped["no_slot"], "memory is unlimited"
    return reused, leaf.num_saves


def _deepest(leaf: LinearStateBlockManager, prompt: Prompt) -> int:
    """The deepest boundary within reach that has a state, or 0: what the composite resumes from.

    Looked for from above: `match` lists them all, and long prompts find theirs near the end.
    """
    boundaries = range(prompt.reach, 0, -GRID)
    found = (b for b in boundaries if leaf.cache.contains(prompt.ids[b // GRID - 1]))
    return next(found, 0)


def trace_rows(part: str, requests: Sequence[Request], policies: Sequence[Policy]) -> list[Row]:
    """One row a policy. Sessions share no ids, so that each can be replayed by itself."""
    rows = [Row(part, p.every, p.prompt_end, p.branch) for p in policies]
    ordered = sorted(requests, key=lambda request: request.session)  # stable: still by time
    sessions = [list(group) for _, group in groupby(ordered, key=lambda request: request.session)]
    for session in track(sessions, f"{PARTS[part]} sessions", console=Console(stderr=True)):
        prompts, num_blocks = prompts_of(session)
        for row, policy in zip(rows, policies, strict=True):
            reused, saved = replay(prompts, num_blocks, policy)
            row.requests += len(prompts)
            row.prompt_tokens += sum(p.num_tokens for p in prompts)
            row.reusable_tokens += sum(p.reach for p in prompts)
            row.reused_tokens += reused
            row.checkpoints += saved
            row.bytes += saved * CHECKPOINT_BYTES_9B
    return rows


# ---- the built-in model


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


def engine_rows(options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """One row an interval: all questions, then all of them again. And what differs from cold."""
    cold = LLM(BUILTIN_MODEL_DIR, enable_prefix_caching=False, max_num_seqs=1)
    prompts = document_prompts(
        cold,
        documents=options.documents,
        questions=options.questions,
        sentences=options.sentences,
    )
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    warm_up(cold, len(prompts[0]))
    expected = serve(cold, prompts, params, mode="serial", advance=_nothing)
    failed: list[str] = []
    rows = [_cold_row(prompts, expected)]
    for every in track(INTERVALS, PARTS["engine"], console=Console(stderr=True)):
        llm = LLM.from_model(cold.worker.model, _roomy(prompts, every), cold.tokenizer)
        warm_up(llm, len(prompts[0]))
        saves = llm.stats().saves
        outputs = serve(llm, prompts * 2, params, mode="serial", advance=_nothing)
        failed += _differences(every, expected * 2, outputs)
        checkpoints = llm.stats().saves - saves
        shape = llm.worker.model.state_shape
        assert shape is not None and not llm.stats().state_evictions
        row = Row("engine", every, prompt_end=True, branch=True)
        _fill(row, prompts * 2, checkpoints, checkpoints * shape.slot_bytes)
        row.reused_tokens = sum(output.num_cached_tokens for output in outputs)
        row.ttft_new_ms, row.ttft_repeat_ms = _ttft(
            outputs[: len(prompts)], outputs[len(prompts) :]
        )
        rows.append(row)
    return rows, failed


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


def _roomy(prompts: list[list[int]], every: int) -> EngineConfig:
    """Pools in which nothing is evicted, the warm-up's blocks and states included."""
    blocks = sum(len(ids) // GRID + 2 for ids in prompts) + 64
    return EngineConfig(
        checkpoint_every=every, max_num_seqs=1, num_slots=blocks, num_blocks=2 * blocks
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


# ---- report


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line a policy and workload."""
    out = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=_LEGEND, caption_justify="left")
    for header in _HEADERS:
        out.add_column(header, justify="left" if header == "workload" else "right", no_wrap=True)
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
MB: of the built-in model for its rows, at 51.5 MB a checkpoint (Qwen3.5-9B) for traces.
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
    ("claude", True): (WARM, "D-"),
    ("claude", False): (WARM, "o:"),
    ("mooncake", True): (FIRST, "D-"),
    ("mooncake", False): (FIRST, "o:"),
}


def draw(results: dict[str, Any], path: Path) -> None:
    """Share of the reusable tokens that is reused, by checkpoints a request."""
    figure, axes = new_figure(QUESTION, "beside the points: tokens between checkpoints")
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


# ---- command line


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False, markup=False)
    try:
        traces, not_run = read_traces(options)
    except (ValueError, OSError) as error:
        print(f"stride_sweep: error: {error}", file=sys.stderr)
        return 2
    for reason in not_run.values():
        console.print(reason)
    rows, failed = engine_rows(options)
    if failed:
        print("\n".join(["FAILED", *failed]), file=sys.stderr)
        return 1
    for part, requests in traces.items():
        rows += trace_rows(part, requests, POLICIES)
    results = {
        "question": QUESTION,
        "conclusion": "",
        "rows": [row.as_dict() for row in rows],
        "not_run": not_run,
        "options": {k: v for k, v in vars(options).items() if k not in ("json", "traces")},
    }
    results["conclusion"] = conclusion(results["rows"])
    console.print(table(results["rows"]))
    write_json(options.json, results)
    draw(results, options.json.with_suffix(".png"))
    console.print(results["conclusion"])
    return 0


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


_SMALL = {"documents": 2, "questions": 2, "sentences": 160, "sessions": 20, "requests": 1000}
_FULL = {"documents": 4, "questions": 4, "sentences": 600, "sessions": 350, "requests": 20_000}


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Options; sizes that are not given are those of --small or of the full run."""
    parser = argparse.ArgumentParser(prog="stride_sweep", description=QUESTION, allow_abbrev=False)
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES, help="folder of the traces")
    parser.add_argument("--sessions", type=count, help="of the coding-agent trace")
    parser.add_argument("--requests", type=count, help="of the chat trace")
    parser.add_argument("--documents", type=count, help="for the built-in model")
    parser.add_argument("--questions", type=count, help="on each document")
    parser.add_argument("--sentences", type=count, help="of each document, about 7.5 tokens each")
    parser.add_argument("--max-tokens", type=count, default=8, help="new tokens of each answer")
    parser.add_argument("--threads", type=thread_count, default=1, help="of torch")
    parser.add_argument("--small", action="store_true", help="under a minute")
    parser.add_argument("--json", type=results_file, default=RESULTS / "stride_sweep.json")
    options = parser.parse_args(argv)
    for name, size in (_SMALL if options.small else _FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    return options


if __name__ == "__main__":
    sys.exit(main())
