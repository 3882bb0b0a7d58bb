"""Does a test fail for every one-line fault that we can think of?

`python -m tests.mutations [--jobs N] [--only WORDS]` applies each mutation of `tests/mutants/` to a
copy of the tree in a temporary folder and runs the fast tests there, cheapest first; Triton kernels
run in its interpreter. Exits with 1 if a mutation survives without an explanation, if its old text
is not there exactly once, or if the tests fail without any mutation. A full run writes
experiments/results/mutations.json.

A mutant file mirrors the file that it breaks. Its entries are separated by blank lines:

    name: what it breaks
    -old text (exact, several lines in order)
    +new text
    =why no test can tell (only for mutations that change nothing a caller can see)
"""

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from experiments.options import count
from experiments.results_io import write_json

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = ROOT / "tests" / "mutants"
RESULTS = ROOT / "experiments" / "results" / "mutations.json"
TIMEOUT_S = 60.0  # of one test: without an end it is a loop that a mutation made

CACHE_TESTS = [
    "tests/cache/test_block_pool.py",
    "tests/cache/test_prefix_index.py",
    "tests/cache/test_hashing.py",
    "tests/cache/test_ops.py",
    "tests/cache/test_kv_block_manager.py",
    "tests/cache/test_linear_state_prefix_cache.py",
    "tests/cache/test_linear_state_saves.py",
    "tests/cache/test_linear_state_block_manager.py",
    "tests/cache/test_composite_block_manager.py",
    "tests/cache/test_composite_misses.py",
    "tests/cache/test_composite_releases.py",
    "tests/cache/test_decode_states.py",
    "tests/cache/test_whole_prompt.py",
    "tests/cache/test_state_pool.py",
    "tests/cache/test_placement.py",
    "tests/cache/test_eviction.py",
    "tests/cache/test_flop_aware.py",
    "tests/cache/test_kv_paths.py",
    "tests/cache/test_shared_memory.py",
    "tests/cache/test_sized_value_index.py",
    "tests/cache/test_shared_memory_stateful.py",
    "tests/cache/test_composite_stateful.py",
]
ENGINE_TESTS = [
    "tests/engine/test_batch.py",
    "tests/engine/test_worker.py",
    "tests/engine/test_decode_graphs.py",
    "tests/engine/test_config.py",
    "tests/engine/test_scheduler_preemption.py",
    "tests/engine/test_scheduler_reuse.py",
    "tests/engine/test_scheduler.py",
    "tests/engine/test_background.py",
    "tests/engine/test_drafts.py",
    "tests/engine/test_overlap.py",
    "tests/engine/test_overlap_faults.py",
    "tests/engine/test_whole_prompt.py",
    "tests/engine/test_scheduler_stateful.py",
]
SLOW_TESTS = [
    "tests/engine/test_llm_turns.py",
    "tests/engine/test_interrupts.py",
    "tests/engine/test_integer_oracle.py",
]
# Tests that are about a file, but not named after it.
OWN_TESTS = {
    "linear_state_block_manager": "tests/cache/test_linear_state_saves.py",
    "value_index": "tests/cache/test_eviction.py",
    "reuse_hazard": "tests/cache/test_eviction.py",
    "saved_states": "tests/cache/test_eviction.py",
    "admission": "tests/cache/test_eviction.py",
    "step_loop": "tests/engine/test_overlap.py",
    "stream": "tests/engine/test_overlap_faults.py",
    "issued": "tests/engine/test_overlap.py",
    "whole_rows": "tests/engine/test_whole_prompt.py",
    "policy_names": "tests/cache/test_eviction.py",
    "shared_slots": "tests/cache/test_shared_memory.py",
    "shared_blocks": "tests/cache/test_shared_memory.py",
    "dead_first": "tests/cache/test_shared_memory.py",
}
# A kernel's own tests, those that kill most first: the others would take minutes for each mutation.
KERNEL_TESTS = {
    "gated_delta_chunk": ["interpreter/test_gated_delta_chunk.py"],
    "gated_delta_step": ["interpreter/test_gated_delta_step.py"],
    "causal_conv1d": ["interpreter/test_causal_conv1d.py"],
    "state_restore": ["interpreter/test_state_restore.py"],
    "attention": ["interpreter/test_attention.py"],
    "attention_decode": ["interpreter/test_attention.py"],
    "norms": ["interpreter/test_norms_and_gates.py"],
    "gates": ["interpreter/test_norms_and_gates.py"],
    "matmul": ["interpreter/test_matmul.py"],
    "fla_prefill": ["kernels/test_fla_prefill.py"],
    "slot_rules": [
        "kernels/test_slot_rules.py",
        "kernels/test_validate.py",
        "interpreter/test_gated_delta_step.py",
    ],
    "validate": [
        "kernels/test_validate.py",
        "kernels/test_ids.py",
        "interpreter/test_state_restore.py",
        "interpreter/test_gated_delta_step.py",
    ],
    "ids": ["kernels/test_ids.py", "interpreter/test_gated_delta_step.py"],
    "packs": ["kernels/test_ids.py", "interpreter/test_gated_delta_step.py"],
    "rows": [
        "interpreter/test_launch.py",
        "interpreter/test_norms_and_gates.py",
        "interpreter/test_gated_delta_chunk.py",
    ],
    "graphs": ["kernels/test_graphs.py"],
    "recorded_graph": ["kernels/test_graphs.py"],
    "launch": [
        "interpreter/test_launch.py",
        "kernels/test_graphs.py",
        "interpreter/test_norms_and_gates.py",
        "interpreter/test_matmul.py",
    ],
}


