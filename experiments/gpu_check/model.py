"""A Qwen3.5 model with random weights that were never in a file, and inputs for its steps."""

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine.batch import ModelInputs, StateSlots
from engine.model import Qwen35Model
from engine.model_config import ModelConfig
from engine.weights import expected_tensors
from experiments.gpu_check.setup import Bench
from experiments.model_shapes import hf_config

BLOCK_SIZE = 64


def make_config(
    like: str, *, vocab: int, layers: int, overrides: dict[str, Any], dtype: torch.dtype
) -> ModelConfig:
    name = str(dtype).removeprefix("torch.")
    fields = hf_config(like, vocab=vocab, layers=layers, dtype=name, overrides=overrides)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(fields))
        return ModelConfig.from_directory(directory)


def random_weights(bench: Bench, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """As `random_weights.py` chooses them, drawn on the device: decays so slow that a wrong state
    shows in the logits a thousand tokens later."""
    for name, shape in expected_tensors(config).items():
        if name.endswith("A_log"):
            yield name, bench.uniform(*shape, low=math.log(0.01), high=math.log(4.0))
        elif name.endswith("dt_bias"):
            yield name, bench.uniform(*shape, low=-6.0, high=-2.0)
        elif name.endswith("linear_attn.norm.weight"):
            yield name, bench.normal(*shape, dtype=torch.float32).mul_(0.1).add_(1.0)
        elif "norm" in name:
            yield name, bench.normal(*shape, dtype=torch.float32).mul_(0.1)
        else:
            gain = 2.0 if name in ("embed_tokens.weight", "lm_head.weight") else 1.0
            yield name, bench.normal(*shape).mul_(gain / math.sqrt(shape[-1]))


def make_model(bench: Bench, config: ModelConfig) -> Qwen35Model:
    weights, device = random_weights(bench, config), bench.sizes.device
    return Qwen35Model(config, weights, dtype=bench.sizes.dtype, device=device, ops=bench.ops)


def prefill_inputs(bench: Bench, *, start: int, tokens: int, read: int, write: int) -> ModelInputs:
    """Tokens [start, start + tokens) of the one sequence, whose blocks are 1, 2, ..."""
    ids = bench.ids
    end = start + tokens
    table = list(range(1, -(-end // BLOCK_SIZE) + 1))
    none = ids([])
    return ModelInputs(
        token_ids=ids([7 + t % 200 for t in range(start, end)]).tensor,
        positions=ids(range(start, end)).tensor,
        kv_indices=ids(range(BLOCK_SIZE + start, BLOCK_SIZE + end)),
        logit_rows=ids([tokens - 1]).tensor,
        cu_seqlens=ids([0, tokens]),
        start_positions=ids([start]),
        prefill_block_tables=bench.tables([table]),
        prefill_slots=StateSlots(ids([read]), ids([write])),
        snapshot_slots=ids([-1] * -(-tokens // 64)),
        kv_lens=none,
        decode_block_tables=bench.tables([]),
        decode_slots=StateSlots(none, none),
    )


def decode_inputs(bench: Bench, *, rows: int, kv_len: int) -> ModelInputs:
    """One token of each row; row i has slot 1 + i and its own blocks."""
    ids = bench.ids
    blocks = -(-kv_len // BLOCK_SIZE)
    first = [1 + row * blocks for row in range(rows)]
    last = [(block + blocks - 1) * BLOCK_SIZE + (kv_len - 1) % BLOCK_SIZE for block in first]
    none, slots = ids([]), ids(range(1, 1 + rows))
    return ModelInputs(
        token_ids=ids([7 + row for row in range(rows)]).tensor,
        positions=ids([kv_len - 1] * rows).tensor,
        kv_indices=ids(last),
        logit_rows=ids(range(rows)).tensor,
        cu_seqlens=ids([0]),
        start_positions=none,
        prefill_block_tables=bench.tables([]),
        prefill_slots=StateSlots(none, none),
        snapshot_slots=none,
        kv_lens=ids([kv_len] * rows),
        decode_block_tables=bench.tables([range(b, b + blocks) for b in first]),
        decode_slots=StateSlots(slots, slots),
    )
