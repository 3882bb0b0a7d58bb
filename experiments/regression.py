"""Does a prefix-cache hit reach the client, and without a changed token?

Starts the server itself: once with caching off, once with each way to restore, and with overlapping
steps, drafts and CUDA graphs, alone and together (without a GPU recorded graphs, interpreted and
few). OpenAI's own package asks over HTTP, by one client and then by many, in streams. The answers
that one client gets without caching are the reference: every other exact answer must have their
tokens. One by one, each request must resume where the placement rules say; a conversation whose
answers were prefilled in idle time may resume later. GuideLLM, where it is installed, asks about
the same document. At the end of each server nothing may be held, and its counters must be what the
clients counted.

    python -m experiments.regression
    python -m experiments.regression --small

Exit status: 0, 1 if an answer, a boundary or a counter is wrong, 2 for a refused option.
"""

import argparse
import sys
import time
from dataclasses import replace

from openai import OpenAIError

from engine.builtin import BUILTIN_MODEL_DIR
from engine.tokenizer import Tokenizer
from experiments.command_line import new_parser, question
from experiments.console import console
from experiments.options import count
from experiments.outcome import asked, publish, remove_results
from experiments.regression_graphs import (
    GRAPH_SERVERS,
    INTERPRETED,
    RECORDED_CLIENTS,
    RECORDED_SERVERS,
    RECORDED_SIZES,
    on_gpu,
    recorded,
)
from experiments.regression_guidellm import installed
from experiments.regression_options import positive
from experiments.regression_passes import OneServer, Run, finish
from experiments.regression_report import (
    CONCURRENT,
    SERIAL,
    conclusion,
    draw,
    in_order,
    table,
    turn_table,
)
from experiments.regression_rows import OFF, with_ratios
from experiments.regression_server import ServerProcess
from experiments.regression_workloads import Sizes, make_workloads

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
IDLE_OFF = ("--restore", "redirect", "--no-idle-prefill")


def servers() -> dict[str, tuple[str, ...]]:
    """Options by name. With a GPU all run there, and some with graphs."""
    if not on_gpu():
        return SERVERS
    return {name: ("--device", "cuda", *how) for name, how in (SERVERS | GRAPH_SERVERS).items()}


def serve(run: Run, name: str) -> None:
    """Everything of one of `servers`."""
    with ServerProcess(*servers()[name], threads=run.options.threads) as server:
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


def ask_recorded_graphs(run: Run) -> None:
    """The servers with graphs where there is no GPU, and their reference."""
    options = argparse.Namespace(**vars(run.options) | {"clients": RECORDED_CLIENTS})
    workloads = recorded(make_workloads(run.tokenizer, RECORDED_SIZES))
    few = Run(options, run.tokenizer, workloads, guidellm=False, failures=run.failures)
    for name, how in RECORDED_SERVERS.items():
        with ServerProcess(*how, threads=options.threads, environment=INTERPRETED) as server:
            one = OneServer(few, name, server)
            for mode in (SERIAL,) if name == OFF else (SERIAL, CONCURRENT):
                for workload in workloads:
                    one.measure(workload, mode)
            finish(few, one)
    run.recorded = few.rows


def scaled(sizes: Sizes, scale: float) -> Sizes:
    """So many times the requests, at least two of each kind."""
    return replace(sizes, **{name: max(2, round(getattr(sizes, name) * scale)) for name in SCALED})


# ---- command line


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Options. Bad ones exit with status 2."""
    parser = new_parser("regression", __doc__, small="smaller sizes: under three minutes")
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
        for name in servers():
            console().print(f"regression: the server with caching {name}")
            serve(run, name)
        console().print("regression: the server without idle prefill")
        converse_without_idle_prefill(run)
        if not (on_gpu() or options.small):
            console().print("regression: the servers with graphs, recorded")
            ask_recorded_graphs(run)
    except* (OpenAIError, RuntimeError, OSError) as errors:
        run.failures += [f"{type(error).__name__}: {error}" for error in errors.exceptions]
    return report(run, options, sizes, time.perf_counter() - start)


def report(run: Run, options: argparse.Namespace, sizes: Sizes, took: float) -> int:
    """Tables, results, chart and the last sentence; the exit status."""
    rows = in_order(with_ratios(run.rows))
    console().print(table(rows))
    console().print(turn_table(run.turns))
    guidellm = "ran" if run.guidellm else "not run"
    graphs = "captured" if on_gpu() else "recorded" if run.recorded else "not run"
    console().print(f"GuideLLM: {guidellm}. Graphs: {graphs}. {took:.0f} s in all.")
    results = {
        "question": QUESTION,
        "conclusion": None if run.failures else conclusion(rows, run.turns, run.recorded),
        "rows": rows,
        "conversations": run.turns,
        "guidellm": guidellm,
        "graphs": graphs,
        "recorded_graphs": run.recorded,
        "seconds": took,
        "sizes": vars(sizes),
        "options": asked(options),
        "passed": not run.failures,
        "failures": run.failures,
    }
    return publish(options.json, results, run.failures, draw)


if __name__ == "__main__":
    sys.exit(main())