@dataclass(frozen=True)
class Mutation:
    file: str
    name: str
    what: str
    old: str
    new: str
    explanation: str = ""

    def apply(self, source: str) -> str:
        """ValueError unless the old text is there exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file}: {self.name!r}: old text found {count} times, not once")
        return source.replace(self.old, self.new)


def read_mutations() -> list[Mutation]:
    mutations = []
    for path in sorted(MUTANTS.rglob("*.diff")):
        file = path.relative_to(MUTANTS).with_suffix(".py").as_posix()
        for entry in path.read_text().strip("\n").split("\n\n"):
            title, *lines = entry.split("\n")
            name, what = title.split(": ", 1)
            parts = {mark: [x[1:] for x in lines if x[0] == mark] for mark in "-+="}
            texts = ["\n".join(part) for part in parts.values()]
            mutations.append(Mutation(file, name, what, *texts))
    return mutations


def ordered_tests(file: str) -> list[str]:
    """The fast tests, those that are about the file first; of a kernel, its own."""
    if file.startswith("kernels"):
        return [f"tests/{test}" for test in KERNEL_TESTS[Path(file).stem]]
    tests = CACHE_TESTS + ENGINE_TESTS if file.startswith("cache") else ENGINE_TESTS + CACHE_TESTS
    stem = Path(file).stem
    own = [test for test in tests if Path(test).stem.startswith(f"test_{stem}")]
    own += [OWN_TESTS[stem]] if stem in OWN_TESTS else []
    ordered = list(dict.fromkeys([*own, *tests, *SLOW_TESTS]))
    return [test for test in ordered if (ROOT / test).exists()]


# ---- one mutation, in a process of its own

PASSED = "passed"


class Lean:
    """pytest plugin: Hypothesis repeats its choices and does not shrink, tests are ordered, and the
    first failure is noted. heartbeat: a file that is touched when anything starts."""

    failed = ""

    def __init__(self, heartbeat: Path) -> None:
        self.heartbeat = heartbeat

    def pytest_collectstart(self) -> None:
        self.heartbeat.touch()

    def pytest_runtest_logstart(self) -> None:
        self.heartbeat.touch()

    def pytest_sessionstart(self) -> None:
        from hypothesis import Phase, settings

        phases = [Phase.explicit, Phase.generate]
        settings.register_profile(
            "lean", deadline=None, derandomize=True, database=None, phases=phases
        )
        settings.load_profile("lean")

    def pytest_collection_modifyitems(self, items: list) -> None:
        """File by file, one case of each test first: the last, which is seldom a trivial one."""
        last = set({item.nodeid.split("[")[0]: item for item in items}.values())
        files = list(dict.fromkeys(item.path for item in items))
        items.sort(key=lambda item: (files.index(item.path), item not in last))

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def _run_tests(copy: Path, tests: list[str], verdict: Path, heartbeat: Path) -> None:
    """Writes what failed, or PASSED. Runs in a fork that has torch, but no tested code."""
    import pytest

    os.chdir(copy)
    sys.path[:] = [str(copy), *(p for p in sys.path if p not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    sys.dont_write_bytecode = True
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    plugin = Lean(heartbeat)
    preloaded = "ignore:Module already imported"  # hypothesis was, before the fork
    options = ["-x", "-q", "-p", "no:cacheprovider", "-W", preloaded]
    code = pytest.main([*options, *tests], plugins=[plugin])
    verdict.write_text(plugin.failed or (f"pytest ended with {code!r}" if code else PASSED))


class Copies:
    """`jobs` copies of the tree, each for one mutation at a time."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.idle: list[Path] = []
        for job in range(jobs):
            copy = folder / f"tree-{job}"
            for package in ("kernels", "cache", "engine", "tests"):
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / package, copy / package, ignore=ignored)
            shutil.copy(ROOT / "pyproject.toml", copy)
            self.idle.append(copy)


