"""What do concurrent clients ask, and when? Shared and own documents, and a closed loop."""

import argparse
import time
from dataclasses import dataclass

from engine import LLM, RequestOutput, SamplingParams
from engine.tokenizer import Tokenizer
from experiments.recall_workload import questioned_document

SHARED_DOCUMENTS = 4
OWN_EVERY = 4  # of four requests of a client, one has its own document
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


def make_workload(tokenizer: Tokenizer, options: argparse.Namespace) -> Workload:
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
