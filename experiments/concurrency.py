"""What does concurrency do to warm requests?

Closed-loop clients: each hands in its next request when its last one has finished. Most requests
ask about one of a few documents that all clients share and that were read before; the others bring
a document of their own. With caching on and off, for growing numbers of clients. The tokens and
every row of logits of each request are compared with those of a serial run without caching.

    python -m experiments.concurrency
    python -m experiments.concurrency --clients 1 16 --requests-per-client 20

Exit status: 0, 1 if a bit differs or a request on a shared document does not resume at its end, 2
for a refused option.
"""

import argparse
import math
import sys
from dataclasses import replace
from typing import Any

import torch

from engine import LLM, EngineConfig, SamplingParams
from experiments.clients import Request, Served, Workload, make_workload, serve_clients
from experiments.cold_and_warm import WARM_UP_TOKENS, first_difference, serve
from experiments.command_line import add_model, fill_in, new_parser, question, refused
from experiments.concurrency_report import conclusion, draw, table
from experiments.console import tracked
from experiments.engines import SMALLEST, check_length, load, roomy, same_weights
from experiments.options import count
from experiments.outcome import publish_rows, remove_results

QUESTION = question(__doc__)
STRIDE = EngineConfig().chunk_stride
SMALL = {"clients": [1, 2, 4, 8], "requests_per_client": 4, "document_tokens": 512}
FULL = {"clients": [1, 2, 4, 8, 16, 32], "requests_per_client": 8, "document_tokens": 2048}
LEAST_SUFFIX = 16  # tokens: one question and the end of its turn


# ---- serving


def engine(loaded: LLM, workload: Workload, options: argparse.Namespace, *, caching: bool) -> LLM:
    """A new engine, warmed up, with the shared documents in its cache and room for everything."""
    requests = sum(map(len, workload.clients)) + len(workload.priming)
    tokens = options.document_tokens + options.suffix_tokens + options.max_tokens
    room = roomy(requests, tokens, options.max_num_seqs)
    room = replace(room, placement="prompt_end+branch")  # at the documents' very ends
    llm = same_weights(loaded, replace(room, enable_prefix_caching=caching), WARM_UP_TOKENS)
    if caching:
        serve(llm, workload.priming, answer(options), mode="serial", advance=lambda: None)
    return llm


def answer(options: argparse.Namespace) -> SamplingParams:
    """Greedy, of a fixed number of tokens, with logits."""
    return SamplingParams(
        temperature=0, max_tokens=options.max_tokens, ignore_eos=True, return_logits=True
    )


# ---- what came out


def failures(
    reference: list[list[Served]],
    served: list[list[Served]],
    clients: list[list[Request]],
    due: int,
) -> list[str]:
    """Every difference from the serial run, and every hit that is not where it must be.

    due: tokens that a request on a shared document reuses; one with its own reuses none.
    """
    found = []
    for c, requests in enumerate(clients):
        for i, request in enumerate(requests):
            output = served[c][i].output
            difference = first_difference(reference[c][i].output, output)
            if difference is not None:
                found.append(f"client {c}, request {i}: {difference}")
            wanted = due if request.shared else 0
            if output.num_cached_tokens != wanted:
                found.append(
                    f"client {c}, request {i}: reused {output.num_cached_tokens} tokens, "
                    f"not {wanted} (miss reason: {output.miss_reason})"
                )
    return found


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that at least `percent` of 100 values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def summary(served: list[list[Served]], clients: list[list[Request]], seconds: float) -> dict:
    """The row of one run."""
    pairs = [
        (done, request)
        for each, requests in zip(served, clients, strict=True)
        for done, request in zip(each, requests, strict=True)
    ]
    outputs = [done.output for done, _ in pairs]
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    new_tokens = sum(len(output.token_ids) for output in outputs)
    row = {
        "requests": len(pairs),
        "seconds": seconds,
        "requests_per_s": len(pairs) / seconds,
        "new_tokens_per_s": new_tokens / seconds,
        "tokens_per_s": (prompt_tokens + new_tokens) / seconds,
        "token_hit_rate": sum(output.num_cached_tokens for output in outputs) / prompt_tokens,
    }
    times = {
        "ttft": [output.ttft_ms for output in outputs],
        "ttft_shared": [done.output.ttft_ms for done, request in pairs if request.shared],
        "ttft_own": [done.output.ttft_ms for done, request in pairs if not request.shared],
        "latency": [done.latency_ms for done, _ in pairs],
    }
    for name, values in times.items():
        for percent in (50, 95):
            row[f"{name}_p{percent}_ms"] = percentile(values, percent) if values else None
    return row


def measure(
    loaded: LLM, workload: Workload, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows, two for each number of clients, and what was not as it must be."""
    serial = engine(loaded, workload, options, caching=False)
    reference = [
        serve_clients(serial, [requests], answer(options))[0][0] for requests in workload.clients
    ]
    runs = [(number, caching) for number in options.clients for caching in (False, True)]
    rows, found = [], []
    for number, caching in tracked(runs, "clients"):
        llm = engine(loaded, workload, options, caching=caching)
        clients = workload.clients[:number]
        served, seconds = serve_clients(llm, clients, answer(options))
        due = options.document_tokens if caching else 0
        wrong = failures(reference, served, clients, due)
        name = f"{number} clients, caching {'on' if caching else 'off'}"
        found += [f"{name}, {each}" for each in wrong]
        row = {"clients": number, "caching": caching, "bits_equal": not wrong}
        rows.append(row | summary(served, clients, seconds))
    return rows, found


# ---- command line


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Options. Bad ones exit with status 2."""
    parser = new_parser("concurrency", __doc__)
    add_model(parser)
    parser.add_argument("--clients", type=count, nargs="+", help="numbers of clients")
    parser.add_argument("--requests-per-client", type=count, help="one after another")
    parser.add_argument("--document-tokens", type=count, help="of every document")
    parser.add_argument("--suffix-tokens", type=count, default=STRIDE, help="of every question")
    parser.add_argument("--max-tokens", type=count, default=8, help="new tokens a request")
    parser.add_argument("--max-num-seqs", type=count, default=32, help="of the engine")
    options = parser.parse_args(argv)
    fill_in(options, SMALL, FULL)
    options.clients = sorted(set(options.clients))
    if options.suffix_tokens < LEAST_SUFFIX:
        parser.error(f"--suffix-tokens {options.suffix_tokens}: must be at least {LEAST_SUFFIX}")
    if options.document_tokens % STRIDE:
        parser.error(f"--document-tokens {options.document_tokens}: not a multiple of {STRIDE}")
    return options


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    try:
        loaded = load(options.model, SMALLEST)
        check_length(loaded, options.document_tokens + options.suffix_tokens)
        workload = make_workload(loaded.tokenizer, options)
        remove_results(options.json)
        rows, found = measure(loaded, workload, options)
    except (ValueError, OSError) as error:
        return refused("concurrency", error)
    return publish_rows(
        options, QUESTION, rows, found, table=table, conclusion=conclusion, draw=draw
    )


if __name__ == "__main__":
    sys.exit(main())