class Run:
    """The tests in one copy, with one mutation or none."""

    def __init__(self, copy: Path, mutation: Mutation | None, tests: list[str]) -> None:
        self.copy, self.mutation = copy, mutation
        self.verdict, self.heartbeat = copy / "verdict", copy / "heartbeat"
        self.verdict.unlink(missing_ok=True)
        self.heartbeat.touch()
        if mutation is not None:
            target = copy / mutation.file
            self.source = target.read_text()
            target.write_text(mutation.apply(self.source))
        self.started = time.perf_counter()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(
            target=_run_tests, args=(copy, tests, self.verdict, self.heartbeat)
        )
        self.process.start()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def hangs(self) -> bool:
        """Whether one test has run for too long."""
        return time.time() - self.heartbeat.stat().st_mtime > TIMEOUT_S

    def finish(self) -> str:
        """The test that failed, "timeout", "exit -N" for a crash, or "" if all passed.

        RuntimeError if the tests ended without a verdict, which says nothing of a mutation.
        """
        killer = "timeout" if self.process.is_alive() else ""
        if killer:
            self.process.kill()
        self.process.join()
        if self.mutation is not None:
            (self.copy / self.mutation.file).write_text(self.source)
        if self.verdict.exists():
            verdict = self.verdict.read_text()
            return "" if verdict == PASSED else verdict
        code = self.process.exitcode
        if not killer and (code is None or code >= 0):
            raise RuntimeError(f"{self.mutation}: no verdict, and exit status {code}")
        return killer or f"exit {code}"


def run_all(mutations: list[Mutation], copies: Copies, report) -> list[dict]:
    """Results in the order of the mutations; `report(mutation, killer)` after each."""
    waiting, running, results = list(mutations), [], {}
    while waiting or running:
        while waiting and copies.idle:
            m = waiting.pop(0)
            running.append(Run(copies.idle.pop(), m, ordered_tests(m.file)))
        wait([run.process.sentinel for run in running], timeout=1.0)
        for run in list(running):
            if run.process.is_alive() and not run.hangs:
                continue
            killer = run.finish()
            running.remove(run)
            copies.idle.append(run.copy)
            m = run.mutation
            results[m] = {
                "file": m.file,
                "name": m.name,
                "what": m.what,
                "killed": bool(killer),
                "killed_by": killer,
                "explanation": m.explanation,
                "seconds": round(run.seconds, 2),
            }
            report(m, killer)
    return [results[m] for m in mutations]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=count, default=1, help="mutations at once")
    parser.add_argument("--only", default="", help="those whose 'file name' contains these words")
    options = parser.parse_args(arguments)
    mutations = [m for m in read_mutations() if options.only in f"{m.file} {m.name}"]
    if not mutations:
        parser.error(f"--only {options.only!r}: no mutation has these words in its 'file name'")
    os.environ["TRITON_INTERPRET"] = "1"  # triton decides when it is imported
    import hypothesis  # noqa: F401 (loaded once, before the forks)
    import pytest  # noqa: F401
    import torch
    from rich.console import Console
    from rich.progress import Progress

    torch.set_num_threads(1)
    console = Console()
    for mutation in mutations:
        mutation.apply((ROOT / mutation.file).read_text())
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        copies = Copies(Path(folder), options.jobs)
        tests = list(dict.fromkeys(test for m in mutations for test in ordered_tests(m.file)))
        baseline = Run(copies.idle[0], None, tests)
        while baseline.process.is_alive() and not baseline.hangs:
            baseline.process.join(1.0)
        if failed := baseline.finish():
            console.print(f"[red]the tests fail without any mutation:[/] {failed}")
            return 1
        task = progress.add_task("mutations", total=len(mutations))

        def report(mutation: Mutation, killer: str) -> None:
            verdict = f"[green]killed[/] by {killer}" if killer else "[red]SURVIVED[/]"
            console.print(f"{mutation.file}: {mutation.name}: {verdict} {mutation.explanation}")
            progress.advance(task)

        results = run_all(mutations, copies, report)
    if not options.only:
        write_json(RESULTS, {"mutations": results})
    survived = [r for r in results if not r["killed"] and not r["explanation"]]
    console.print(f"{len(results) - len(survived)} of {len(results)} killed or explained")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
