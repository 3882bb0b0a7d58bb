"""The CPU path in plain torch: chunked gated delta rule, convolution, norms, rotary, attention.

Exactness rests on one rule: an op that mixes tokens (convolution, delta rule, attention) runs one
sequence at a time in tiles of `KERNEL_CHUNK` tokens counted from token 0, at one fixed shape. The
same tile is then the same instructions, whatever else is in the batch and wherever a prefill was
cut. Ops on packed rows use `elementwise`, whose values do not depend on an element's position.

Shapes and the slot vectors are those of `reference.py`.
"""

from typing import Any

import torch

from kernels import validate
from kernels.constants import KERNEL_CHUNK
from kernels.elementwise import sigmoid, silu, softplus
from kernels.heads import split_heads
from kernels.ids import IdVector
from kernels.linear import PackedLinear as linear
from kernels.torch_attention import attention_decode, attention_prefill, write_kv
from kernels.torch_conv import causal_conv_prefill, causal_conv_step

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

_L2_EPS = 1e-6


def check_model(
    *,
    device: str,
    dtype: torch.dtype,
    hidden_size: int,
    head_dim: int,
    linear_key_head_dim: int,
    linear_value_head_dim: int,
) -> None:
    """What a model must be for these ops: nothing beyond what `ModelConfig` says."""


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [R, 2 * F] = (gate | up); returns [R, F] in the same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Zero-centred RMSNorm x * rsqrt(mean(x^2) + eps) * (1 + weight): float32 inside, x's dtype."""
    return _normalised(x, eps).mul_(weight.float() + 1.0).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """RMSNorm(x) * weight * silu(gate) over the last dim: float32 inside, gate's dtype out."""
    normed = _normalised(x, eps).mul_(weight.float())
    return normed.mul_(silu(gate.float())).to(gate.dtype)


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate-half inside the first 2 * cos.shape[-1] dims of x [R, heads, D]; the rest passes."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    x1, x2 = x[..., :half].float(), x[..., half : 2 * half].float()
    out = x.clone()
    out[..., :half] = x1 * cos - x2 * sin
    out[..., half : 2 * half] = x2 * cos + x1 * sin
    return out


def qk_norm_rotary(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """`rotary` of `rms_norm`, for the queries and keys [R, heads, D] of attention."""
    return rotary(rms_norm(x, weight, eps=eps), cos, sin)


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(g, beta), float32 [R, HV]: g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b)."""
    g = softplus(a.float() + dt_bias.float()).mul_(-torch.exp(A_log.float()))
    return g, sigmoid(b.float())


def _l2_normalised(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True).add_(_L2_EPS).rsqrt_().mul_(scale))


class _ChunkRule:
    """Buffers of one chunk of the delta rule in WY form, all heads at once, at one fixed shape.

    With G the running sum of g inside the chunk and decay D[i, j] = exp(G_i - G_j) for i >= j:
    A = beta_i D k_i.k_j (i > j), U = (I + A)^-1 (beta (V - exp(G) K S^T)), the chunk's output is
    exp(G) Q S^T + (D q_i.k_j) U and its state S exp(G_last) + (U exp(G_last - G))^T K.
    Source: Yang et al., "Gated Delta Networks" (2024), section 3.
    """

    def __init__(self, H: int, HV: int, K: int, V: int) -> None:
        C = KERNEL_CHUNK
        self.groups = HV // H
        self.scale = K**-0.5
        self.qk = torch.zeros(H, 2 * C, K)  # rows [0, C) are q, [C, 2C) are k
        self.v = torch.zeros(HV, C, V)
        self.g = torch.zeros(HV, C)
        self.beta = torch.zeros(HV, C)
        self.eye = torch.eye(C).expand(HV, C, C).contiguous()
        self.above = torch.ones(C, C, dtype=torch.bool).triu_(1)

    def load(self, n: int, *tensors: torch.Tensor) -> None:
        """Take n tokens of q, k, v, g, beta; the rest is zeros, which change nothing."""
        C = KERNEL_CHUNK
        buffers = (self.qk[:, :C], self.qk[:, C:], self.v, self.g, self.beta)
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer[:, :n] = tensor.transpose(0, 1)
            buffer[:, n:] = 0.0

    def run(self, state: torch.Tensor) -> torch.Tensor:
        """Advance state [HV, V, K] in place; returns the chunk's outputs [HV, C, V]."""
        C, r = KERNEL_CHUNK, self.groups
        qk = _l2_normalised(self.qk)
        qk[:, :C].mul_(self.scale)
        k = qk[:, C:]
        dots = torch.bmm(qk, k.transpose(1, 2))  # [H, 2C, C]
        G = self.g.cumsum(-1)  # [HV, C]
        decay = (G[:, :, None] - G[:, None, :]).masked_fill_(self.above, -torch.inf).exp_()
        heads = (qk.shape[0], r, C, C)
        p = decay.view(heads) * dots[:, None, :C]
        a = (decay * self.beta[:, :, None]).view(heads).mul_(dots[:, None, C:])
        inverse = torch.linalg.solve_triangular(
            a.view(-1, C, C), self.eye, upper=False, unitriangular=True
        )
        if r > 1:
            qk = qk.repeat_interleave(r, 0)
            k = qk[:, C:]
        from_state = torch.bmm(qk, state.transpose(1, 2))  # [HV, 2C, V]
        growth = G.exp()[..., None]
        u = (self.v - from_state[:, C:].mul_(growth)).mul_(self.beta[..., None])
        u = torch.bmm(inverse, u)
        out = from_state[:, :C].mul_(growth).baddbmm_(p.view(-1, C, C), u)
        last = G[:, -1, None]
        state.mul_(last.exp()[..., None])
        state.baddbmm_(u.mul_((last - G).exp_()[..., None]).transpose(1, 2), k)
        return out


