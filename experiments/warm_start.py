"""How much sooner does the first token come when the document was read before, and is it the same?

Several questions about one document of facts are answered by the built-in model with caching off,
then twice with caching on: the first time fills the cache, the second hits it. All of that one
request at a time, and again with all requests at once. Token ids and every row of logits are
compared bit for bit.

    python -m experiments.warm_start
    python -m experiments.warm_start --model DIR --prefix-tokens 8192 --restore copy

Exit status: 0, 1 if a bit differs or a request that must hit does not, 2 for a refused option.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import torch

from cache.placement import CHECKPOINT_EVERY
from engine import LLM, EngineConfig
from engine.builtin import BUILTIN_MODEL_DIR
from engine.config import DEVICES, Restore
from engine.model_config import ModelConfig
from experiments.cold_and_warm import WARM_UP_TOKENS, Measured, failures, measure
from experiments.command_line import new_parser, refused
from experiments.console import console, passes
from experiments.options import count
from experiments.outcome import publish, remove_results
from experiments.recall_documents import Fact
from experiments.recall_workload import (
    LONGEST_QUESTION,
    document_tokens,
    fitting_document,
    question_prompts,
    spread_facts,
)
from experiments.results_io import memory_bytes
from experiments.shared_prompts import shared_prompts
from experiments.warm_start_report import (
    answers,
    draw,
    request_rows,
    results,
    stats_line,
    table,
)

DOCUMENT_SEED = "warm start"
DEFAULT_SUFFIX_TOKENS = 160


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    screen = console()
    screen.print(_introduction(options))
    try:
        cold, prompts, facts = _load(options)
    except (ValueError, OSError) as error:
        return refused("warm_start", error)
    remove_results(options.json)
    measured = _measure(cold, prompts, options)
    failed = failures(measured, options.engine_config, prefix_tokens=options.prefix_tokens)
    rows = request_rows(measured)
    screen.print(table(rows))
    if facts:
        screen.print(answers(measured, facts))
    for mode, stats in measured.stats.items():
        screen.print(stats_line(mode, stats))
    name, config = options.model_dir.resolve().name, options.engine_config
    content = results(name, cold.model_config, config, rows, measured, failed)
    return publish(options.json, content, failed, draw)


def _introduction(options: argparse.Namespace) -> str:
    model = options.model_config
    if options.model is None:
        what, length = "built-in model", f"at most {options.suffix_tokens}"
    else:
        what, length = str(options.model), str(options.suffix_tokens)
    return (
        f"{what}: {model.num_linear_layers} recurrent and {model.num_full_layers} attention "
        f"layers; {options.questions} questions of {length} tokens on a document of "
        f"{options.prefix_tokens}; pools of {pool_bytes(options) / 1e6:.0f} MB; "
        f"{options.threads} thread(s)."
        + ("" if options.model is None else "\nNo answer is shown: only the bits matter.")
    )


def _load(options: argparse.Namespace) -> tuple[LLM, list[list[int]], list[Fact]]:
    """The engine without caching, the prompts and, of the built-in model, the facts asked for.

    `options.prefix_tokens` becomes what the prompts share.
    """
    cold = LLM(
        options.model_dir, **asdict(options.engine_config) | {"enable_prefix_caching": False}
    )
    if options.model is None:
        document = fitting_document(cold.tokenizer, DOCUMENT_SEED, max_tokens=options.prefix_tokens)
        facts = spread_facts(document, options.questions)
        options.prefix_tokens = document_tokens(cold.tokenizer, document)
        return cold, list(question_prompts(cold.tokenizer, document, facts)), facts
    prompts = shared_prompts(
        cold.tokenizer,
        cold.model_config.vocab_size,
        prefix_tokens=options.prefix_tokens,
        suffix_tokens=options.suffix_tokens,
        num_questions=options.questions,
    )
    return cold, prompts, []


def _measure(cold: LLM, prompts: list[list[int]], options: argparse.Namespace) -> Measured:
    with passes(len(prompts) * options.max_tokens) as start_pass:
        return measure(
            cold,
            options.engine_config,
            prompts,
            max_tokens=options.max_tokens,
            ignore_eos=options.model is not None,
            start_pass=start_pass,
        )


# ---- options


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Options, with `model_config` and `engine_config` added. Bad ones exit with status 2."""
    parser = new_parser("warm_start", __doc__, small=None)
    parser.add_argument("--model", type=Path, help="model directory (default: the built-in)")
    parser.add_argument("--prefix-tokens", type=count, default=4000, help="of the document")
    parser.add_argument(
        "--suffix-tokens",
        type=count,
        help=f"of each question, with --model (default {DEFAULT_SUFFIX_TOKENS})",
    )
    parser.add_argument("--questions", type=count, default=4, help="on the document")
    parser.add_argument("--max-tokens", type=count, default=8, help="new tokens of each answer")
    parser.add_argument("--checkpoint-every", type=count, default=CHECKPOINT_EVERY, help="tokens")
    parser.add_argument(
        "--restore", choices=get_args(Restore), default="redirect", help="read, or copied first"
    )
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="where the model runs")
    options = parser.parse_args(argv)
    try:
        options.suffix_tokens = _suffix_tokens(options)
        options.model_dir = options.model or BUILTIN_MODEL_DIR
        options.model_config = ModelConfig.from_directory(options.model_dir)
        options.engine_config = _engine_config(options)
        _check(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return options


def _suffix_tokens(options: argparse.Namespace) -> int:
    if options.model is not None:
        return int(options.suffix_tokens or DEFAULT_SUFFIX_TOKENS)
    if options.suffix_tokens is not None:
        raise ValueError("--suffix-tokens needs --model: the built-in model gets whole questions")
    return LONGEST_QUESTION


def _engine_config(options: argparse.Namespace) -> EngineConfig:
    """Pools with room for every state and block of one mode and its warm-up."""
    every, num_seqs = options.checkpoint_every, options.questions
    defaults = EngineConfig(checkpoint_every=every, max_num_seqs=num_seqs)
    prompt_tokens = options.prefix_tokens + options.suffix_tokens
    longest = prompt_tokens + options.max_tokens
    on_document = options.prefix_tokens // every + 1  # the last where the questions part
    on_question = options.suffix_tokens // every + 3
    on_warm_up = WARM_UP_TOKENS // every + 2
    in_flight = defaults.max_num_batched_tokens // defaults.chunk_stride
    checkpoints = on_document + num_seqs * on_question + on_warm_up + in_flight
    return EngineConfig(
        checkpoint_every=every,
        max_num_seqs=num_seqs,
        restore=options.restore,
        device=options.device,
        num_slots=1 + 2 * num_seqs + checkpoints,
        num_blocks=1 + (num_seqs + 1) * (longest // defaults.block_size + 1),
    )


def _check(options: argparse.Namespace) -> None:
    prompt_tokens = options.prefix_tokens + options.suffix_tokens
    smallest = options.engine_config.chunk_stride + 1
    limit = options.model_config.max_position_embeddings
    split = f"--prefix-tokens {options.prefix_tokens} and --suffix-tokens {options.suffix_tokens}"
    if prompt_tokens < smallest:
        raise ValueError(
            f"{split} make a prompt of {prompt_tokens} tokens; "
            f"expected at least {smallest}, the smallest that can hit"
        )
    if prompt_tokens + options.max_tokens > limit:
        raise ValueError(
            f"{split} with --max-tokens {options.max_tokens} need {prompt_tokens} + "
            f"{options.max_tokens} positions; the model has {limit}"
        )
    needed, there = pool_bytes(options), memory_bytes()
    if needed > there:
        raise ValueError(
            f"{split} for --questions {options.questions} need pools of {needed / 1e9:.1f} "
            f"GB; this machine has {there / 1e9:.1f} GB of memory"
        )
    options.json.parent.mkdir(parents=True, exist_ok=True)


def pool_bytes(options: argparse.Namespace) -> int:
    """Memory of the state pool and the K/V cache."""
    model, config = options.model_config, options.engine_config
    itemsize = 2 if model.weights_dtype == "bfloat16" else 4
    slot_bytes = model.recurrent_state_bytes + model.conv_state_bytes(itemsize)
    block_bytes = config.block_size * model.kv_bytes_per_token(itemsize)
    return config.num_slots * slot_bytes + config.num_blocks * block_bytes


if __name__ == "__main__":
    sys.exit(main())
