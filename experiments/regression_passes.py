"""What is asked of one server of the regression, pass by pass, and what is wrong about it."""

import argparse
import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from engine.tokenizer import Tokenizer
from experiments.regression_checks import (
    book_errors,
    differences,
    expected_boundaries,
    prompts_of,
    wrong_boundaries,
)
from experiments.regression_clients import Phase, run_phase
from experiments.regression_graphs import replay_errors
from experiments.regression_guidellm import GuideFailed, run_guidellm
from experiments.regression_report import SERIAL
from experiments.regression_rows import OFF, Row, guided_row, phase_row, turn_rows
from experiments.regression_server import ServerProcess
from experiments.regression_workloads import SHARED, TALKS, Workload

MOST_TOLD = 5  # failures of one pass


@dataclass
class Run:
    """What has been found so far. references: by workload. recorded: rows of recorded graphs."""

    options: argparse.Namespace
    tokenizer: Tokenizer
    workloads: list[Workload]
    guidellm: bool
    references: dict[str, Phase] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    turns: list[Row] = field(default_factory=list)
    recorded: list[Row] = field(default_factory=list)
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


def finish(run: Run, one: OneServer) -> None:
    """Compare the books and end the server."""
    if "--cuda-graphs" in one.server.options:
        run.blame(f"caching {one.name}", replay_errors(one.server.stats()))
    run.blame(f"caching {one.name}", book_errors(one.server, one.cached_tokens))
    run.blame(f"caching {one.name}", one.server.stop())
