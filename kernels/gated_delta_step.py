"""One-token gated delta updates in Triton, states in slots: decode, and the steps of a verify.

Per row and value head, with q and k normalised and q scaled by K^-0.5: S *= exp(g);
d = beta (v - S k); S += d k^T; o = S q. A program holds BV rows of one head's S [V, K] in float32
registers and runs the tokens of its row in order, storing the state after each in that token's
write slot. Decode is the case of one token a row. The norms are computed inside, and in
`gated_delta_net_step` the gates too. The convolution is a launch of its own: windows change in
place, and the channels of a key head would be read by the programs of all its value heads while one
of them writes.

Bytes: the state of each row read once and written once a token (2 x 64 KiB a value head at K = V =
128), which is nearly all there is; HBM bandwidth is the roof.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels import validate
from kernels.causal_conv1d import causal_conv_step
from kernels.gated_delta_chunk import check_gates, check_heads
from kernels.gates import sigmoid, softplus
from kernels.heads import split_heads
from kernels.ids import IdVector, as_ids
from kernels.launch import launch, require_runnable
from kernels.packs import one_token_each
from kernels.rows import check, row_stride, vector_width
from kernels.slot_rules import require

_L2_EPS = tl.constexpr(1e-6)
_BV = 32  # value rows of a program: columns of the state are independent, so this changes no bits
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["stride_q", "stride_k", "stride_v", "stride_g", "stride_beta"])
def _step(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_A_log,
    p_dt_bias,
    p_o,
    p_states,
    p_reads,
    p_writes,
    p_offsets,
    stride_q,
    stride_k,
    stride_v,
    stride_g,
    stride_beta,
    stride_slot: tl.constexpr,
    scale: tl.constexpr,
    R: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    VEC: tl.constexpr,
    RAW_GATES: tl.constexpr,
):
    """RAW_GATES: p_g and p_beta hold a and b, from which the gates are made."""
    i_v, i_hv, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start, end = tl.load(p_offsets + i_n), tl.load(p_offsets + i_n + 1)
    read = tl.load(p_reads + i_n)
    if start == end:
        return
    o_k, o_v = tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    p_out = p_o + i_hv * V + o_v
    if (end == start + 1) & (tl.load(p_writes + start) == 0):  # padding
        tl.store(p_out + start * HV * V, tl.zeros([BV], tl.float32))
        return
    p_state = p_states + i_hv * V * K + o_v[:, None] * K + o_k[None, :]  # [BV, K]
    b_s = tl.zeros([BV, K], tl.float32)
    if read >= 0:
        b_s = tl.load(p_state + read * stride_slot)  # wide
    o_key = (i_hv // R) * K + o_k
    for t in range(start, end):
        b_q = tl.load(p_q + tl.multiple_of(t * stride_q, VEC) + o_key).to(tl.float32)
        b_k = tl.load(p_k + tl.multiple_of(t * stride_k, VEC) + o_key).to(tl.float32)
        b_v = tl.load(p_v + tl.multiple_of(t * stride_v, VEC) + i_hv * V + o_v).to(tl.float32)
        g = tl.load(p_g + t * stride_g + i_hv).to(tl.float32)
        beta = tl.load(p_beta + t * stride_beta + i_hv).to(tl.float32)
        if RAW_GATES:
            A, dt_bias = tl.exp(tl.load(p_A_log + i_hv)), tl.load(p_dt_bias + i_hv)
            g = -A * softplus(g + dt_bias)
            beta = sigmoid(beta)
        b_q = b_q * (tl.rsqrt(tl.sum(b_q * b_q) + _L2_EPS) * scale)
        b_k = b_k * tl.rsqrt(tl.sum(b_k * b_k) + _L2_EPS)
        b_s = b_s * tl.exp(g)
        b_d = beta * (b_v - tl.sum(b_s * b_k[None, :], 1))
        b_s = b_s + b_d[:, None] * b_k[None, :]
        tl.store(p_out + t * HV * V, tl.sum(b_s * b_q[None, :], 1))
        write = tl.load(p_writes + t)
        if write > 0:
            tl.store(p_state + write * stride_slot, b_s)  # wide


def gated_delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    *,
    read_slots: IdVector,
    write_slots: IdVector,
    cu_seqlens: IdVector | None = None,
) -> torch.Tensor:
    """Rows of one token, or of the few of `cu_seqlens`: q, k [T, H, K], v [T, HV, V], g, beta
    [T, HV] float32 -> o [T, HV, V] float32; states [num_slots, HV, V, K] float32 in place.

    read_slots [N], write_slots [T]; a padding row gives zeros. See reference.gated_delta_step.
    """
    validate.gated_delta(
        q,
        k,
        v,
        g,
        beta,
        states,
        read_slots=read_slots,
        write_slots=write_slots,
        cu_seqlens=cu_seqlens,
    )
    check_gates(g, beta)
    slots = (read_slots, write_slots, cu_seqlens)
    return _launch(q, k, v, (g, beta, None, None), states, *slots)


def gated_delta_net_step(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    windows: torch.Tensor,
    states: torch.Tensor,
    *,
    num_key_heads: int,
    read_slots: IdVector,
    write_slots: IdVector,
    cu_seqlens: IdVector | None = None,
) -> torch.Tensor:
    """The mixer of a GDN layer for steps: convolution, then gates, norms and update in one launch.

    qkv [T, 2 H K + HV V], a, b [T, HV], conv_weight [C, W], A_log, dt_bias [HV] float32 -> o
    [T, HV, V] float32; windows and states in place.
    """
    slots: dict[str, Any] = dict(read_slots=read_slots, write_slots=write_slots)
    slots["cu_seqlens"] = cu_seqlens
    validate.gated_delta_net_step(
        qkv, a, b, conv_weight, A_log, dt_bias, windows, states, num_key_heads, slots
    )
    check(qkv, qkv=qkv, a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        require(x.dtype == torch.float32, f"dtype of {name}", torch.float32, x.dtype)
    check_heads(*split_heads(qkv, states, num_key_heads), states)
    qkv = causal_conv_step(qkv, conv_weight, windows, **slots)
    q, k, v = split_heads(qkv, states, num_key_heads)
    return _launch(q, k, v, (a, b, A_log, dt_bias), states, *slots.values())


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    states: torch.Tensor,
    read_slots: IdVector,
    write_slots: IdVector,
    cu_seqlens: IdVector | None,
) -> torch.Tensor:
    check_heads(q, k, v, states)
    require_runnable(q.device)
    g, beta, A_log, dt_bias = gates
    reads = as_ids(read_slots, "read_slots", q.device)
    writes = as_ids(write_slots, "write_slots", q.device)
    if cu_seqlens is None:
        offsets = one_token_each(len(reads), q.device)
    else:
        offsets = as_ids(cu_seqlens, "cu_seqlens", q.device)
    K = q.shape[2]
    T, HV, V = v.shape
    o = states.new_empty(T, HV, V)
    BV = min(_BV, V)
    launch(
        _step,
        (V // BV, HV, len(reads)),
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        o,
        states,
        reads.tensor,
        writes.tensor,
        offsets.tensor,
        *(row_stride(x) for x in (q, k, v, g, beta)),
        stride_slot=states.stride(0),
        scale=K**-0.5,
        R=HV // q.shape[1],
        HV=HV,
        K=K,
        V=V,
        BV=BV,
        VEC=vector_width(q),
        RAW_GATES=A_log is not None,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )
    return o
