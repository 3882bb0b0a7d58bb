"""The CPU path in plain torch: chunked gated delta rule, convolution, norms, rotary, attention.

Exactness rests on one rule: an op that mixes tokens (convolution, delta rule, attention) runs one
sequence at a time in tiles of `KERNEL_CHUNK` tokens counted from token 0, at one fixed shape. The
same tile is then the same instructions, whatever else is in the batch and wherever a prefill was
cut. Ops on packed rows use only functions whose value does not depend on an element's position:
torch's float32 sigmoid, silu and softplus differ between the body and the scalar tail of a
vectorised loop, exp does not, and in bfloat16 all of them agree
(tests/kernels/test_position_independence.py).

Shapes and the slot vectors are those of `reference.py`.
"""

from itertools import pairwise

import torch
from torch.nn import functional

from kernels import validate
from kernels.constants import KERNEL_CHUNK
from kernels.linear import matmul_nt

_L2_EPS = 1e-6


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x.sigmoid() if x.dtype == torch.bfloat16 else torch.exp(-x).add_(1.0).reciprocal_()


def _silu(x: torch.Tensor) -> torch.Tensor:
    return functional.silu(x) if x.dtype == torch.bfloat16 else x / torch.exp(-x).add_(1.0)


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [R, 2 * F] = (gate | up); returns [R, F] in the same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _silu(gate).mul_(up)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Zero-centred RMSNorm x * rsqrt(mean(x^2) + eps) * (1 + weight): float32 inside, x's dtype."""
    x32 = x.float()
    scale = x32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x32 * scale).mul_(weight.float() + 1.0).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """RMSNorm(x) * weight * silu(gate) over the last dim: float32 inside, gate's dtype out."""
    x32 = x.float()
    scale = x32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x32 * scale).mul_(weight.float()).mul_(_silu(gate.float())).to(gate.dtype)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate-half inside the first 2 * cos.shape[-1] dims of x [R, heads, D]; the rest passes."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    x1, x2 = x[..., :half].float(), x[..., half : 2 * half].float()
    out = x.clone()
    out[..., :half] = x1 * cos - x2 * sin
    out[..., half : 2 * half] = x2 * cos + x1 * sin
    return out


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(g, beta), float32 [R, HV]: g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b)."""
    g = _softplus(a.float() + dt_bias.float()).mul_(-torch.exp(A_log.float()))
    return g, _sigmoid(b.float())


def causal_conv_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    snapshot_slots: torch.Tensor,
) -> torch.Tensor:
    """Depthwise causal conv and SiLU of packed sequences; see reference.causal_conv_prefill."""
    offsets, reads, writes, snaps = (
        t.tolist() for t in (cu_seqlens, read_slots, write_slots, snapshot_slots)
    )
    validate.causal_conv(
        x,
        weight,
        windows,
        cu_seqlens=offsets,
        read_slots=reads,
        write_slots=writes,
        snapshot_slots=snaps,
    )
    width = weight.shape[1]
    taps = weight.float().t().contiguous()  # [W, C]
    buf = torch.empty(width - 1 + KERNEL_CHUNK, x.shape[1])  # window, then one chunk
    acc = torch.empty(KERNEL_CHUNK, x.shape[1])
    y = torch.empty_like(x)
    chunk = 0
    for (start, end), read, write in zip(pairwise(offsets), reads, writes, strict=True):
        window = torch.zeros_like(windows[0]) if read < 0 else windows[read].clone()
        for lo in range(start, end, KERNEL_CHUNK):
            n = min(KERNEL_CHUNK, end - lo)
            buf[: width - 1] = window
            buf[width - 1 : width - 1 + n] = x[lo : lo + n]
            buf[width - 1 + n :] = 0.0
            torch.mul(buf[:KERNEL_CHUNK], taps[0], out=acc)
            for tap in range(1, width):
                acc.addcmul_(buf[tap : tap + KERNEL_CHUNK], taps[tap])
            y[lo : lo + n] = functional.silu(acc, inplace=True)[:n]  # one shape: silu is safe here
            window = buf[n : n + width - 1].to(windows.dtype)  # the inputs' own dtype: lossless
            if snaps[chunk] > 0:
                windows[snaps[chunk]] = window
            chunk += 1
        if write > 0:
            windows[write] = window
    return y


def causal_conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    *,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
) -> torch.Tensor:
    """One token of each of N rows; see reference.causal_conv_step."""
    reads, writes = read_slots.tolist(), write_slots.tolist()
    validate.causal_conv(x, weight, windows, read_slots=reads, write_slots=writes)
    taps = weight.float().t().contiguous()  # [W, C]
    y = torch.zeros_like(x)
    for row, (read, write) in enumerate(zip(reads, writes, strict=True)):
        if write == 0:
            continue
        window = torch.zeros_like(windows[0]) if read < 0 else windows[read]
        inputs = torch.cat([window, x[row : row + 1].to(windows.dtype)])  # [W, C]
        acc = inputs[0].float() * taps[0]
        for tap in range(1, len(taps)):
            acc.addcmul_(inputs[tap].float(), taps[tap])
        y[row] = functional.silu(acc)
        windows[write] = inputs[1:]
    return y


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
    cu_seqlens: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    snapshot_slots: torch.Tensor,
) -> torch.Tensor:
    """Chunked gated delta rule of packed sequences; see reference.gated_delta_prefill."""
    offsets, reads, writes, snaps = (
        t.tolist() for t in (cu_seqlens, read_slots, write_slots, snapshot_slots)
    )
    validate.gated_delta(
        q,
        k,
        v,
        g,
        beta,
        states,
        cu_seqlens=offsets,
        read_slots=reads,
        write_slots=writes,
        snapshot_slots=snaps,
    )
    rule = _ChunkRule(q.shape[1], v.shape[1], q.shape[2], v.shape[2])
    scratch = torch.empty_like(states[0])
    out = torch.empty(v.shape, dtype=torch.float32)
    chunk = 0
    for (start, end), read, write in zip(pairwise(offsets), reads, writes, strict=True):
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
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
) -> torch.Tensor:
    """One token of each of N rows; see reference.gated_delta_step."""
    reads, writes = read_slots.tolist(), write_slots.tolist()
    validate.gated_delta(q, k, v, g, beta, states, read_slots=reads, write_slots=writes)
    r = v.shape[1] // q.shape[1]
    q = _l2_normalised(q.float(), q.shape[-1] ** -0.5).repeat_interleave(r, 1)  # [N, HV, K]
    k = _l2_normalised(k.float()).repeat_interleave(r, 1)
    v, decay = v.float(), g.exp()
    out = torch.zeros(v.shape, dtype=torch.float32)
    for row, (read, write) in enumerate(zip(reads, writes, strict=True)):
        if write == 0:
            continue
        state = states[write]
        if read < 0:
            state.zero_()
        else:
            torch.mul(states[read], decay[row, :, None, None], out=state)
        d = (v[row] - torch.bmm(state, k[row, :, :, None])[..., 0]).mul_(beta[row, :, None])
        state.baddbmm_(d[..., None], k[row, :, None, :])
        out[row] = torch.bmm(state, q[row, :, :, None])[..., 0]
    return out


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
) -> None:
    """Store rows k, v [R, kv, D] at flat indices (block_id * block_size + offset) of the caches."""
    validate.write_kv(k, v, k_cache, v_cache, kv_indices.tolist())
    k_cache.flatten(0, 1).index_copy_(0, kv_indices, k)
    v_cache.flatten(0, 1).index_copy_(0, kv_indices, v)


def _gather(cache: torch.Tensor, block_table: list[int], kv_len: int) -> torch.Tensor:
    """The first kv_len rows of a sequence as [kv, kv_len, D] (a strided view of a fresh buffer)."""
    num_blocks = -(-kv_len // cache.shape[1])
    blocks = cache.index_select(0, torch.tensor(block_table[:num_blocks]))
    return blocks.flatten(0, 1)[:kv_len].transpose(0, 1)


def attention_prefill(
    q: torch.Tensor,
    gate: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    start_positions: list[int],
    block_tables: list[list[int]],
) -> torch.Tensor:
    """Causal attention of packed sequences over their paged K/V; see reference.attention_prefill.

    One tile of KERNEL_CHUNK queries at a time, the query heads of a K/V head folded into its rows.
    Scores and softmax are float32; the probabilities meet V in the model's dtype.
    """
    heads, D = q.shape[1:]
    kv = k_cache.shape[2]
    above = torch.ones(KERNEL_CHUNK, KERNEL_CHUNK, dtype=torch.bool).triu_(1)
    out = torch.empty_like(q)
    offsets = cu_seqlens.tolist()
    validate.attention_prefill(
        q,
        gate,
        k_cache,
        v_cache,
        cu_seqlens=offsets,
        start_positions=start_positions,
        block_tables=block_tables,
    )
    for (lo, hi), start, table in zip(
        pairwise(offsets), start_positions, block_tables, strict=True
    ):
        if lo == hi:
            continue
        keys = _gather(k_cache, table, start + hi - lo).float().contiguous()  # [kv, kv_len, D]
        values = _gather(v_cache, table, start + hi - lo).contiguous()
        for tile in range(lo, hi, KERNEL_CHUNK):
            n = min(KERNEL_CHUNK, hi - tile)
            kv_len = start + tile - lo + n
            rows = (q[tile : tile + n].float() * D**-0.5).view(n, kv, heads // kv, D)
            rows = rows.permute(1, 2, 0, 3).reshape(kv, -1, D)  # [kv, G * n, D]
            probs = torch.empty(kv, rows.shape[1], kv_len, dtype=q.dtype)
            for head in range(kv):
                scores = matmul_nt(rows[head], keys[head, :kv_len]).view(-1, n, kv_len)
                scores[..., kv_len - n :].masked_fill_(above[:n, :n], -torch.inf)
                probs[head] = scores.softmax(-1).view(-1, kv_len)
            mixed = torch.bmm(probs, values[:, :kv_len]).view(kv, -1, n, D)
            out[tile : tile + n] = mixed.permute(2, 0, 1, 3).reshape(n, heads, D)
    return out.mul_(_sigmoid(gate))


def attention_decode(
    q: torch.Tensor,
    gate: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    kv_lens: list[int],
    block_tables: list[list[int]],
) -> torch.Tensor:
    """One query row of each of N sequences over its paged K/V; see reference.attention_decode."""
    validate.attention_decode(q, gate, k_cache, v_cache, kv_lens=kv_lens, block_tables=block_tables)
    heads, D = q.shape[1:]
    kv = k_cache.shape[2]
    out = torch.empty_like(q)
    for row, (kv_len, table) in enumerate(zip(kv_lens, block_tables, strict=True)):
        query = q[row].view(1, kv, heads // kv, D)
        keys, values = (_gather(c, table, kv_len)[None] for c in (k_cache, v_cache))
        out[row] = functional.scaled_dot_product_attention(query, keys, values).view(heads, D)
    return out.mul_(_sigmoid(gate))


def copy_slots(arena: torch.Tensor, sources: list[int], destinations: list[int]) -> None:
    """Copy whole slots (all layers, state and window) inside arena [num_slots, slot_bytes]."""
    validate.slot_copies(arena, sources, destinations)
    for source, destination in zip(sources, destinations, strict=True):
        arena[destination].copy_(arena[source])


def zero_slots(arena: torch.Tensor, slots: list[int]) -> None:
    """Zero whole slots of arena [num_slots, slot_bytes]."""
    validate.zeroed_slots(arena, slots)
    for slot in slots:
        arena[slot].zero_()
