"""The specification: every op of this package, one token and one row at a time.

Read it beside the equations; it is slow on purpose and no kernel imports it. Arithmetic is float64
where the inputs are float64 and float32 otherwise, and a result is rounded once, at the end. The
state-free cores (`causal_conv`, `gated_delta_rule`, `attend`) are values in, values out; the ops
around them only say which slot is read and which is written. The output rows of a padding row
(write slot 0) mean nothing. What is refused: `validate.py` and `slot_rules.py`.

Layouts: packed rows without a batch dim. T tokens, N rows, C channels, H key heads, HV value heads,
K and V their widths. `states` [num_slots, HV, V, K] and `windows` [num_slots, W-1, C] belong to the
caller and are written in place.
"""

import torch

from kernels import validate
from kernels.constants import KERNEL_CHUNK
from kernels.ids import IdVector
from kernels.reference_attention import (
    attend,
    attention_decode,
    attention_prefill,
    write_kv,
)

__all__ = [
    "attend",
    "attention_decode",
    "attention_prefill",
    "causal_conv",
    "causal_conv_prefill",
    "causal_conv_step",
    "copy_blocks",
    "copy_slots",
    "delta_gates",
    "gated_delta_prefill",
    "gated_delta_rule",
    "gated_delta_step",
    "gated_rms_norm",
    "rms_norm",
    "rotary",
    "write_kv",
    "zero_slots",
]

L2_EPS = 1e-6


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the precision of the arithmetic: float64 stays, all else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x)."""
    return x * torch.sigmoid(x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Zero-centred RMS norm over the last dim: x * rsqrt(mean(x^2) + eps) * (1 + weight)."""
    validate.shape(weight, "weight", x.shape[-1])
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * (1 + weight.to(y.dtype))).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """RMS norm over the last dim, times weight, times silu(gate); in the dtype of the gate."""
    validate.shape(weight, "weight", x.shape[-1])
    validate.shape(gate, "gate", *x.shape)
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight.to(y.dtype) * silu(gate.to(y.dtype))).to(gate.dtype)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + rot/2) of the first rot dims of x [R, heads, D]; cos, sin [R, rot/2]."""
    validate.rotary(x, cos, sin)
    half = cos.shape[1]
    y = wide(x)
    cos, sin = cos.to(y.dtype)[:, None], sin.to(y.dtype)[:, None]
    first, second, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    rotated = [first * cos - second * sin, second * cos + first * sin, rest]
    return torch.cat(rotated, dim=-1).to(x.dtype)


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """g = -exp(A_log) * softplus(a + dt_bias) and beta = sigmoid(b), both [R, HV] and wide."""
    validate.delta_gates(a, b, A_log, dt_bias)
    a, b = wide(a), wide(b)
    x = a + dt_bias.to(a.dtype)
    softplus = torch.logaddexp(x, torch.zeros_like(x))
    return -torch.exp(A_log.to(a.dtype)) * softplus, torch.sigmoid(b)


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Depthwise causal convolution, then SiLU.

    x [T, C], weight [C, W], window [W-1, C]: the inputs before x, oldest first. Output t is
    silu(sum_w weight[:, w] * input[t - (W-1) + w]). Returns (y [T, C], the last W-1 inputs).
    """
    width = weight.shape[1]
    inputs = torch.cat([window, x])  # [W-1+T, C]
    y = torch.empty_like(x)
    for t in range(x.shape[0]):
        total = torch.zeros_like(wide(x[0]))
        for w in range(width):
            total = total + wide(inputs[t + w]) * weight[:, w].to(total.dtype)
        y[t] = silu(total).to(x.dtype)
    return y, inputs[x.shape[0] :].clone()


