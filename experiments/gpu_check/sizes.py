"""How much does a check of the kernels run, on a GPU and in Triton's interpreter?

`FULL` are real shapes for a GPU, `TINY` is the same for the interpreter.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Bars:
    """Largest relative errors in the norm. `rounded`: one rounding to the dtype of the result."""

    recurrent: float
    chunked: float
    attention: float
    matmul: float
    rounded: float
    float32: float = 1e-5


@dataclass(frozen=True)
class Times:
    """How much is timed. Calls rotate through more than `rotated_bytes`, so that no cache holds it.

    hit: (tokens in the checkpoint, tokens after it) of a step of the model that resumes.
    """

    copied_bytes: int
    product: int
    rotated_bytes: int
    restored_slots: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    snapshot_every: int
    batches: tuple[int, ...]
    attention_tokens: int
    attention_cached: tuple[int, ...]
    decode_rows: tuple[int, ...]
    kv_len: int
    matmul_rows: tuple[int, ...]
    model: str
    layers: int
    model_overrides: dict[str, Any]
    model_rows: tuple[int, ...]
    model_kv_len: int
    hit: tuple[int, int]


@dataclass(frozen=True)
class Sizes:
    """How much of everything. Ratios: value heads of a key head, the model's own one first.

    attention_prefills: (tokens, first position). matmuls: (outputs, inputs) of dense layers.
    prompts of the engine: `prompt_tokens`, of which others share `shared_tokens`.
    """

    name: str
    device: str
    dtype: torch.dtype
    bars: Bars
    key_heads: int
    ratios: tuple[int, ...]
    arena_slots: int  # on a GPU: more than 2**31 words
    width: int  # K and V
    heads: int
    kv: int
    D: int
    rotary_dim: int
    hidden: int
    mlp: int
    state_layers: int
    rows: int  # of a rowwise op
    prefill_lengths: tuple[int, ...]
    step_rows: int
    attention_prefills: tuple[tuple[int, int], ...]
    kv_lens: tuple[int, ...]
    matmuls: tuple[tuple[int, int], ...]
    matmul_rows: tuple[int, ...]
    split_tokens: int
    model: str
    model_overrides: dict[str, Any]
    vocab: int
    prompt_tokens: int
    shared_tokens: int
    checkpoint_every: int
    max_num_batched_tokens: int
    max_tokens: int
    times: Times

    @property
    def channels(self) -> int:
        """Of the convolution, at the model's own ratio."""
        return (2 + self.ratios[0]) * self.key_heads * self.width


_TINY_MODEL: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 256,
}

FULL = Sizes(
    name="9B layer, bfloat16",
    device="cuda",
    dtype=torch.bfloat16,
    bars=Bars(recurrent=0.002, chunked=0.005, attention=0.01, matmul=0.01, rounded=0.003),
    key_heads=16,
    ratios=(2, 1, 3, 4),
    arena_slots=180,
    width=128,
    heads=16,
    kv=4,
    D=256,
    rotary_dim=64,
    hidden=4096,
    mlp=12_288,
    state_layers=24,
    rows=300,
    prefill_lengths=(1, 63, 64, 65, 130, 1000),
    step_rows=64,
    attention_prefills=((1, 0), (63, 0), (64, 64), (65, 0), (130, 128), (300, 2048)),
    kv_lens=(1, 63, 64, 65, 255, 256, 257, 1000, 2303, 4096),
    matmuls=((12_352, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288)),
    matmul_rows=(1, 7, 64, 300),
    split_tokens=1000,
    model="0.8b",
    model_overrides={"max_position_embeddings": 4096},
    vocab=2048,
    prompt_tokens=1500,
    shared_tokens=1100,
    checkpoint_every=256,
    max_num_batched_tokens=512,
    max_tokens=6,
    times=Times(
        copied_bytes=2 << 30,
        product=8192,
        rotated_bytes=256 << 20,
        restored_slots=(1, 4, 16),
        prefill_tokens=(2048, 8192, 32_768),
        snapshot_every=512,
        batches=(1, 8, 64, 256),
        attention_tokens=512,
        attention_cached=(0, 8192),
        decode_rows=(1, 64),
        kv_len=8192,
        matmul_rows=(1, 64, 512, 4096),
        model="9b",
        layers=8,
        model_overrides={"max_position_embeddings": 4096},
        model_rows=(1, 64),
        model_kv_len=2048,
        hit=(1024, 512),
    ),
)
TINY = Sizes(
    name="tiny, float32, interpreted",
    device="cpu",
    dtype=torch.float32,
    bars=Bars(recurrent=1e-5, chunked=1e-5, attention=1e-5, matmul=1e-5, rounded=1e-5),
    key_heads=1,
    ratios=(2, 1, 3, 4),
    arena_slots=9,
    width=16,
    heads=4,
    kv=2,
    D=16,
    rotary_dim=4,
    hidden=64,
    mlp=96,
    state_layers=2,
    rows=9,
    prefill_lengths=(1, 65, 130),
    step_rows=8,
    attention_prefills=((1, 0), (65, 0), (3, 64)),
    kv_lens=(1, 64, 65, 257),
    matmuls=((80, 64), (64, 96)),
    matmul_rows=(1, 7, 20),
    split_tokens=130,
    model="tiny",
    model_overrides=_TINY_MODEL,
    vocab=260,
    prompt_tokens=70,
    shared_tokens=66,
    checkpoint_every=64,
    max_num_batched_tokens=128,
    max_tokens=2,
    times=Times(
        copied_bytes=1 << 16,
        product=64,
        rotated_bytes=1 << 14,
        restored_slots=(1, 4),
        prefill_tokens=(128,),
        snapshot_every=64,
        batches=(1, 4),
        attention_tokens=5,
        attention_cached=(0, 64),
        decode_rows=(1, 2),
        kv_len=70,
        matmul_rows=(1, 20),
        model="tiny",
        layers=2,
        model_overrides=_TINY_MODEL,
        model_rows=(1, 2),
        model_kv_len=70,
        hit=(64, 3),
    ),
)
