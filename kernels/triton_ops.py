"""The Triton path: the ops of `torch_ops`, with the same signatures, from the kernels' modules."""

from kernels.attention import attention_prefill, write_kv
from kernels.attention_decode import attention_decode
from kernels.causal_conv1d import causal_conv_prefill, causal_conv_step
from kernels.gated_delta_chunk import gated_delta_prefill
from kernels.gated_delta_step import gated_delta_net_step, gated_delta_step
from kernels.gates import delta_gates, swiglu
from kernels.matmul import BatchInvariantLinear as linear
from kernels.norms import gated_rms_norm, qk_norm_rotary, rms_norm, rotary
from kernels.state_restore import copy_slots, zero_slots

__all__ = [
    "attention_decode",
    "attention_prefill",
    "causal_conv_prefill",
    "causal_conv_step",
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
