"""How far is the engine from transformers, from a bare prefill, and from a plain copy, on this CPU?

One run, one set of weights (the 0.8B shape with a small vocabulary, random, bfloat16), every figure
a ratio of medians of alternating measurements. First the answers are compared, bit for bit, with
those of an engine without caching.

    python -m experiments.bench_cpu
    python -m experiments.bench_cpu --prefix-tokens 1024 --repeats 5

Exit status: 0, 1 if a bit differs, 2 for a refused option.
"""

import argparse
import copy
import gc
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from cache.ops import LinearStateCacheOp
from cache.state_pool import restore_linear_state_slots
from engine import LLM, SamplingParams
from engine.model_config import ModelConfig
from experiments.bare_model import BareModel
from experiments.bench_bits import differences
from experiments.host_work import host_work
from experiments.make_model import make_model
from experiments.options import count, results_file, thread_count
from experiments.results_io import RESULTS, ROOT, write_json
from experiments.timing import alternate
from experiments.transformers_baseline import TransformersBaseline

SUFFIX = 128
BUILT_IN = ROOT / "build" / "models" / "bench-0.8b"
GREEDY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


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
        self.hf = TransformersBaseline(model_dir)

    def tokens(self, count: int) -> list[int]:
        """Ids drawn from the whole vocabulary."""
        vocab_size = self.on.model_config.vocab_size
        return [self.rng.randrange(vocab_size) for _ in range(count)]

    def differences(self) -> list[str]:
        """Where caching changes a bit of what is timed here; none if all is well."""
        return differences(self.on, self.off, self.tokens, prefix=self.prefix, suffix=SUFFIX)

    def warm_up(self) -> None:
        """Pay for what only the first calls pay, in all three."""
        prompt = self.tokens(64)
        for llm in (self.on, self.off):
            llm.generate([prompt], GREEDY)
        self.hf.decode(self.hf.prefill(prompt), 1)

    def ttft(self, llm: LLM, prompt: list[int]) -> Callable[[], object]:
        return lambda: llm.generate([prompt], GREEDY)

    # ---- the measurements

    def cold_prefill(self) -> dict[str, float]:
        """A prompt that nobody has seen: engine (on, off) against transformers."""
        prompt = self.tokens(self.prefix + SUFFIX)
        new = [self.tokens(len(prompt)) for _ in range(self.repeats)]
        times = alternate(
            {
                "caching_off": self.ttft(self.off, prompt),
                "caching_on": lambda: self.on.generate([new.pop()], GREEDY),
                "transformers": lambda: self.hf.forward(prompt),
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
        depth, prefix, suffix = self.prefix, self.tokens(self.prefix), self.tokens(SUFFIX)
        repeats = 5 * self.repeats
        again = prefix + self.tokens(SUFFIX)
        for prompt in (prefix + self.tokens(SUFFIX), again):
            self.on.generate([prompt], GREEDY)
        new = [prefix + self.tokens(SUFFIX) for _ in range(repeats)]
        bare = BareModel(self.on.worker.model, prefix + self.tokens(SUFFIX), depth)
        hf_cache = self.hf.prefill(prefix)
        times = alternate(
            {
                "shared_prefix": lambda: self.on.generate([new.pop()], GREEDY),
                "bare_128": lambda: bare.prefill(depth, depth + 128),
                "identical": self.ttft(self.on, again),
                "bare_64": lambda: bare.prefill(depth + 64, depth + 128),
                "transformers_copy": lambda: self.hf.resume(hf_cache, suffix),
            },
            repeats,
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
        cache = self.hf.prefill(prompt)
        caches = [copy.deepcopy(cache) for _ in range(self.repeats)]  # all runs start at 512
        times = alternate(
            {
                "engine": lambda: self.on.generate([prompt], longer),
                "engine_first": self.ttft(self.on, prompt),
                "transformers": lambda: self.hf.decode(caches.pop(), 32),
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


# ---- command line


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Options. Bad ones exit with status 2."""
    parser = argparse.ArgumentParser(
        prog="bench_cpu", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, help="model directory (else 0.8B shape, random)")
    parser.add_argument(
        "--prefix-tokens", type=count, default=4096, help="shared, a multiple of 64 (%(default)s)"
    )
    parser.add_argument("--repeats", type=count, default=3, help="of each figure (%(default)s)")
    parser.add_argument("--threads", type=thread_count, help="of torch (2, or all if fewer)")
    parser.add_argument(
        "--json",
        type=results_file,
        default=RESULTS / "bench_cpu.json",
        help="results file (%(default)s)",
    )
    options = parser.parse_args(argv)
    options.threads = options.threads or min(2, os.cpu_count() or 1)
    if options.prefix_tokens % 64:
        parser.error(f"--prefix-tokens {options.prefix_tokens}: must be a multiple of 64")
    options.model = options.model or BUILT_IN
    try:
        if options.model == BUILT_IN and not BUILT_IN.exists():
            make_model(BUILT_IN, like="0.8b", vocab=8192, show_progress=True)
        options.model_config = ModelConfig.from_directory(options.model)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    longest = max(options.prefix_tokens + SUFFIX + 1, 512 + 33)
    if longest > (limit := options.model_config.max_position_embeddings):
        parser.error(f"{longest} tokens are needed; the model has {limit} positions")
    return options


def settings(options: argparse.Namespace, bench: Bench) -> dict[str, object]:
    """What was measured, for the results file."""
    model = options.model_config
    return {
        "repeats": options.repeats,
        "prefix_tokens": options.prefix_tokens,
        "model": {
            "name": options.model.resolve().name,
            "num_hidden_layers": model.num_hidden_layers,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "dtype": str(bench.on.worker.model.dtype).removeprefix("torch."),
        },
        "baseline": bench.hf.description,
    }


def measure(bench: Bench, console: Console) -> dict[str, dict[str, float]]:
    """All figures, each table printed when it is there."""
    results: dict[str, dict[str, float]] = {}
    for part in (bench.cold_prefill, bench.warm, bench.decode, bench.restore, host_work):
        with console.status(f"{part.__name__}: {part.__doc__.splitlines()[0]}"):
            results[part.__name__] = part()
        table = Table(title=part.__name__, show_header=False)
        for name, value in results[part.__name__].items():
            table.add_row(name, f"{value:.3g}")
        console.print(table)
    return results


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status: 1, and no figures, if caching changes a bit."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    console = Console()
    bench = Bench(options.model, options.repeats, options.prefix_tokens)
    with console.status("bits: the same with caching on and off?"):
        found = bench.differences()
    content = settings(options, bench) | {"bits_equal": not found}
    if found:
        write_json(options.json, content | {"differences": found})
        print("\n".join(["FAILED: caching changes the answers", *found]), file=sys.stderr)
        return 1
    bench.warm_up()
    gc.freeze()
    results = measure(bench, console)
    write_json(options.json, content | results)
    cold, warm = results["cold_prefill"], results["warm"]
    console.print(
        f"Cold prefill runs at {cold['speedup_over_transformers']:.2f} times transformers; "
        f"a request that shares {options.prefix_tokens} tokens costs "
        f"{warm['shared_prefix_over_bare_128']:.2f} bare prefills of its 128 new ones. "
        "The logits are those of an engine without caching, bit for bit."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
