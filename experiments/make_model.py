"""Can a model of a published shape be had without a download? Writes one with random weights.

The directory loads in this engine and in transformers. Decays are slow and every tensor is random,
so a wrong recurrent state, convolution window or K/V row changes the logits. Weights are drawn and
written a few megabytes at a time: memory does not grow with the model.

    python -m experiments.make_model --like 0.8b --vocab 8192 --layers 8 build/models/small
"""

import argparse
import json
import math
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.model_config import ModelConfig
from engine.tokenizer import BYTE_ALPHABET
from engine.weights import plan_weights
from experiments import model_shapes
from experiments.model_shapes import MIN_VOCAB_SIZE, SHAPES, SPECIAL_TOKENS
from experiments.random_weights import CODES, plan_tensors, write_weights

DEFAULT_MAX_SHARD_MB = 512

_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    DownloadColumn(binary_units=True),
    TimeRemainingColumn(),
)


def make_model(
    out: str | Path,
    *,
    like: str,
    vocab: int | None = None,
    layers: int | None = None,
    seed: int = 0,
    dtype: str | None = None,
    overrides: dict[str, Any] | None = None,
    draft: bool = False,
    max_shard_mb: float = DEFAULT_MAX_SHARD_MB,
    show_progress: bool = False,
) -> Path:
    """Write a model directory to `out` and return its path.

    `overrides` replaces fields of `config.json`. draft: with a multi-token-prediction head. The
    directory appears all at once, when it is complete. Raises ValueError for a shape that can't be,
    or an `out` that holds something.
    """
    out = Path(out)
    config = model_shapes.hf_config(
        like, vocab=vocab, layers=layers, dtype=dtype, overrides=overrides or {}
    )
    if config["dtype"] not in CODES:
        raise ValueError(f"--dtype is {config['dtype']!r}; expected one of {', '.join(CODES)}")
    if max_shard_mb <= 0:
        raise ValueError(f"--max-shard-mb is {max_shard_mb}; expected more than 0")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty directory; expected a new path")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.parent / f".{out.name}.{uuid.uuid4().hex}.tmp"
    temporary.mkdir()
    try:
        _write_config_files(temporary, config)
        plan = plan_tensors(ModelConfig.from_directory(temporary), config["dtype"], draft=draft)
        with Progress(*_COLUMNS, disable=not show_progress) as progress:
            task = progress.add_task(out.name, total=sum(tensor.num_bytes for tensor in plan))
            write_weights(
                temporary,
                plan,
                seed=seed,
                max_shard_bytes=int(max_shard_mb * 2**20),
                advance=lambda num_bytes: progress.advance(task, num_bytes),
            )
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return out


def _write_config_files(directory: Path, config: dict[str, Any]) -> None:
    files: dict[str, dict[str, Any]] = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": config["eos_token_id"]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL_TOKENS[0],
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    byte_tokenizer().save(str(directory / "tokenizer.json"))


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, its id the byte's value; then the special tokens. No merges."""
    tokenizer = Tokenizer(models.BPE(vocab=BYTE_ALPHABET, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status. A refused argument is one line and status 2."""
    parser = argparse.ArgumentParser(description="write a seeded random-weight model directory")
    parser.add_argument("out", type=Path, help="new directory")
    parser.add_argument("--like", required=True, help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--vocab", type=int, help=f"vocabulary size, at least {MIN_VOCAB_SIZE}")
    parser.add_argument("--layers", type=int, help="number of layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", help=f"one of {', '.join(CODES)}")
    parser.add_argument("--mtp", action="store_true", help="with a multi-token-prediction head")
    parser.add_argument("--max-shard-mb", type=float, default=DEFAULT_MAX_SHARD_MB)
    args = parser.parse_args(argv)
    try:
        out = make_model(
            args.out,
            like=args.like,
            vocab=args.vocab,
            layers=args.layers,
            seed=args.seed,
            dtype=args.dtype,
            draft=args.mtp,
            max_shard_mb=args.max_shard_mb,
            show_progress=True,
        )
    except (ValueError, OSError) as error:
        print(f"make_model: {error}", file=sys.stderr)
        return 2
    plan = plan_weights(out, ModelConfig.from_directory(out))
    num_parameters = sum(math.prod(tensor.shape) for tensor in plan.tensors.values())
    print(f"{out}: {num_parameters:,} parameters, {plan.num_bytes:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
