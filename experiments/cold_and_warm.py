"""Are the bits the same with and without the cache? Serves prompts in all ways and compares.

Cold is caching off; fill is caching on for the first time; warm is the second time. Serial hands in
a request when the last one is done; concurrent hands in all of them at once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine import LLM, EngineConfig, EngineStats, RequestOutput, SamplingParams
from experiments.shared_prompts import random_ids

MODES = ("serial", "concurrent")
PASSES = ("cold", "fill", "warm")
WARM_UP_TOKENS = 1024

Advance = Callable[[], None]


@dataclass(frozen=True)
class Served:
    """One request of one pass; `difference` says where it parts from the serial cold one."""

    prompt_tokens: int
    num_cached_tokens: int
    boundary: int
    ttft_ms: float
    miss_reason: str | None
    difference: str | None
    answer: str


@dataclass(frozen=True)
class Measured:
    """Requests by (mode, pass), and what each mode's caching engine counted after its warm-up."""

    served: dict[tuple[str, str], list[Served]]
    stats: dict[str, dict[str, int]]


def measure(
    cold: LLM,
    config: EngineConfig,
    prompts: list[list[int]],
    *,
    max_tokens: int,
    ignore_eos: bool,
    start_pass: Callable[[str], Advance],
) -> Measured:
    """Serve all passes: with `cold`, which does not cache, and then in a new engine for each mode.

    All share the weights. `config` is that of the new engines. `start_pass` is given the name of a
    pass and returns what is called for each new token of it.
    """
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos, return_logits=True
    )
    measured = Measured({}, {})
    reference: list[RequestOutput] = []

    def run(llm: LLM, mode: str, pass_: str) -> None:
        outputs = serve(llm, prompts, params, mode=mode, advance=start_pass(f"{mode}, {pass_}"))
        if not reference:
            reference.extend(outputs)
        pairs = zip(reference, outputs, strict=True)
        measured.served[mode, pass_] = [_served(out, first_difference(r, out)) for r, out in pairs]

    warm_up(cold, len(prompts[0]))
    for mode in MODES:
        run(cold, mode, "cold")
    for mode in MODES:
        llm = LLM.from_model(cold.worker.model, config, cold.tokenizer)
        warm_up(llm, len(prompts[0]))
        before = llm.stats()
        run(llm, mode, "fill")
        run(llm, mode, "warm")
        measured.stats[mode] = _since(before, llm.stats())
    return measured


def warm_up(llm: LLM, prompt_tokens: int) -> None:
    """Pay for what only first requests pay; nothing of it can be reused by another salt."""
    num_tokens = min(prompt_tokens, WARM_UP_TOKENS)
    prompt = random_ids(num_tokens, llm.model_config.vocab_size, seed=0)
    for _ in range(2):
        llm.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True), cache_salt="warm-up")


def serve(
    llm: LLM,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    mode: str,
    advance: Advance,
) -> list[RequestOutput]:
    """Outputs in the order of the prompts; serial: each is handed in when the last is done."""
    done: dict[str, RequestOutput] = {}
    waves = [prompts] if mode == "concurrent" else [[prompt] for prompt in prompts]
    request_ids: list[str] = []
    for wave in waves:
        request_ids += [llm.add_request(prompt, params) for prompt in wave]
        while llm.has_unfinished():
            for output in llm.step():
                advance()
                if output.finished:
                    done[output.request_id] = output
    return [done[request_id] for request_id in request_ids]


def _since(before: EngineStats, after: EngineStats) -> dict[str, int]:
    counters = ("queries", "hits", "tokens_reused", "saves", "state_evictions", "cold_starts")
    counted = {name: getattr(after, name) - getattr(before, name) for name in counters}
    pools = ("slots_checkpoint", "slots_total", "blocks_cached", "blocks_total")
    return counted | {name: getattr(after, name) for name in pools}


def _served(output: RequestOutput, difference: str | None) -> Served:
    assert output.ttft_ms is not None
    return Served(
        prompt_tokens=len(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
        boundary=output.boundary,
        ttft_ms=output.ttft_ms,
        miss_reason=output.miss_reason,
        difference=difference,
        answer=output.text.strip(),
    )


# ---- what must hold


def first_difference(reference: RequestOutput, output: RequestOutput) -> str | None:
    """Where token ids or logits first differ, in words; None if all bits are the same."""
    assert reference.logits is not None and output.logits is not None
    if len(reference.logits) != len(output.logits):
        return f"{len(output.logits)} rows of logits, not {len(reference.logits)}"
    for i, (expected, row) in enumerate(zip(reference.logits, output.logits, strict=True)):
        if not torch.equal(expected, row):
            different = int((expected != row).sum())
            return f"logits of new token {i} differ in {different} of {row.numel()} values"
    if reference.token_ids != output.token_ids:
        return f"token ids {output.token_ids}, not {reference.token_ids}"
    return None


def failures(measured: Measured, config: EngineConfig, *, prefix_tokens: int) -> list[str]:
    """Every difference, and every request that had to hit deeper than it did."""
    found = []
    for (mode, pass_), requests in measured.served.items():
        for i, request in enumerate(requests):
            name = f"question {i + 1}, {mode}, {pass_}"
            if request.difference is not None:
                found.append(f"{name}: {request.difference}")
            if pass_ == "cold" and request.num_cached_tokens:
                found.append(f"{name}: reused {request.num_cached_tokens} tokens, caching is off")
            least = least_boundary(request, i, mode, pass_, config, prefix_tokens=prefix_tokens)
            if min(request.boundary, request.num_cached_tokens) < least:
                found.append(
                    f"{name}: must reuse at least {least} tokens, reused "
                    f"{request.num_cached_tokens} up to boundary {request.boundary} "
                    f"(miss reason: {request.miss_reason})"
                )
    return found


def least_boundary(
    request: Served, i: int, mode: str, pass_: str, config: EngineConfig, *, prefix_tokens: int
) -> int:
    """The boundary that question `i` must at least resume from.

    Warm: the last grid boundary below its final token. Fill, one at a time, after the first: the
    last saved boundary of the document. Otherwise nothing is due.
    """
    last = request.prompt_tokens - 1
    if pass_ == "warm":
        return last // config.chunk_stride * config.chunk_stride
    if pass_ == "fill" and mode == "serial" and i > 0:
        return min(last, prefix_tokens) // config.checkpoint_every * config.checkpoint_every
    return 0
