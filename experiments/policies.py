"""Which states should be kept when slots run out?

Replays real traces through the engine's own block managers under every placement and eviction
policy: K/V unlimited, slots limited; then with K/V and states in so many bytes, split once for all
or shared (there the grid is 512 tokens). Measured is prefill work over that of a cache that keeps
the state of every grid boundary. The sessions of the coding agents start uniformly over 24 hours;
with --seeds N they are drawn N times, the last N - 1 for a few policies only. The grid is the
traces' own: 64 tokens for coding agents, 512 for chat.

    python -m experiments.policies --traces DIR
    python -m experiments.policies --small

Exit status: 0, or 2 for a refused option.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cache.eviction import EvictionPolicy
from cache.placement import USUAL, parse_placement
from cache.policy_names import parse_policy
from experiments.belady import Belady, uses_by_key
from experiments.command_line import fill_in, new_parser, question, refused
from experiments.console import console, tracked
from experiments.options import count
from experiments.outcome import asked, publish, remove_results
from experiments.policies_budget import (
    BUDGETS_GB,
    GRID,
    KV_SHARES,
    PLACEMENT,
    POLICY,
    kv_share_at_end,
    mark_best,
    outcome,
    shared_memory,
    split_memory,
)
from experiments.policies_model import CHECKPOINT_BYTES, Outcome, Prompt, managers, prompts_of
from experiments.policies_model import replay as replay_prompts
from experiments.policies_report import budget_table, conclusion, draw, table
from experiments.traces import (
    CLAUDE_BLOCK,
    CLAUDE_FILE,
    DEFAULT_TRACES,
    MOONCAKE_BLOCK,
    MOONCAKE_FILE,
    claude_sessions,
    mooncake_requests,
)

QUESTION = question(__doc__)
SMALL = {"sessions": 40, "requests": 1500, "seeds": 2}
FULL = {"sessions": 350, "requests": 20_000, "seeds": 5}
SLOTS = (32, 64, 128, 256)
PLACEMENTS = ("prompt_end+branch", USUAL)
DENSE = "every(512)"
POLICIES = ("lru", "lru_cap_per_path(2)", "flop_aware(0.1)", "flop_aware(0.2)", "value", "belady")
FURTHER_DRAWS = [(slots, name) for slots in (64, 128) for name in ("lru_cap_per_path(2)", "value")]


@dataclass(frozen=True)
class Trace:
    """seed: of the sessions' starts; 0 where a trace says itself when it began."""

    name: str
    grid: int
    prompts: list[Prompt]
    coarse: list[Prompt]  # in blocks of policies_budget.GRID
    seed: int = 0


