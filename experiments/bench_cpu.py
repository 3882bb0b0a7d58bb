"""How far is the engine from transformers, from a bare prefill, and from a plain copy, on this CPU?

One run, one set of weights (the 0.8B shape with a small vocabulary, random, bfloat16), every figure
a ratio of medians of alternating measurements. `python -m experiments.bench_cpu [--json FILE]`.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from cache.cached_sequence import CachedSequence
from cache.composite_block_manager import CompositeBlockManager
from cache.hashing import HashDomain
from cache.kv_block_manager import KVBlockManager
from cache.linear_state_block_manager import LinearStateBlockManager
from cache.ops import LinearStateCacheOp
from cache.state_pool import restore_linear_state_slots
from engine import LLM, SamplingParams
from engine.batch import ScheduledRow, build_inputs
from engine.model import Qwen35Model
from engine.sequence import Sequence
from experiments.make_model import make_model
from experiments.results_io import write_json

SUFFIX = 128
ROOT = Path(__file__).resolve().parent
GREEDY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def alternate(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, measured in turn, so that a drift of the machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(seconds(run))
    return {name: statistics.median(values) for name, values in times.items()}


class Bench:
    """The engine with caching on and off, the bare model, and transformers, on one directory."""

    def __init__(self, model_dir: Path, repeats: int, prefix: int) -> None:
        self.repeats, self.prefix = repeats, prefix
        self.rng = random.Random(0)
        blocks = 6 * (prefix + SUFFIX) // 64
        sizes = dict(num_slots=48, num_blocks=blocks, max_num_seqs=4)
        self.on = LLM(model_dir, **sizes)
        self.off = LLM.from_model(
            self.on.worker.model,
            type(self.on.config)(enable_prefix_caching=False, **sizes),
        )
        self.hf = load_transformers(model_dir)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(256) for _ in range(count)]

    def ttft(self, llm: LLM, prompt: list[int]) -> Callable[[], object]:
        return lambda: llm.generate([prompt], GREEDY)

    # ---- the measurements

    def cold_prefill(self) -> dict[str, float]:
        """A prompt that nobody has seen: engine (on, off) against transformers."""
        prompt = self.tokens(self.prefix + SUFFIX)
        self.off.generate([prompt[:512]], GREEDY)
        times = alternate(
            {
                "caching_off": self.ttft(self.off, prompt),
                "caching_on": lambda: self.on.generate([self.tokens(self.prefix + SUFFIX)], GREEDY),
                "transformers": lambda: self.hf_forward(prompt),
            },
            self.repeats,
        )
        rate = {f"{name}_tokens_per_s": len(prompt) / t for name, t in times.items()}
        return rate | {
            "speedup_over_transformers": times["transformers"] / times["caching_off"],
            "cost_of_caching": times["caching_on"] / times["caching_off"] - 1,
        }

    def warm(self) -> dict[str, float]:
        """A served prefix and 128 new tokens; the same prompt again; bare prefills of 128 and of
        64 tokens at that depth; a hand-made cache copy in transformers."""
        prefix = self.tokens(self.prefix)
        self.on.generate([prefix + self.tokens(SUFFIX)], GREEDY)
        again = prefix + self.tokens(SUFFIX)
        self.on.generate([again], GREEDY)
        depth = self.prefix
        bare = BareModel(self.on.worker.model, prefix + self.tokens(SUFFIX), depth)
        hf_cache = self.hf_prefill(prefix)
        suffix = self.tokens(SUFFIX)
        times = alternate(
            {
                "shared_prefix": lambda: self.on.generate([prefix + self.tokens(SUFFIX)], GREEDY),
                "bare_128": lambda: bare.prefill(depth, depth + 128),
                "identical": self.ttft(self.on, again),
                "bare_64": lambda: bare.prefill(depth + 64, depth + 128),
                "transformers_copy": lambda: self.hf_resume(hf_cache, suffix),
            },
            5 * self.repeats,
        )
        return {f"{name}_ms": 1e3 * t for name, t in times.items()} | {
            "shared_prefix_over_bare_128": times["shared_prefix"] / times["bare_128"],
            "identical_over_bare_64": times["identical"] / times["bare_64"],
            "speedup_over_transformers_copy": times["transformers_copy"] / times["shared_prefix"],
        }

    def decode(self) -> dict[str, float]:
        """Tokens a second of one sequence after a prompt of 512, in runs of 32."""
        prompt = self.tokens(512)
        longer = SamplingParams(temperature=0, max_tokens=33, ignore_eos=True)
        cache = self.hf_prefill(prompt)
        times = alternate(
            {
                "engine": lambda: self.on.generate([prompt], longer),
                "engine_first": self.ttft(self.on, prompt),
                "transformers": lambda: self.hf_decode(cache, 32),
            },
            self.repeats,
        )
        per_token = (times["engine"] - times["engine_first"]) / 32
        return {
            "engine_tokens_per_s": 1 / per_token,
            "transformers_tokens_per_s": 32 / times["transformers"],
            "speedup_over_transformers": times["transformers"] / 32 / per_token,
        }

    def restore(self) -> dict[str, float]:
        """One slot, all layers, through the restore helper, against `copy_` of the same bytes."""
        pool = self.on.worker.state_pool
        source = torch.zeros(pool.shape.slot_bytes, dtype=torch.uint8)
        target = torch.ones_like(source)
        op = LinearStateCacheOp(46, True, 47, 64)
        times = alternate(
            {
                "restore": lambda: restore_linear_state_slots(pool, [op], [1]),
                "copy": lambda: target.copy_(source),
            },
            50,
        )
        return {
            "slot_mib": pool.shape.slot_bytes / 2**20,
            "restore_ms": 1e3 * times["restore"],
            "copy_gb_per_s": 2e-9 * pool.shape.slot_bytes / times["copy"],
            "restore_over_copy": times["restore"] / times["copy"],
        }

    # ---- transformers

    def hf_forward(self, prompt: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.hf(torch.tensor([prompt]), logits_to_keep=1).logits

    def hf_prefill(self, prompt: list[int]) -> object:
        from transformers import DynamicCache

        cache = DynamicCache(config=self.hf.config)
        with torch.inference_mode():
            self.hf(torch.tensor([prompt]), cache=cache, use_cache=True, logits_to_keep=1)
        return cache

    def hf_resume(self, cache: object, suffix: list[int]) -> torch.Tensor:
        import copy

        with torch.inference_mode():
            mine = copy.deepcopy(cache)
            ids = torch.tensor([suffix])
            return self.hf(ids, cache=mine, use_cache=True, logits_to_keep=1).logits

    def hf_decode(self, cache: object, num_tokens: int) -> None:
        token = torch.tensor([[1]])
        with torch.inference_mode():
            for _ in range(num_tokens):
                logits = self.hf(token, cache=cache, use_cache=True).logits
                token = logits[:, -1:].argmax(-1)


class BareModel:
    """The model alone: no scheduler, no cache, one sequence in slot 1 up to each wanted depth."""

    def __init__(self, model: Qwen35Model, prompt: list[int], depth: int) -> None:
        self.model, self.block_size = model, 64
        num_blocks = len(prompt) // 64 + 2
        self.pools = model.make_pools(4, num_blocks, self.block_size)
        self.seq = Sequence("bare", prompt, GREEDY)
        self.seq.block_table = list(range(1, num_blocks))
        self.slots = {depth: 1, depth + 64: 2}
        for reached, slot in self.slots.items():
            for start in range(0, reached, 512):
                end = min(reached, start + 512)
                self._run(start, end, -1 if start == 0 else slot, slot)

    def prefill(self, start: int, end: int) -> torch.Tensor:
        return self._run(start, end, self.slots[start], 3)

    @torch.inference_mode()
    def _run(self, start: int, end: int, read: int, write: int) -> torch.Tensor:
        row = ScheduledRow(self.seq, start, end, LinearStateCacheOp(write))
        inputs = build_inputs([row], [read], block_size=self.block_size)
        return self.model.forward(inputs, *self.pools)


def load_transformers(model_dir: Path) -> object:
    sys.modules.setdefault("fla", None)  # its kernels need a GPU, and transformers would take them
    from transformers import Qwen3_5ForCausalLM

    return Qwen3_5ForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()


def host_work(num_tokens: int = 32_768, stride: int = 64) -> dict[str, float]:
    """Hash, match and allocate for a long prompt: all of it, then stride by stride."""
    kv = KVBlockManager(num_tokens // stride + 2, HashDomain("kv", stride))
    linear = LinearStateBlockManager(
        256, HashDomain("linear", stride), checkpoint_every=512, max_num_seqs=16
    )
    manager = CompositeBlockManager(kv, linear, chunk_stride=stride, enable_prefix_caching=True)
    seq = CachedSequence(random.Random(0).randrange(8192) for _ in range(num_tokens))

    def advance() -> None:
        match = manager.match(seq)
        end = seq.num_computed_tokens + stride
        assert manager.allocate(seq, match, end)
        manager.plan_saves(seq, match, end)
        manager.commit(seq, end)

    first = seconds(advance)
    later = [seconds(advance) for _ in range(num_tokens // stride - 1)]
    again = CachedSequence(seq.token_ids)

    def hit() -> None:
        match = manager.match(again)
        assert match.boundary == num_tokens - stride
        assert manager.allocate(again, match, num_tokens)

    manager.release(seq)
    return {
        "first_ms": 1e3 * first,
        "further_stride_median_ms": 1e3 * statistics.median(later),
        "further_stride_max_ms": 1e3 * max(later),
        "full_hit_ms": 1e3 * seconds(hit),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT.parent / "build/models/bench-0.8b")
    parser.add_argument("--prefix-tokens", type=int, default=4096, help="a multiple of 64")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=ROOT / "results/bench_cpu.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    console = Console()
    if not args.model.exists():
        make_model(args.model, like="0.8b", vocab=8192)
    if args.prefix_tokens < 64 or args.prefix_tokens % 64:
        parser.error(f"--prefix-tokens {args.prefix_tokens}: must be a positive multiple of 64")
    bench = Bench(args.model, args.repeats, args.prefix_tokens)
    gc.freeze()
    results: dict[str, dict[str, float]] = {}
    parts = (bench.cold_prefill, bench.warm, bench.decode, bench.restore, host_work)
    for part in parts:
        with console.status(f"{part.__name__}: {part.__doc__.splitlines()[0]}"):
            results[part.__name__] = part()
        table = Table(title=part.__name__, show_header=False)
        for name, value in results[part.__name__].items():
            table.add_row(name, f"{value:.3g}")
        console.print(table)
    settings = {"repeats": args.repeats, "prefix_tokens": args.prefix_tokens}
    write_json(args.json, {**settings, **results})
    cold, warm = results["cold_prefill"], results["warm"]
    console.print(
        f"Cold prefill runs at {cold['speedup_over_transformers']:.2f} times transformers; "
        f"a request that shares {args.prefix_tokens} tokens costs "
        f"{warm['shared_prefix_over_bare_128']:.2f} bare prefills of its 128 new ones."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
