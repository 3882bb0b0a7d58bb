"""Does the server stay right and small under long traffic and mischief?

Some two dozen clients ask a server with small pools about documents and conversations, in streams
or at once, with salts, stops, several choices, sampled or not exact; they close streams, hang up in
the middle of a request and send what is refused. Exact greedy answers are compared with those of a
server without caching, asked before. Memory and the books of the pools are read all along.

    python -m experiments.soak --minutes 15

Exit status: 0, 1 if an answer, a status, a book or the growth of memory is wrong, 2 for a refused
option.
"""

import argparse
import asyncio
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from engine.builtin import BUILTIN_MODEL_DIR
from engine.tokenizer import Tokenizer
from experiments.command_line import new_parser, question
from experiments.console import console
from experiments.options import count
from experiments.outcome import asked, publish, remove_results
from experiments.plots import LINE, WARM, new_figure, save_figure
from experiments.regression_options import positive
from experiments.regression_server import ServerProcess, eventually, held
from experiments.regression_soak import Soak, make_catalog, reference_answers

QUESTION = question(__doc__)
POOLS = (
    "--num-slots", "24", "--num-blocks", "96", "--max-num-seqs", "8", "--checkpoint-every", "128",
    "--max-queued-requests", "30",
)  # fmt: skip
WATCHED = (
    "queries", "hits", "preemptions", "state_evictions", "slots_checkpoint", "blocks_cached",
)  # fmt: skip
REPORTED = ("queries", "hits", "tokens_reused", "misses", "saves_skipped", "preemptions")
MOST_GROWTH = 1.0  # MiB a minute in the second half
SHORTEST_HALF = 5.0  # minutes; before, caches of the libraries still fill
SAMPLES = 20  # at least
LONGEST_GAP = 30.0  # seconds between two samples


async def soak(server: ServerProcess, run: Soak, minutes: float, clients: int) -> list[dict]:
    """Let the clients loose for a time; samples of memory and pools."""
    deadline = asyncio.get_running_loop().time() + 60 * minutes
    gap = min(LONGEST_GAP, 60 * minutes / SAMPLES)
    samples: list[dict] = []

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        while (now := loop.time()) < deadline:
            stats = await asyncio.to_thread(server.stats)
            samples.append(sample((now - start) / 60, server.rss_mib(), stats))
            run.failures += unbalanced(stats)
            await asyncio.sleep(gap)

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        for client in range(clients):
            group.create_task(run.client(client, deadline))
    return samples


def sample(minutes: float, rss_mib: float, stats: dict[str, Any]) -> dict[str, float]:
    """What is kept of one look at the server."""
    return {"minutes": minutes, "rss_mib": rss_mib, **{name: stats[name] for name in WATCHED}}


def unbalanced(stats: dict[str, Any]) -> list[str]:
    """Pools whose parts are not the whole."""
    found = []
    for pool, parts in (("slots", "free live checkpoint"), ("blocks", "free in_use cached")):
        counted = {part: stats[f"{pool}_{part}"] for part in parts.split()}
        total = stats[f"{pool}_total"]
        if sum(counted.values()) != total or min(counted.values()) < 0:
            found.append(f"{pool}: {counted} are not {total}")
    return found


def growth(samples: list[dict]) -> dict[str, float | None]:
    """Of the second half: MiB a minute by least squares, and the largest less the smallest."""
    half = [s for s in samples if s["minutes"] >= samples[-1]["minutes"] / 2]
    times, sizes = ([s[name] for s in half] for name in ("minutes", "rss_mib"))
    middle, mean = sum(times) / len(times), sum(sizes) / len(sizes)
    spread = sum((t - middle) ** 2 for t in times)
    moved = sum((t - middle) * (size - mean) for t, size in zip(times, sizes, strict=True))
    slope = moved / spread if spread else None
    minutes = times[-1] - times[0]
    return {"minutes": minutes, "mib_per_minute": slope, "range_mib": max(sizes) - min(sizes)}


def too_much(grown: dict[str, float | None]) -> list[str]:
    """A growth of memory that goes on."""
    slope, minutes = grown["mib_per_minute"], grown["minutes"]
    if slope is None or minutes is None or minutes < SHORTEST_HALF or slope <= MOST_GROWTH:
        return []
    return [f"memory grows by {slope:.2f} MiB a minute; at most {MOST_GROWTH} is allowed"]


def conclusion(counts: Counter[str], grown: dict[str, float | None], minutes: float) -> str:
    """One sentence; only for a run without failures."""
    slope = grown["mib_per_minute"] or 0.0
    judged = "" if (grown["minutes"] or 0.0) >= SHORTEST_HALF else " (too short a time to judge)"
    gone = counts["closed"] + counts["hung up"]
    return (
        f"Yes: in {minutes:.2g} minutes {counts['answered']} requests were answered, "
        f"{counts['compared']} of them compared and equal, {gone} given up by their client and "
        f"{counts['refused']} refused; nothing is held at the end, and in the second half memory "
        f"moved by {slope:.2f} MiB a minute, within {grown['range_mib']:.1f} MiB{judged}."
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """Resident memory over time, from the results file alone."""
    samples = results["samples"]
    figure, axes = new_figure(results["question"], "resident memory of the server")
    axes.plot([s["minutes"] for s in samples], [s["rss_mib"] for s in samples], color=WARM)
    axes.axvline(samples[-1]["minutes"] / 2, color=LINE)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes")
    axes.set_ylabel("MiB")
    save_figure(figure, path)


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Options. Bad ones exit with status 2."""
    parser = new_parser("soak", __doc__, small=None)
    parser.add_argument("--minutes", type=positive, default=15.0, help="of traffic (%(default)s)")
    parser.add_argument("--clients", type=count, default=24, help="at once (%(default)s)")
    parser.add_argument("--prompts", type=count, default=80, help="to choose from (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (%(default)s)")
    parser.add_argument("--overlap", action="store_true", help="let the server's steps overlap")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parse_options(argv)
    tokenizer = Tokenizer.from_directory(BUILTIN_MODEL_DIR)
    assert tokenizer is not None
    catalog = make_catalog(tokenizer, random.Random(f"catalog {options.seed}"), options.prompts)
    remove_results(options.json)
    references, failures = reference_answers(catalog, options.threads)
    run = Soak(catalog, references, options.seed)
    overlap = ("--overlap",) if options.overlap else ()
    with ServerProcess(*POOLS, *overlap, threads=options.threads) as server:
        run.url, run.model = server.url, server.model
        samples = asyncio.run(soak(server, run, options.minutes, options.clients))
        eventually(lambda: not held(server.stats()))
        last = server.stats()
        failures += run.failures + unbalanced(last)
        failures += [f"{name} is {value} at the end" for name, value in held(last).items()]
        if "warmstate_engine_faults_total 0.0" not in server.get("/metrics"):
            failures.append("a step of the engine raised")
        failures += server.stop()
    grown = growth(samples)
    failures += too_much(grown)
    console().print(", ".join(f"{n} {what}" for what, n in sorted(run.counts.items())))
    results = {
        "question": QUESTION,
        "conclusion": None if failures else conclusion(run.counts, grown, options.minutes),
        "counts": dict(run.counts),
        "growth": grown,
        "samples": samples,
        "server": {name: last[name] for name in REPORTED},
        "options": asked(options),
        "passed": not failures,
        "failures": failures,
    }
    return publish(options.json, results, failures, draw)


if __name__ == "__main__":
    sys.exit(main())