def gated_delta_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    *,
    cu_seqlens: IdVector,
    read_slots: IdVector,
    write_slots: IdVector,
    snapshot_slots: IdVector,
) -> torch.Tensor:
    """Chunked gated delta rule of packed sequences; see reference.gated_delta_prefill."""
    segments = validate.gated_delta(
        q,
        k,
        v,
        g,
        beta,
        states,
        cu_seqlens=cu_seqlens,
        read_slots=read_slots,
        write_slots=write_slots,
        snapshot_slots=snapshot_slots,
    )
    reads, writes, snaps = validate.as_lists(
        read_slots=read_slots, write_slots=write_slots, snapshot_slots=snapshot_slots
    )
    rule = _ChunkRule(q.shape[1], v.shape[1], q.shape[2], v.shape[2])
    scratch = torch.empty_like(states[0])
    out = torch.empty(v.shape, dtype=torch.float32)
    chunk = 0
    for (start, end), read, write in zip(segments, reads, writes, strict=True):
        state = states[write] if write > 0 else scratch
        if read != write:
            state.copy_(states[read]) if read >= 0 else state.zero_()
        for lo in range(start, end, KERNEL_CHUNK):
            hi = min(lo + KERNEL_CHUNK, end)
            rule.load(hi - lo, *(t[lo:hi] for t in (q, k, v, g, beta)))
            out[lo:hi] = rule.run(state)[:, : hi - lo].transpose(0, 1)
            if snaps[chunk] > 0:
                states[snaps[chunk]] = state
            chunk += 1
    return out


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
    """One token of each of N rows, or a few in order; see reference.gated_delta_step."""
    segments = validate.gated_delta(
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
    reads, writes = validate.as_lists(read_slots=read_slots, write_slots=write_slots)
    r = v.shape[1] // q.shape[1]
    q = _l2_normalised(q.float(), q.shape[-1] ** -0.5).repeat_interleave(r, 1)  # [N, HV, K]
    k = _l2_normalised(k.float()).repeat_interleave(r, 1)
    v, decay = v.float(), g.exp()
    kq = torch.stack([k, q], dim=2)  # [N, HV, 2, K]
    k_dot_q = (k * q).sum(-1, keepdim=True)
    out = torch.zeros(v.shape, dtype=torch.float32)
    scratch = torch.empty_like(states[0])
    for (start, end), read in zip(segments, reads, strict=True):
        before = states[read] if read >= 0 else None
        for t in range(start, end):
            if end - start == 1 and writes[t] == 0:
                continue  # padding
            state = states[writes[t]] if writes[t] > 0 else scratch
            if before is None:
                state.zero_()
            else:
                torch.mul(before, decay[t, :, None, None], out=state)
            from_k, from_q = torch.bmm(kq[t], state.transpose(1, 2)).unbind(1)  # [HV, V] each
            d = (v[t] - from_k).mul_(beta[t, :, None])
            torch.addcmul(from_q, d, k_dot_q[t], out=out[t])  # S' q = S q + d (k . q)
            state.addcmul_(d[..., None], k[t, :, None, :])
            before = state
    return out


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
    """The mixer of a GDN layer for steps: convolution, gates and update.

    qkv [T, C] with C = 2 H K + HV V, the heads of q, k and v side by side; a, b [T, HV] raw.
    Returns o [T, HV, V] float32.
    """
    slots: dict[str, Any] = dict(read_slots=read_slots, write_slots=write_slots)
    slots["cu_seqlens"] = cu_seqlens
    validate.gated_delta_net_step(
        qkv, a, b, conv_weight, A_log, dt_bias, windows, states, num_key_heads, slots
    )
    qkv = causal_conv_step(qkv, conv_weight, windows, **slots)
    q, k, v = split_heads(qkv, states, num_key_heads)
    g, beta = delta_gates(a, b, A_log, dt_bias)
    return gated_delta_step(q, k, v, g, beta, states, **slots)


def copy_slots(arena: torch.Tensor, sources: list[int], destinations: list[int]) -> None:
    """Copy whole slots (all layers, state and window) inside arena [num_slots, slot_bytes]."""
    validate.slot_copies(arena, sources, destinations)
    for source, destination in zip(sources, destinations, strict=True):
        arena[destination].copy_(arena[source])


def copy_blocks(kv_cache: torch.Tensor, sources: list[int], destinations: list[int]) -> None:
    """Copy whole K/V blocks, all layers, inside kv_cache [layers, 2, num_blocks, ...]."""
    copy_slots(*validate.block_copies(kv_cache, sources, destinations))


def zero_slots(arena: torch.Tensor, slots: list[int]) -> None:
    """Zero whole slots of arena [num_slots, slot_bytes]."""
    validate.zeroed_slots(arena, slots)
    for slot in slots:
        arena[slot].zero_()
