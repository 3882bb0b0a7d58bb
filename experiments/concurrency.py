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
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine import LLM, EngineConfig, RequestOutput, SamplingParams
from engine.builtin import BUILTIN_MODEL_DIR
from experiments.cold_and_warm import first_difference, serve, warm_up
from experiments.options import count
from experiments.plots import COLD, FIRST, WARM, new_figure, save_figure
from experiments.ttft_vs_prefix import (
    STRIDE,
    console,
    fill_in,
    finish,
    log_ms,
    new_parser,
    questioned_document,
)

QUESTION = "What does concurrency do to warm requests?"
SMALL = {"clients": [1, 2, 4, 8], "requests_per_client": 4, "document_tokens": 512}
FULL = {"clients": [1, 2, 4, 8, 16, 32], "requests_per_client": 8, "document_tokens": 2048}
SHARED_DOCUMENTS = 4
OWN_EVERY = 4  # of four requests of a client, one has its own document
LEAST_SUFFIX = 16  # tokens: one question and the end of its turn
PRIMING = 2  # questions that each shared document was asked before


@dataclass(frozen=True)
class Request:
    """A prompt and whether its document is a shared one."""

    prompt: list[int]
    shared: bool


@dataclass(frozen=True)
class Served:
    """A finished request; latency from handing it in to its last token."""

    output: RequestOutput
    latency_ms: float


@dataclass(frozen=True)
class Workload:
    """`clients[c]` are the requests of client c in order; `priming` fills the cache before."""

    clients: list[list[Request]]
    priming: list[list[int]]


# ---- the requests


