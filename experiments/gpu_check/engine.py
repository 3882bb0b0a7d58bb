"""Through the engine: is a prefix hit the same, bit for bit, as a run without a cache?"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine import LLM, EngineConfig, RequestOutput, SamplingParams
from engine.model import Qwen35Model
from experiments.gpu_check.model import make_config, make_model
from experiments.gpu_check.setup import Bench, same_bits
from kernels import launch


@contextmanager
def launched() -> Iterator[list[str]]:
    """The kernels that are launched inside, by module and name, whoever imported `launch`."""
    names: list[str] = []
    original = launch.launch

    def counting(kernel: Any, *args: Any, **options: Any) -> None:
        names.append(f"{kernel.fn.__module__}.{kernel.fn.__name__}")
        original(kernel, *args, **options)

    owners = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("kernels.") and getattr(module, "launch", None) is original
    ]
    try:
        for module in owners:
            module.launch = counting
        yield names
    finally:
        for module in owners:
            module.launch = original


def num_copies(names: list[str]) -> int:
    """Launches of the slot copy."""
    return sum(name.startswith("kernels.state_restore.") for name in names)


def poison_unowned(llm: LLM) -> None:
    """NaN in every slot and every K/V block that nobody holds, padding included."""
    worker, manager = llm.worker, llm.manager
    assert worker.state_pool is not None and manager.linear is not None
    worker.kv_cache[:, :, _unowned(manager.kv.pool)] = torch.nan
    worker.state_pool.arena[_unowned(manager.linear.pool)] = 255  # NaN in every dtype


def _unowned(pool: Any) -> list[int]:
    ids = range(1, pool.num_ids)
    return [0, *(i for i in ids if not pool.ref_count(i) and not pool.is_published(i))]


def run(llm: LLM, prompts: list[list[int]], sampling: SamplingParams) -> list[RequestOutput]:
    """All at once, to their end; what nobody owns is poisoned before every step."""
    order = [llm.add_request(prompt, sampling) for prompt in prompts]
    done: dict[str, RequestOutput] = {}
    while llm.has_unfinished():
        poison_unowned(llm)
        for output in llm.step():
            if output.finished:
                done[output.request_id] = output
    return [done[request_id] for request_id in order]


def _stack(output: RequestOutput) -> torch.Tensor:
    """Its logits [new tokens, vocab]; none if they were not finite from the start."""
    return torch.stack(output.logits) if output.logits else torch.empty(0)


class Reference:
    """Prompts run cold and alone, and engines around the same model."""

    def __init__(self, bench: Bench) -> None:
        s = bench.sizes
        self.bench, self.sizes = bench, s
        layers = s.model_overrides.get("num_hidden_layers", 4)
        config = make_config(
            s.model, vocab=s.vocab, layers=layers, overrides=s.model_overrides, dtype=s.dtype
        )
        self.model: Qwen35Model = make_model(bench, config)
        self.sampling = SamplingParams(
            temperature=0.0, ignore_eos=True, return_logits=True, max_tokens=s.max_tokens
        )
        self._cold = self.engine(enable_prefix_caching=False, max_num_seqs=1)
        self._known: dict[tuple[int, ...], RequestOutput] = {}

    def tokens(self, count: int) -> list[int]:
        generator, vocab = self.bench.generator, self.sizes.vocab
        size, device = (count,), self.bench.device
        return torch.randint(0, vocab, size, generator=generator, device=device).tolist()

    def engine(self, **settings: Any) -> LLM:
        s = self.sizes
        settings = {
            "device": s.device,
            "kernels": "triton",
            "num_blocks": 1 + 8 * (-(-(s.prompt_tokens + s.max_tokens) // 64) + 1),
            "num_slots": 48,
            "max_num_seqs": 8,
            "checkpoint_every": s.checkpoint_every,
            "max_num_batched_tokens": s.max_num_batched_tokens,
        } | settings
        return LLM.from_model(self.model, EngineConfig(**settings))

    def cold(self, prompt: list[int]) -> RequestOutput:
        key = tuple(prompt)
        if key not in self._known:
            [self._known[key]] = run(self._cold, [prompt], self.sampling)
        return self._known[key]

    def check(self, name: str, output: RequestOutput, *, hit: bool) -> None:
        """All logits and tokens are the cold ones, and something, or nothing, was reused."""
        expected, bench = self.cold(output.prompt_token_ids), self.bench
        ours, theirs = _stack(output), _stack(expected)
        bench.holds(f"{name}: finite", bool(ours.isfinite().all()) and len(ours) > 0)
        bench.equal(f"{name}: logits", ours, theirs)
        bench.holds(f"{name}: tokens", output.token_ids == expected.token_ids)
        reused = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens reused"
        bench.holds(f"{name}: {'hit' if hit else 'miss'}", hit == (output.boundary > 0), reused)


def engine(bench: Bench) -> None:
    reference, s = Reference(bench), bench.sizes
    first = reference.tokens(s.prompt_tokens)
    shared = first[: s.shared_tokens]
    branches = [shared + reference.tokens(n) for n in (3, s.prompt_tokens - s.shared_tokens)]
    short = reference.tokens(s.prompt_tokens // 2)

    together = reference.engine(enable_prefix_caching=False)
    batch = [first, short, branches[1]]
    for i, output in enumerate(run(together, batch, reference.sampling)):
        reference.check(f"request {i} of {len(batch)} at once", output, hit=False)
    del together

    for restore in ("redirect", "copy"):
        llm = reference.engine(restore=restore)
        with launched() as names:
            [miss] = run(llm, [first], reference.sampling)
            reference.check(f"{restore}, miss", miss, hit=False)
            hits = run(llm, [first], reference.sampling)
            hits += run(llm, branches, reference.sampling)
        for name, output in zip(("identical", "branch 0", "branch 1"), hits, strict=True):
            reference.check(f"{restore}, {name}", output, hit=True)
        copies = num_copies(names)
        ok = copies == 0 if restore == "redirect" else copies >= 2
        counted = f"{copies} copies in {len(names)} launches"
        bench.holds(f"{restore}: copy launches", ok and len(names) > 0, counted)

        # The control: with other states, other logits, or the checks above would prove nothing.
        llm.worker.state_pool.states.mul_(0.5)
        [damaged] = run(llm, [first], reference.sampling)
        shows = not same_bits(_stack(damaged), _stack(reference.cold(first)))
        bench.holds(f"{restore}, control: a damaged state shows", shows and damaged.boundary > 0)


PARTS = {"engine": engine}
