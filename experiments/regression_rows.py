"""What do the numbers of a pass say? Percentiles, sums, and ratios to caching off."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.regression_clients import Phase
from experiments.regression_guidellm import Guided
from experiments.regression_workloads import Workload

Row = dict[str, Any]
OFF = "off"  # the server that everything is compared with
GUIDELLM, OPENAI = "GuideLLM", "openai"  # who asks


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that at least `percent` of 100 values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def phase_row(
    workload: Workload,
    phase: Phase,
    expected: Mapping[str, int],
    differing: Iterable[str],
    **labels: Any,
) -> Row:
    """One pass of our clients. Times and tokens are those of the timed requests."""
    timed = [phase.answers[request.name] for request in workload.timed]
    return {
        **labels,
        "workload": workload.name,
        "client": OPENAI,
        "requests": len(timed),
        "seconds": phase.seconds,
        "ttft_p50_ms": percentile((answer.ttft_ms for answer in timed), 50),
        "ttft_p95_ms": percentile((answer.ttft_ms for answer in timed), 95),
        "new_tokens_per_s": sum(len(answer.tokens) for answer in timed) / phase.seconds,
        "prompt_tokens": sum(answer.prompt_tokens for answer in timed),
        "cached_tokens": sum(answer.cached_tokens for answer in timed),
        "expected_cached_tokens": sum(expected[request.name] for request in workload.timed),
        "outputs": len(phase.answers),
        "outputs_that_differ": len(list(differing)),
    }


def guided_row(workload: Workload, guided: Guided, **labels: Any) -> Row:
    """One pass of GuideLLM's clients; it keeps no answers to compare."""
    return {
        **labels,
        "workload": workload.name,
        "client": GUIDELLM,
        "requests": len(guided.cached_tokens),
        "ttft_p50_ms": guided.ttft_p50_ms,
        "ttft_p95_ms": guided.ttft_p95_ms,
        "new_tokens_per_s": guided.new_tokens_per_s,
        "cached_tokens": sum(guided.cached_tokens),
    }


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Each row with how many times sooner, and faster, it is than the same pass with caching off.

    None where that pass is not among the rows.
    """
    off = {_pass(row): row for row in rows if row["server"] == OFF}
    out = []
    for row in rows:
        cold = off.get(_pass(row))
        ratios: Row = dict.fromkeys(("ttft_p50_ratio", "ttft_p95_ratio", "new_tokens_ratio"))
        if cold is not None:
            ratios = {
                "ttft_p50_ratio": cold["ttft_p50_ms"] / row["ttft_p50_ms"],
                "ttft_p95_ratio": cold["ttft_p95_ms"] / row["ttft_p95_ms"],
                "new_tokens_ratio": row["new_tokens_per_s"] / cold["new_tokens_per_s"],
            }
        out.append(row | ratios)
    return out


def _pass(row: Row) -> tuple[str, ...]:
    return row["client"], row["mode"], row["workload"]


def turn_rows(
    workload: Workload,
    phase: Phase,
    expected: Mapping[str, int],
    differing: Iterable[str],
    **labels: Any,
) -> list[Row]:
    """What each turn of the conversations cost, over the conversations; turn 1 is the priming.

    expected_boundary: where an exact request must resume without idle prefill.
    """
    differs = set(differing)
    rows = []
    for turn in range(max(map(len, workload.lanes))):
        names = [lane[turn].name for lane in workload.lanes]
        answers = [phase.answers[name] for name in names]
        recomputed = [answer.prompt_tokens - answer.cached_tokens for answer in answers]
        rows.append(
            {
                **labels,
                "turn": turn + 2,
                "conversations": len(answers),
                "prompt_tokens": _mean(answer.prompt_tokens for answer in answers),
                "boundary": _mean(answer.boundary for answer in answers),
                "expected_boundary": _mean(expected[name] for name in names),
                "recomputed_tokens": _mean(recomputed),
                "ttft_p50_ms": percentile((answer.ttft_ms for answer in answers), 50),
                "limit_reasons": dict(
                    Counter(answer.limit_reason for answer in answers if answer.limit_reason)
                ),
                "outputs_that_differ": len(differs.intersection(names)),
            }
        )
    return rows


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