def make_workload(tokenizer: Any, options: argparse.Namespace) -> Workload:
    """Requests of the largest number of clients; fewer clients serve the first of these."""
    clients, each = max(options.clients), options.requests_per_client
    sizes = {"prefix": options.document_tokens, "suffix": options.suffix_tokens}
    per_document = PRIMING + -(-clients * each // SHARED_DOCUMENTS)
    shared = [
        questioned_document(tokenizer, f"shared {i}", questions=per_document, **sizes)
        for i in range(SHARED_DOCUMENTS)
    ]
    priming = [document.pop() for document in shared for _ in range(PRIMING)]
    requests: list[list[Request]] = [[] for _ in range(clients)]
    for i in range(each):
        for c in range(clients):
            if (i + c) % OWN_EVERY == OWN_EVERY - 1:
                own = questioned_document(tokenizer, f"own {c} {i}", questions=1, **sizes)
                requests[c].append(Request(own[0], False))
            else:
                requests[c].append(
                    Request(shared[(i * clients + c) % SHARED_DOCUMENTS].pop(), True)
                )
    return Workload(requests, priming)


# ---- serving


def serve_clients(
    llm: LLM, clients: list[list[Request]], params: SamplingParams
) -> tuple[list[list[Served]], float]:
    """All requests of all clients, each client's in its order, and the seconds it took."""
    served: list[list[Served]] = [[] for _ in clients]
    owner: dict[str, int] = {}
    handed_in: dict[str, float] = {}

    def hand_in(client: int) -> None:
        if len(served[client]) < len(clients[client]):
            now = time.perf_counter()
            request_id = llm.add_request(clients[client][len(served[client])].prompt, params)
            owner[request_id], handed_in[request_id] = client, now

    start = time.perf_counter()
    for client in range(len(clients)):
        hand_in(client)
    while llm.has_unfinished():
        for output in llm.step():
            if output.finished:
                latency = 1e3 * (time.perf_counter() - handed_in[output.request_id])
                client = owner[output.request_id]
                served[client].append(Served(output, latency))
                hand_in(client)
    return served, time.perf_counter() - start


def engine(loaded: LLM, workload: Workload, options: argparse.Namespace, *, caching: bool) -> LLM:
    """A new engine, warmed up, with the shared documents in its cache and room for everything."""
    requests = sum(map(len, workload.clients)) + len(workload.priming) + 2
    longest = max(options.document_tokens + options.suffix_tokens + options.max_tokens, 1024)
    config = EngineConfig(
        enable_prefix_caching=caching,
        max_num_seqs=options.max_num_seqs,
        num_blocks=1 + requests * (longest // 64 + 2),
        num_slots=1 + options.max_num_seqs + requests * (longest // 512 + 3),
    )
    llm = LLM.from_model(loaded.worker.model, config, loaded.tokenizer)
    warm_up(llm, 1024)
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


def measure(loaded: LLM, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows, two for each number of clients, and what was not as it must be."""
    workload = make_workload(loaded.tokenizer, options)
    serial = engine(loaded, workload, options, caching=False)
    reference = [
        serve_clients(serial, [requests], answer(options))[0][0] for requests in workload.clients
    ]
    runs = [(number, caching) for number in options.clients for caching in (False, True)]
    rows, found = [], []
    progress = Console(stderr=True)
    for number, caching in track(runs, "clients", console=progress, transient=True):
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


# ---- reporting


def table(rows: list[dict[str, Any]]) -> Table:
    """One line a run."""
    caption = (
        "ms: median / 95th percentile. TTFT: from handing in to the first token, waiting included; "
        "latency: to the last token; tokens/s: new ones. Three requests of four ask "
        "about a shared document."
    )
    out = Table(box=SIMPLE_HEAD, padding=(0, 1), caption=caption, caption_justify="left")
    headers = ("clients", "cache", "TTFT\nms", "shared\nTTFT, ms", "latency\nms")
    headers += ("requests\n/s", "tokens\n/s", "tokens\nhit", "bits\nequal")
    for header in headers:
        out.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        times = (
            " / ".join("-" if v is None else f"{v:.0f}" for v in pair)
            for pair in _pairs(row, "ttft", "ttft_shared", "latency")
        )
        out.add_row(
            str(row["clients"]),
            "on" if row["caching"] else "off",
            *times,
            f"{row['requests_per_s']:.1f}",
            f"{row['new_tokens_per_s']:.0f}",
            f"{row['token_hit_rate']:.0%}",
            "yes" if row["bits_equal"] else "NO",
            end_section=row["caching"],
        )
    return out


def _pairs(row: dict[str, Any], *names: str) -> list[tuple[float | None, float | None]]:
    return [(row[f"{name}_p50_ms"], row[f"{name}_p95_ms"]) for name in names]


def by_caching(rows: list[dict[str, Any]], caching: bool) -> list[dict[str, Any]]:
    """The rows with caching on, or those with caching off, by number of clients."""
    return [row for row in rows if row["caching"] is caching]


def conclusion(rows: list[dict[str, Any]]) -> str:
    """One sentence that answers the question; only for rows with equal bits."""
    off, on = by_caching(rows, False), by_caching(rows, True)
    return (
        f"From {on[0]['clients']} to {on[-1]['clients']} clients the median first token of a "
        f"request on a known document goes from {on[0]['ttft_shared_p50_ms']:.1f} to "
        f"{on[-1]['ttft_shared_p50_ms']:.0f} ms with caching (off: "
        f"{off[0]['ttft_shared_p50_ms']:.0f} to {off[-1]['ttft_shared_p50_ms']:.0f} ms) and the "
        f"throughput from {on[0]['requests_per_s']:.1f} to {on[-1]['requests_per_s']:.1f} "
        f"requests/s (off: {off[0]['requests_per_s']:.1f} to {off[-1]['requests_per_s']:.1f}); "
        f"{on[-1]['token_hit_rate']:.0%} of the prompt tokens are reused, and all outputs are "
        "those of a serial run without caching, bit for bit."
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """TTFT of requests on shared documents by number of clients, from the results file alone."""
    rows = results["rows"]
    off, on = by_caching(rows, False), by_caching(rows, True)
    times = on[-1]["requests_per_s"] / off[-1]["requests_per_s"]
    outcome = (
        f"at {on[-1]['clients']} clients {times:.1f} times the requests/s; "
        f"{on[-1]['token_hit_rate']:.0%} of prompt tokens reused; logits bit-equal"
    )
    figure, axes = new_figure(QUESTION, outcome)
    looks = (
        (off, "ttft_shared", COLD, "caching off, shared document"),
        (on, "ttft_shared", WARM, "caching on, shared document: hits"),
        (on, "ttft_own", FIRST, "caching on, own document: misses"),
    )
    for run, name, color, label in looks:
        there = [row for row in run if row[f"{name}_p50_ms"] is not None]
        places = [row["clients"] for row in there]
        middle = [row[f"{name}_p50_ms"] for row in there]
        high = [row[f"{name}_p95_ms"] for row in there]
        axes.plot(places, middle, "o-", color=color, label=label)
        axes.fill_between(places, middle, high, color=color, alpha=0.15, linewidth=0)
    places = [row["clients"] for row in on]
    axes.set_xscale("log", base=2)
    log_ms(axes)
    axes.set_xticks(places, [str(place) for place in places])
    axes.set_xlabel("closed-loop clients (log scale)")
    axes.set_ylabel("time to first token, ms (log scale)\nline: median, shade: to the 95th %")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save_figure(figure, path)


# ---- command line


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Options. Bad ones exit with status 2."""
    parser = new_parser("concurrency", __doc__)
    parser.add_argument("--model", type=Path, default=BUILTIN_MODEL_DIR, help="model directory")
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
        loaded = LLM(options.model, num_slots=4, num_blocks=8, max_num_seqs=1)
        if loaded.tokenizer is None:
            raise ValueError(f"{options.model} has no tokenizer")
        rows, found = measure(loaded, options)
    except (ValueError, OSError) as error:
        print(f"concurrency: error: {error}", file=sys.stderr)
        return 2
    if not found:  # the times of wrong answers say nothing
        console().print(table(rows))
    content = {"question": QUESTION, "conclusion": None if found else conclusion(rows)}
    return finish(options, content | {"rows": rows}, found, draw)


if __name__ == "__main__":
    sys.exit(main())
