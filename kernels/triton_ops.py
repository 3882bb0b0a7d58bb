"""The Triton path: the ops of `torch_ops`, with the same signatures, from the kernels' modules."""

import torch

from kernels.attention import attention_prefill, write_kv
from kernels.attention_decode import attention_decode
from kernels.causal_conv1d import causal_conv_prefill, causal_conv_step
from kernels.gated_delta_chunk import gated_delta_prefill
from kernels.gated_delta_step import gated_delta_net_step, gated_delta_step
from kernels.gates import delta_gates, swiglu
from kernels.launch import INTERPRETED, require_runnable, target_of
from kernels.matmul import BatchInvariantLinear as linear
from kernels.norms import gated_rms_norm, qk_norm_rotary, rms_norm, rotary
from kernels.rows import MAX_WIDTH
from kernels.slot_rules import require
from kernels.state_restore import copy_blocks, copy_slots, zero_slots

__all__ = [
    "attention_decode",
    "attention_prefill",
    "causal_conv_prefill",
    "causal_conv_step",
    "check_model",
    "copy_blocks",
    "copy_slots",
    "delta_gates",
    "gated_delta_net_step",
    "gated_delta_prefill",
    "gated_delta_step",
    "gated_rms_norm",
    "linear",
    "qk_norm_rotary",
    "rms_norm",
    "rotary",
    "swiglu",
    "write_kv",
    "zero_slots",
]


def check_model(
    *,
    device: str,
    dtype: torch.dtype,
    hidden_size: int,
    head_dim: int,
    linear_key_head_dim: int,
    linear_value_head_dim: int,
) -> None:
    """ValueError at load, in the words of a model's config, for what an op would refuse later: a
    device without tiles, sizes that tiles don't take, and what the interpreter can't multiply."""
    require_runnable(torch.device(device))
    target_of(torch.device(device))
    interpreted = INTERPRETED and device == "cpu"
    exact = not (interpreted and dtype == torch.bfloat16)
    require(exact, "dtype", "float32 (Triton's interpreter multiplies no bfloat16)", dtype)
    require(hidden_size <= MAX_WIDTH, "hidden_size", f"at most {MAX_WIDTH}", hidden_size)
    widths = dict(
        head_dim=head_dim,
        linear_key_head_dim=linear_key_head_dim,
        linear_value_head_dim=linear_value_head_dim,
    )
    for name, width in widths.items():
        fits = width >= 16 and width & (width - 1) == 0
        require(fits, f"{name} for Triton kernels", "a power of two from 16 up", width)