def l2_normalize(x: torch.Tensor) -> torch.Tensor:
    """x / |x| over the last dim, with the epsilon inside the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence, in the dtype of the state.

    q, k [T, H, K], v [T, HV, V], g and beta [T, HV], initial_state [HV, V, K]. Value head j uses
    key head j // (HV/H). Per head, with q and k normalised and q scaled by K^-0.5:
    S *= exp(g_t); d = beta_t (v_t - S k_t); S += d k_t^T; o_t = S q_t.
    Returns (o [T, HV, V], final state [HV, V, K]); the initial state is left alone.
    """
    state = initial_state.clone()
    num_value_heads = v.shape[1]
    ratio = num_value_heads // q.shape[1]
    o = torch.zeros(v.shape, dtype=state.dtype)
    for t in range(q.shape[0]):
        for head in range(num_value_heads):
            q_t = l2_normalize(q[t, head // ratio].to(state.dtype)) * q.shape[2] ** -0.5
            k_t = l2_normalize(k[t, head // ratio].to(state.dtype))
            decayed = state[head] * torch.exp(g[t, head])
            d = beta[t, head] * (v[t, head].to(state.dtype) - decayed @ k_t)
            state[head] = decayed + torch.outer(d, k_t)
            o[t, head] = state[head] @ q_t
    return o, state


def read_slot(pool: torch.Tensor, slot: int) -> torch.Tensor:
    """A copy of the slot; -1 is the zero state."""
    return torch.zeros_like(pool[0]) if slot == -1 else pool[slot].clone()


def _run(core, pool, segments, reads, writes, snapshots):
    """Run `core(start, end, value) -> (y, value)` chunk by chunk over each segment of a pack.

    A segment starts from the value of its read slot; the value after a chunk goes to the chunk's
    snapshot slot, the final one to the write slot. Every row reads before any row writes. An empty
    segment copies its read slot to its write slot. Returns the outputs in order.
    """
    values = [read_slot(pool, slot) for slot in reads]
    outputs, remaining = [], iter(snapshots)
    for (start, end), value, write in zip(segments, values, writes, strict=True):
        for t in range(start, end, KERNEL_CHUNK):
            y, value = core(t, min(t + KERNEL_CHUNK, end), value)
            outputs.append(y)
            snapshot = next(remaining)
            if snapshot != -1:
                pool[snapshot] = value
        if write != 0:
            pool[write] = value
    return outputs


def _step(core, pool, segments, reads, writes):
    """Run `core(t, value) -> (y, value)` token by token; the value after t goes to writes[t]."""
    values = [read_slot(pool, slot) for slot in reads]
    outputs = []
    for (start, end), value in zip(segments, values, strict=True):
        for t in range(start, end):
            y, value = core(t, value)
            outputs.append(y)
            if writes[t] != 0:
                pool[writes[t]] = value
    return outputs


def causal_conv_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    *,
    cu_seqlens: IdVector,
    read_slots: IdVector,
    write_slots: IdVector,
    snapshot_slots: IdVector,
) -> torch.Tensor:
    """`causal_conv` over packed segments x [T, C], windows in slots; returns y [T, C]."""
    slots = dict(read_slots=read_slots, write_slots=write_slots, snapshot_slots=snapshot_slots)
    segments = validate.causal_conv(x, weight, windows, cu_seqlens=cu_seqlens, **slots)
    reads, writes, snapshots = validate.as_lists(**slots)

    def core(start, end, window):
        return causal_conv(x[start:end], weight, window)

    y = _run(core, windows, segments, reads, writes, snapshots)
    return torch.cat([x[:0], *y])


def causal_conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    *,
    read_slots: IdVector,
    write_slots: IdVector,
    cu_seqlens: IdVector | None = None,
) -> torch.Tensor:
    """One token a row, or the few of `cu_seqlens` in order: x [T, C] -> y [T, C].

    write_slots [T]: where the window after each token goes, 0 for nowhere.
    """
    slots = dict(read_slots=read_slots, write_slots=write_slots, cu_seqlens=cu_seqlens)
    segments = validate.causal_conv(x, weight, windows, **slots)

    def core(t, window):
        return causal_conv(x[t : t + 1], weight, window)

    y = _step(
        core, windows, segments, *validate.as_lists(read_slots=read_slots, write_slots=write_slots)
    )
    return torch.cat([x[:0], *y])


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
    """`gated_delta_rule` over packed segments, states in slots; returns o [T, HV, V], wide."""
    slots = dict(read_slots=read_slots, write_slots=write_slots, snapshot_slots=snapshot_slots)
    segments = validate.gated_delta(q, k, v, g, beta, states, cu_seqlens=cu_seqlens, **slots)
    reads, writes, snapshots = validate.as_lists(**slots)

    def core(start, end, state):
        part = slice(start, end)
        return gated_delta_rule(q[part], k[part], v[part], g[part], beta[part], state)

    o = _run(core, states, segments, reads, writes, snapshots)
    return torch.cat([v[:0].to(states.dtype), *o])


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
    """One token a row, or the few of `cu_seqlens` in order (the drafts of a speculative verify).

    q, k [T, H, K], v [T, HV, V] -> o [T, HV, V], wide. write_slots [T]: where the state after each
    token goes, 0 for nowhere.
    """
    slots = dict(read_slots=read_slots, write_slots=write_slots, cu_seqlens=cu_seqlens)
    segments = validate.gated_delta(q, k, v, g, beta, states, **slots)

    def core(t, state):
        part = slice(t, t + 1)
        return gated_delta_rule(q[part], k[part], v[part], g[part], beta[part], state)

    o = _step(
        core, states, segments, *validate.as_lists(read_slots=read_slots, write_slots=write_slots)
    )
    return torch.cat([v[:0].to(states.dtype), *o])


def copy_slots(arena: torch.Tensor, sources: list[int], destinations: list[int]) -> None:
    """Copy whole slots of the arena [num_slots, slot_bytes]."""
    validate.slot_copies(arena, sources, destinations)
    for source, destination in zip(sources, destinations, strict=True):
        arena[destination] = arena[source]


def copy_blocks(kv_cache: torch.Tensor, sources: list[int], destinations: list[int]) -> None:
    """Copy whole blocks of kv_cache [layers, 2, num_blocks, ...] in every layer, K and V."""
    validate.block_copies(kv_cache, sources, destinations)
    for source, destination in zip(sources, destinations, strict=True):
        kv_cache[:, :, destination] = kv_cache[:, :, source]


def zero_slots(arena: torch.Tensor, slots: list[int]) -> None:
    """Fill whole slots of the arena [num_slots, slot_bytes] with zero bytes."""
    validate.zeroed_slots(arena, slots)
    for slot in slots:
        arena[slot] = 0
