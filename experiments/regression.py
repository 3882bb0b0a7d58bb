"""Does a prefix-cache hit reach the client, and without a changed token?

Starts the server itself: once with caching off, once with each way to restore, and with overlapping
steps and drafts, alone and together. OpenAI's own package
asks over HTTP, by one client and then by many, in streams. The answers that one client gets without
caching are the reference: every other exact answer must have their tokens. One by one, each request
must resume where the placement rules say; a conversation whose answers were prefilled in idle time
may resume later. GuideLLM, where it is installed, asks about the same document. At the end of each
server nothing may be held, and its counters must be what the clients counted.

    python -m experiments.regression
    python -m experiments.regression --small

Exit status: 0, 1 if an answer, a boundary or a counter is wrong, 2 for a refused option.
"""

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

from openai import OpenAIError

from engine.builtin import BUILTIN_MODEL_DIR
from engine.tokenizer import Tokenizer
from experiments.command_line import new_parser, question
from experiments.console import console
from experiments.options import count
from experiments.outcome import asked, publish, remove_results
from experiments.regression_checks import (
    book_errors,
    differences,
    expected_boundaries,
    prompts_of,
    wrong_boundaries,
)
from experiments.regression_clients import Phase, run_phase
from experiments.regression_guidellm import GuideFailed, installed, run_guidellm
from experiments.regression_options import positive
from experiments.regression_report import (
    CONCURRENT,
    SERIAL,
    conclusion,
    draw,
    in_order,
    table,
    turn_table,
)
from experiments.regression_rows import OFF, Row, guided_row, phase_row, turn_rows, with_ratios
from experiments.regression_server import ServerProcess
from experiments.regression_workloads import SHARED, TALKS, Sizes, Workload, make_workloads

QUESTION = question(__doc__)
SMALL = Sizes(
    document_tokens=512, questions=16, talks=8, turns=3, heads=2, tails=6, tail_tokens=128,
    own_documents=8,
)  # fmt: skip
FULL = Sizes(
    document_tokens=2048, questions=48, talks=16, turns=5, heads=4, tails=10, tail_tokens=256,
    own_documents=24,
)  # fmt: skip
SCALED = ("questions", "talks", "tails", "own_documents")
# Without caching nothing that idle time computes could be kept.
DRAFTS = ("--num-speculative-tokens", "1")
SERVERS = {
    OFF: ("--no-enable-prefix-caching", "--no-idle-prefill"),
    "copy": ("--restore", "copy"),
    "redirect": ("--restore", "redirect"),
    "overlap": ("--overlap",),
    "drafts": DRAFTS,
    "drafts, overlap": (*DRAFTS, "--overlap"),
}
GUIDED = (OFF, "copy", "redirect")
GUIDED_IF_SMALL = (OFF, "redirect")  # GuideLLM takes its time to start
MOST_TOLD = 5  # failures of one pass
IDLE_OFF = ("--restore", "redirect", "--no-idle-prefill")


@dataclass
class Run:
    """What has been found so far. references: by workload."""

    options: argparse.Namespace
    tokenizer: Tokenizer
    workloads: list[Workload]
    guidellm: bool
    references: dict[str, Phase] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    turns: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def talks(self) -> Workload:
        [talks] = [workload for workload in self.workloads if workload.name == TALKS]
        return talks

    def blame(self, where: str, found: list[str]) -> None:
        """Note failures with the place where they were seen, the first ones in full."""
        self.failures += [f"{where}: {each}" for each in found[:MOST_TOLD]]
        if len(found) > MOST_TOLD:
            self.failures.append(f"{where}: and {len(found) - MOST_TOLD} more")


class OneServer:
    """All that is asked of one server while it runs."""

    def __init__(self, run: Run, name: str, server: ServerProcess) -> None:
        self.run, self.name, self.server = run, name, server
        self.cached_tokens: list[int] = []  # of every answer it gave

    def ask(self, workload: Workload, salt: str, **how: Any) -> Phase:
        """One pass of a workload on an empty namespace."""
        server = self.server
        phase = asyncio.run(
            run_phase(server.url, server.model, workload, salt=f"{self.name} {salt}", **how)
        )
        self.cached_tokens += [answer.cached_tokens for answer in phase.answers.values()]
        return phase

    def warm_up(self) -> None:
        """Let both sides do what they do only once."""
        for workload in self.run.workloads:
            few = replace(workload, priming=workload.priming[:1], lanes=workload.lanes[:1])
            self.ask(few, f"warm-up {workload.name}", clients=1)

    def measure(self, workload: Workload, mode: str) -> None:
        """A row, and what is wrong about it."""
        run, where = self.run, f"caching {self.name}, {mode}, {workload.name}"
        clients = 1 if mode == SERIAL else run.options.clients
        phase = self.ask(workload, f"{mode} {workload.name}", clients=clients)
        reference = run.references.setdefault(workload.name, phase)
        differing = differences(reference, phase)
        run.blame(where, [f"{name}: {how}" for name, how in differing.items()])
        expected = self._check_boundaries(workload, phase, where, strict=mode == SERIAL)
        labels = {"server": self.name, "mode": mode, "clients": clients}
        run.rows.append(phase_row(workload, phase, expected, differing, **labels))

    def _check_boundaries(
        self, workload: Workload, phase: Phase, where: str, *, strict: bool
    ) -> dict[str, int]:
        prompts = prompts_of(self.run.tokenizer, workload, phase)
        expected = expected_boundaries(workload, prompts)
        if self.name == OFF:
            expected = dict.fromkeys(expected, 0)
        if strict:
            later = workload.name == TALKS and "--no-idle-prefill" not in self.server.options
            self.run.blame(where, wrong_boundaries(phase, prompts, expected, may_be_later=later))
        return expected

    def converse(self, setting: str, *, exact: bool) -> None:
        """The conversations with time to think, turn by turn."""
        run, talks = self.run, self.run.talks
        think = run.options.think_seconds
        phase = self.ask(talks, setting, clients=1, exact=exact, think_seconds=think)
        differing = differences(run.references[TALKS], phase)
        where = f"conversations, {setting}"
        if exact:
            run.blame(where, [f"{name}: {how}" for name, how in differing.items()])
        expected = self._check_boundaries(talks, phase, where, strict=exact)
        labels = {"setting": setting, "exact": exact, "server": self.name}
        run.turns += turn_rows(talks, phase, expected, differing, **labels)

    def guide(self, mode: str) -> None:
        """GuideLLM on the shared prefix, which our client has made known before."""
        [workload] = [each for each in self.run.workloads if each.name == SHARED]
        clients = 1 if mode == SERIAL else self.run.options.clients
        *first, last = workload.priming
        known = replace(workload, priming=tuple(first), lanes=((last,),))
        self.ask(known, f"GuideLLM {mode}", clients=1)
        salt = f"{self.name} GuideLLM {mode}"
        try:
            guided = run_guidellm(self.server, workload, clients=clients, salt=salt)
        except GuideFailed as error:
            self.run.blame(f"caching {self.name}, {mode}", [str(error)])
            return
        self.cached_tokens += guided.cached_tokens
        labels = {"server": self.name, "mode": mode, "clients": clients}
        self.run.rows.append(guided_row(workload, guided, **labels))


