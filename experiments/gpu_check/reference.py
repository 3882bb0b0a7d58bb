"""What should a kernel give, in float64, when token by token and head by head takes too long?

The cores of `kernels.reference` with all heads at once, on any device. The check `specification`
holds them against `kernels.reference` itself. Results are float64; windows keep their dtype, for
they are copies.
"""

from collections.abc import Callable, Sequence

import torch

from kernels import KERNEL_CHUNK

Core = Callable[[int, int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Slots = dict[int, torch.Tensor]

_L2_EPS = 1e-6


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """reference.gated_delta_rule: (o [T, HV, V], state [HV, V, K])."""
    ratio, scale = v.shape[1] // q.shape[1], q.shape[2] ** -0.5
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(ratio, 1)[..., None] for x in (q * scale, k))  # [T, HV, K, 1]
    decay = g.exp()[..., None, None]
    o = torch.empty_like(v)
    for t in range(len(v)):
        state = state * decay[t]
        d = beta[t, :, None] * (v[t] - (state @ k[t])[..., 0])
        state = state + d[..., None] * k[t].transpose(1, 2)
        o[t] = (state @ q[t])[..., 0]
    return o, state


def conv(
    x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """reference.causal_conv: (y [T, C], the last W-1 inputs)."""
    inputs = torch.cat([window, x])
    wide, weight = inputs.double(), weight.double()
    taps = [wide[w : w + len(x)] * weight[:, w] for w in range(weight.shape[1])]
    total = torch.stack(taps).sum(0)
    return total * total.sigmoid(), inputs[len(x) :]


def prefill_slots(
    core: Core,
    pool: torch.Tensor,
    segments: Sequence[tuple[int, int]],
    reads: Sequence[int],
    writes: Sequence[int],
    snapshots: Sequence[int],
) -> tuple[torch.Tensor, Slots]:
    """Rows of a pack, chunk by chunk: outputs of all tokens, and what each written slot holds."""
    outputs, written, remaining = [], {}, iter(snapshots)
    for (start, end), read, write in zip(segments, reads, writes, strict=True):
        value = torch.zeros_like(pool[0]) if read == -1 else pool[read]
        for t in range(start, end, KERNEL_CHUNK):
            y, value = core(t, min(t + KERNEL_CHUNK, end), value)
            outputs.append(y)
            snapshot = next(remaining)
            if snapshot > 0:
                written[snapshot] = value
        if write > 0:
            written[write] = value
    return torch.cat(outputs), written


def step_slots(
    core: Core,
    pool: torch.Tensor,
    segments: Sequence[tuple[int, int]],
    reads: Sequence[int],
    writes: Sequence[int],
) -> tuple[torch.Tensor, Slots]:
    """Rows of a step, token by token; a write slot for each token."""
    outputs, written = [], {}
    for (start, end), read in zip(segments, reads, strict=True):
        value = torch.zeros_like(pool[0]) if read == -1 else pool[read]
        for t in range(start, end):
            y, value = core(t, t + 1, value)
            outputs.append(y)
            if writes[t] > 0:
                written[writes[t]] = value
    return torch.cat(outputs), written


def kv_rows(cache: torch.Tensor, table: Sequence[int], num_rows: int) -> torch.Tensor:
    """The first K/V rows of a sequence [num_rows, kv, D], in float64."""
    return cache[list(table)].flatten(0, 1)[:num_rows].double()


def attend(
    q: torch.Tensor, gate: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """The last len(q) tokens of a sequence over all its rows, causal: [T, heads, D] float64."""
    ratio, T, rows = q.shape[1] // keys.shape[1], len(q), len(keys)
    keys, values = (x.repeat_interleave(ratio, 1) for x in (keys, values))
    scores = torch.einsum("thd,rhd->htr", q.double(), keys) * q.shape[2] ** -0.5
    hidden = torch.ones(T, rows, dtype=torch.bool, device=q.device).triu(rows - T + 1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("htr,rhd->thd", weights, values) * gate.double().sigmoid()


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return gate * gate.sigmoid() * up