def read_traces(options: argparse.Namespace) -> list[Trace]:
    """Both traces; OSError or ValueError if one is missing or no trace."""
    folder = options.traces
    for name in (CLAUDE_FILE, MOONCAKE_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: make traces TRACES=DIR copies it there")
    agents = claude_sessions(folder, sessions=options.sessions)
    chat = mooncake_requests(folder, requests=options.requests)
    return [
        Trace(name, block, prompts_of(requests, block), prompts_of(requests, GRID))
        for name, block, requests in (
            ("claude", CLAUDE_BLOCK, agents),
            ("mooncake", MOONCAKE_BLOCK, chat),
        )
    ]


def replay(
    trace: Trace, placement: str, policy: EvictionPolicy | None, slots: int | None
) -> tuple[Outcome, list[int]]:
    """What came out, and where each prompt resumed."""
    resumed: list[int] = []
    parts = parse_placement(placement, trace.grid)
    manager = managers(grid=trace.grid, slots=slots, placement=parts, policy=policy)
    return replay_prompts(trace.prompts, manager, resumed.append), resumed


def rows_of(trace: Trace, placement: str) -> list[dict[str, Any]]:
    """Unlimited slots first, then every policy with every number of them."""
    unlimited, resumed = replay(trace, placement, None, None)
    rows = [as_row(trace, placement, "unlimited", None, unlimited)]
    if placement == DENSE:
        return rows
    keys = [prompt.keys for prompt in trace.prompts]
    uses = uses_by_key(keys, resumed, trace.grid)  # type: ignore[arg-type]  # numbers serve as keys
    for slots in SLOTS:
        for name in POLICIES:
            policy = Belady(uses) if name == "belady" else parse_policy(name)
            found = replay(trace, placement, policy, slots)[0]
            rows.append(as_row(trace, placement, name, slots, found))
    return rows


def rows_of_draw(options: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """The coding agents with other starts: a few policies with the engine's placement."""
    agents = claude_sessions(options.traces, sessions=options.sessions, seed=seed)
    trace = Trace("claude", CLAUDE_BLOCK, prompts_of(agents, CLAUDE_BLOCK), [], seed)
    return [
        as_row(trace, USUAL, name, slots, replay(trace, USUAL, parse_policy(name), slots)[0])
        for slots, name in FURTHER_DRAWS
    ]


def budget_rows(trace: Trace, budget_gb: int) -> list[dict[str, Any]]:
    """Every split into which the longest prompt fits, then one budget for both."""
    rows = []
    for share in (*KV_SHARES, None):
        manager = shared_memory(budget_gb) if share is None else split_memory(budget_gb, share)
        found = outcome(trace.coarse, manager)
        if found is None:
            continue
        row = as_row(trace, PLACEMENT, POLICY, None, found)
        row |= {"budget_gb": budget_gb, "bytes": budget_gb * 10**9}
        row |= {"memory": "shared" if share is None else "split"}
        rows.append(row | {"kv_share": kv_share_at_end(manager) if share is None else share})
    return rows


# ---- two at once

_traces: list[Trace] = []  # of a worker process, which has them from its parent


def _take(traces: list[Trace]) -> None:
    _traces[:] = traces


def _of(rows: Callable[..., list[dict[str, Any]]], index: int, what: Any) -> list[dict[str, Any]]:
    return rows(_traces[index], what)


def all_rows(traces: list[Trace], options: argparse.Namespace) -> list[dict[str, Any]]:
    """In the order of their steps, however long each takes; the best splits are marked."""
    numbers = range(len(traces))
    steps: list[Callable[[], list[dict[str, Any]]]] = [
        *(partial(_of, rows_of, i, name) for i in numbers for name in (*PLACEMENTS, DENSE)),
        *(partial(_of, budget_rows, i, gb) for i in numbers for gb in BUDGETS_GB),
        *(partial(rows_of_draw, options, seed) for seed in range(1, options.seeds)),
    ]
    forked = get_context("fork")  # hands the traces over as they are
    with ProcessPoolExecutor(2, forked, _take, (traces,)) as pool:
        running = [pool.submit(step) for step in steps]
        found = [each.result() for each in tracked(running, "replays")]
    rows = [row for each in found for row in each]
    mark_best(rows)
    return rows


# ---- rows


def as_row(
    trace: Trace, placement: str, policy: str, slots: int | None, found: Outcome
) -> dict[str, Any]:
    """work: over the least that is possible. bytes: of all slots, or of all states ever saved.

    budget_gb: for K/V and states together; None: K/V is unlimited.
    """
    return {
        "trace": trace.name,
        "seed": trace.seed,
        "placement": placement,
        "policy": policy,
        "slots": slots,
        "budget_gb": None,
        "memory": "split",
        "work": found.work / found.least_work,
        "token_hit_rate": found.reused_tokens / found.tokens,
        "bytes": (found.checkpoints if slots is None else slots) * CHECKPOINT_BYTES,
        "checkpoints_per_request": found.checkpoints / len(trace.prompts or trace.coarse),
        "evictions": found.state_evictions,
    }


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options. Bad ones exit with status 2."""
    parser = new_parser("policies", __doc__)
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES, help="folder of the traces")
    parser.add_argument("--sessions", type=count, help="of the coding-agent trace")
    parser.add_argument("--requests", type=count, help="of the chat trace")
    parser.add_argument("--seeds", type=count, help="draws of the sessions' starts")
    options = parser.parse_args(argv)
    fill_in(options, SMALL, FULL)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parse_options(argv)
    try:
        traces = read_traces(options)
    except (ValueError, OSError) as error:
        return refused("policies", error)
    remove_results(options.json)
    rows = all_rows(traces, options)
    console().print(table(rows))
    console().print(budget_table(rows))
    results = {
        "question": QUESTION,
        "conclusion": conclusion(rows),
        "rows": rows,
        "options": asked(options),
    }
    return publish(options.json, results, [], draw)


if __name__ == "__main__":
    sys.exit(main())