def serve(run: Run, name: str) -> None:
    """Everything of one of SERVERS."""
    with ServerProcess(*SERVERS[name], threads=run.options.threads) as server:
        one = OneServer(run, name, server)
        one.warm_up()
        for mode in (SERIAL, CONCURRENT):
            for workload in run.workloads:
                one.measure(workload, mode)
        if name == "redirect":
            one.converse("idle prefill", exact=True)
            one.converse("not exact", exact=False)
        if run.guidellm and name in (GUIDED_IF_SMALL if run.options.small else GUIDED):
            for mode in (SERIAL, CONCURRENT):
                one.guide(mode)
        finish(run, one)


def converse_without_idle_prefill(run: Run) -> None:
    """The conversations on a server that does nothing between the turns."""
    with ServerProcess(*IDLE_OFF, threads=run.options.threads) as server:
        one = OneServer(run, "redirect, no idle prefill", server)
        one.warm_up()
        one.converse("no idle prefill", exact=True)
        finish(run, one)


def finish(run: Run, one: OneServer) -> None:
    """Compare the books and end the server."""
    run.blame(f"caching {one.name}", book_errors(one.server, one.cached_tokens))
    run.blame(f"caching {one.name}", one.server.stop())


def scaled(sizes: Sizes, scale: float) -> Sizes:
    """So many times the requests, at least two of each kind."""
    return replace(sizes, **{name: max(2, round(getattr(sizes, name) * scale)) for name in SCALED})


# ---- command line


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Options. Bad ones exit with status 2."""
    parser = new_parser("regression", __doc__, small="smaller sizes: under 90 seconds")
    add = parser.add_argument
    add("--requests-scale", type=positive, default=1.0, help="times the requests (%(default)s)")
    add("--clients", type=count, default=16, help="at once (%(default)s)")
    add("--think-seconds", type=positive, default=0.15, help="before a turn (%(default)s)")
    add("--no-guidellm", action="store_true", help="do not run GuideLLM")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parse_options(argv)
    sizes = scaled(SMALL if options.small else FULL, options.requests_scale)
    tokenizer = Tokenizer.from_directory(BUILTIN_MODEL_DIR)
    assert tokenizer is not None
    guidellm = installed() and not options.no_guidellm
    run = Run(options, tokenizer, make_workloads(tokenizer, sizes), guidellm)
    if not (guidellm or options.small or options.no_guidellm):
        run.failures.append("GuideLLM is not installed: make regression, or --no-guidellm")
    remove_results(options.json)
    start = time.perf_counter()
    try:
        for name in SERVERS:
            console().print(f"regression: the server with caching {name}")
            serve(run, name)
        console().print("regression: the server without idle prefill")
        converse_without_idle_prefill(run)
    except* (OpenAIError, RuntimeError, OSError) as errors:
        run.failures += [f"{type(error).__name__}: {error}" for error in errors.exceptions]
    return report(run, options, sizes, time.perf_counter() - start)


def report(run: Run, options: argparse.Namespace, sizes: Sizes, took: float) -> int:
    """Tables, results, chart and the last sentence; the exit status."""
    rows = in_order(with_ratios(run.rows))
    console().print(table(rows))
    console().print(turn_table(run.turns))
    guidellm = "ran" if run.guidellm else "not run"
    console().print(f"GuideLLM: {guidellm}. {took:.0f} s in all.")
    results = {
        "question": QUESTION,
        "conclusion": None if run.failures else conclusion(rows, run.turns),
        "rows": rows,
        "conversations": run.turns,
        "guidellm": guidellm,
        "seconds": took,
        "sizes": vars(sizes),
        "options": asked(options),
        "passed": not run.failures,
        "failures": run.failures,
    }
    return publish(options.json, results, run.failures, draw)


if __name__ == "__main__":
    sys.exit(main())
