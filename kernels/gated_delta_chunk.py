"""Chunked gated delta rule in Triton: prefill of packed sequences, states in slots.

A chunk is C = 64 tokens in WY form: with G the running sum of g, D[i, j] = exp(G_i - G_j) and
A = beta_i D k_i.k_j (i > j),
    T = (I + A)^-1,  w = T (beta exp(G) k),  u = T (beta v),  p = D q_i.k_j (i >= j).
`_invert` makes T and `_prepare` the rest, all chunks at once. `_scan` (a program a sequence, value
head and BV value columns) carries the state S [K, BV] in float32 registers through its chunks:
    d = u - w S,   o = exp(G) (q S) + p d,   S = exp(G_C) S + k^T (exp(G_C - G) d),
stores it to the snapshot slots on the way and to the write slot at the end.
Source: Yang et al., "Gated Delta Networks" (2024), section 3.

Bytes: q, k, v, g, beta and o once; normalised q and k, w, u, p (the model's dtype), T and G
(float32) of each chunk, C (2 K / R + K + V + C) and C^2 + C elements a value head, written once and
read again, from the second-level cache where several programs do; the states read and stored.

A chunk is the same instructions wherever it stands: 64 tokens from the start of its row, short
chunks filled with zeros. So a prefill cut at multiples of 64 has the bits of an uncut one.
"""

import torch
import triton
import triton.language as tl

from kernels import validate
from kernels.constants import KERNEL_CHUNK
from kernels.ids import IdVector, as_ids
from kernels.launch import Target, launch, require_runnable, target_of
from kernels.packs import chunk_table
from kernels.rows import DTYPES, check_aligned, row_stride, vector_width
from kernels.slot_rules import require

_L2_EPS = tl.constexpr(1e-6)
_BLOCK = tl.constexpr(16)  # diagonal blocks that are inverted row by row


@triton.jit
def _unit_lower_inverse(b_a, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower a [C, C].

    The diagonal blocks of 16 by forward substitution, all at once; with D their inverses and
    N = D (a without its diagonal blocks), which is nilpotent over C / 16 = 4 blocks, the rest is
    (I + N)^-1 D = (I - N)(I + N^2) D. Powers of `a` itself would overflow where keys repeat.
    """
    B: tl.constexpr = C // _BLOCK
    o_b, o_i = tl.arange(0, B), tl.arange(0, _BLOCK)
    m_diagonal = o_b[:, None, None, None] == o_b[None, None, :, None]  # [B, 1, B, 1]
    b_blocks = tl.reshape(b_a, [B, _BLOCK, B, _BLOCK])
    b_diagonal = tl.sum(tl.where(m_diagonal, b_blocks, 0.0), 2)  # [B, 16, 16]
    m_one = o_i[:, None] == o_i[None, :]
    b_d = tl.zeros([B, _BLOCK, _BLOCK], tl.float32) + tl.where(m_one, 1.0, 0.0)[None]
    for i in range(1, _BLOCK):
        m_row = (o_i == i)[None, :, None]
        b_row = tl.sum(tl.where(m_row, b_diagonal, 0.0), 1)  # [B, 16]: row i of each block
        b_new = tl.sum(b_row[:, :, None] * b_d, 1)  # [B, 16]
        b_d = tl.where(m_row, b_d - b_new[:, None, :], b_d)
    b_d4 = tl.where(m_diagonal, b_d[:, :, None, :], 0.0)  # [B, 16, B, 16]
    b_d2 = tl.reshape(b_d4, [C, C])
    b_off = tl.reshape(tl.where(m_diagonal, 0.0, b_blocks), [C, C])
    b_n = tl.dot(b_d2, b_off, input_precision=PRECISION)
    b_n2 = tl.dot(b_n, b_n, input_precision=PRECISION)
    o_c = tl.arange(0, C)
    b_eye = tl.where(o_c[:, None] == o_c[None, :], 1.0, 0.0)
    b_x = tl.dot(b_eye - b_n, b_eye + b_n2, input_precision=PRECISION)
    return tl.dot(b_x, b_d2, input_precision=PRECISION)


@triton.jit
def _normalised(b_x, scale):
    """Rows of b_x scaled to L2 norm `scale`, rounded to their dtype once."""
    b_y = b_x.to(tl.float32)
    b_y = b_y * (tl.rsqrt(tl.sum(b_y * b_y, 1) + _L2_EPS) * scale)[:, None]
    return b_y.to(b_x.dtype)


@triton.jit(do_not_specialize=["stride_k", "stride_g", "stride_beta"])
def _invert(
    p_k,
    p_g,
    p_beta,
    p_chunks,
    p_G,
    p_T,
    stride_k,
    stride_g,
    stride_beta,
    R: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    VEC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_hv, i_c = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = tl.load(p_chunks + i_c * 4 + 1)
    n = tl.load(p_chunks + i_c * 4 + 2)
    if n == 0:
        return
    o_t, o_k = tl.arange(0, C), tl.arange(0, K)
    m_t = o_t < n
    t = start + o_t  # [C]
    o_row = tl.multiple_of(t[:, None] * stride_k, (VEC, VEC)) + (i_hv // R) * K + o_k[None, :]
    b_k = tl.load(p_k + o_row, mask=m_t[:, None], other=0)  # wide
    b_k = _normalised(b_k, 1.0)
    b_kk = tl.dot(b_k, tl.trans(b_k), input_precision="ieee")  # [C, C]
    b_G = tl.cumsum(tl.load(p_g + t * stride_g + i_hv, mask=m_t, other=0.0), 0)
    b_beta = tl.load(p_beta + t * stride_beta + i_hv, mask=m_t, other=0.0)
    i_chv = i_c * tl.num_programs(0) + i_hv
    tl.store(p_G + i_chv * C + o_t, b_G)
    m_below = o_t[:, None] > o_t[None, :]
    b_decay = tl.exp(tl.where(m_below, b_G[:, None] - b_G[None, :], 0.0))
    b_a = tl.where(m_below, b_decay * b_kk * b_beta[:, None], 0.0)
    b_inverse = _unit_lower_inverse(b_a, C, PRECISION)
    tl.store(p_T + i_chv * C * C + o_t[:, None] * C + o_t[None, :], b_inverse)


@triton.jit(do_not_specialize=["stride_q", "stride_k", "stride_v", "stride_beta"])
def _prepare(
    p_q,
    p_k,
    p_v,
    p_beta,
    p_chunks,
    p_G,
    p_T,
    p_qn,
    p_kn,
    p_w,
    p_u,
    p_p,
    stride_q,
    stride_k,
    stride_v,
    stride_beta,
    scale: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    VEC: tl.constexpr,
):
    i_h, i_c = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = tl.load(p_chunks + i_c * 4 + 1)
    n = tl.load(p_chunks + i_c * 4 + 2)
    if n == 0:
        return
    dtype = p_q.dtype.element_ty
    o_t, o_k, o_v = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    m_t = o_t < n
    t = start + o_t  # [C]
    o_tk = o_t[:, None] * K + o_k[None, :]
    o_tt = o_t[:, None] * C + o_t[None, :]
    o_q = tl.multiple_of(t[:, None] * stride_q, (VEC, VEC)) + i_h * K + o_k[None, :]
    o_key = tl.multiple_of(t[:, None] * stride_k, (VEC, VEC)) + i_h * K + o_k[None, :]
    b_q = tl.load(p_q + o_q, mask=m_t[:, None], other=0)  # wide
    b_k = tl.load(p_k + o_key, mask=m_t[:, None], other=0)  # wide
    b_q, b_k = _normalised(b_q, scale), _normalised(b_k, 1.0)
    i_ch = i_c * H + i_h
    tl.store(p_qn + i_ch * C * K + o_tk, b_q)
    tl.store(p_kn + i_ch * C * K + o_tk, b_k)
    b_qk = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [C, C]
    m_causal = o_t[:, None] >= o_t[None, :]
    for r in range(R):  # two loops: the second does without q
        i_chv = i_c * H * R + i_h * R + r
        b_G = tl.load(p_G + i_chv * C + o_t)
        b_decay = tl.exp(tl.where(m_causal, b_G[:, None] - b_G[None, :], 0.0))
        b_p = tl.where(m_causal, b_decay * b_qk, 0.0)
        tl.store(p_p + i_chv * C * C + o_tt, b_p.to(dtype))
    for r in range(R):
        i_hv = i_h * R + r
        i_chv = i_c * H * R + i_hv
        b_beta = tl.load(p_beta + t * stride_beta + i_hv, mask=m_t, other=0.0)
        b_T = tl.load(p_T + i_chv * C * C + o_tt) * b_beta[None, :]
        o_row = tl.multiple_of(t[:, None] * stride_v, (VEC, VEC)) + i_hv * V + o_v[None, :]
        b_v = tl.load(p_v + o_row, mask=m_t[:, None], other=0)  # wide
        b_u = tl.dot(b_T.to(dtype), b_v, input_precision="ieee")  # [C, V]
        tl.store(p_u + i_chv * C * V + o_t[:, None] * V + o_v[None, :], b_u.to(dtype))
        b_growth = b_beta * tl.exp(tl.load(p_G + i_chv * C + o_t))
        b_T = tl.load(p_T + i_chv * C * C + o_tt) * b_growth[None, :]  # again: registers are short
        b_w = tl.dot(b_T.to(dtype), b_k, input_precision="ieee")  # [C, K]
        tl.store(p_w + i_chv * C * K + o_tk, b_w.to(dtype))


@triton.jit
def _scan(
    p_qn,
    p_kn,
    p_w,
    p_u,
    p_p,
    p_G,
    p_o,
    p_states,
    p_chunks,
    p_rows,
    stride_slot: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
):
    i_v, i_hv, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p_row = p_rows + i_n.to(tl.int64) * 5
    num_tokens, first = tl.load(p_row + 1), tl.load(p_row + 2)
    read, write = tl.load(p_row + 3), tl.load(p_row + 4)
    if write == 0:  # padding
        return
    dtype = p_w.dtype.element_ty
    o_t, o_k, o_v = tl.arange(0, C), tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    p_state = p_states + i_hv * V * K + o_v[:, None] * K + o_k[None, :]  # [BV, K]
    b_s = tl.zeros([K, BV], tl.float32)
    if read >= 0:
        b_start = tl.load(p_state + read * stride_slot)  # wide
        b_s = tl.trans(b_start)
    o_tk = o_t[:, None] * K + o_k[None, :]
    o_tv = o_t[:, None] * V + o_v[None, :]
    o_tt = o_t[:, None] * C + o_t[None, :]
    for c in range(0, tl.cdiv(num_tokens, C)):
        i_c = first + c
        i_ch = i_c * H + i_hv // R
        i_chv = i_c * (H * R) + i_hv
        b_w = tl.load(p_w + i_chv * C * K + o_tk)
        b_u = tl.load(p_u + i_chv * C * V + o_tv)
        b_q = tl.load(p_qn + i_ch * C * K + o_tk)
        b_k = tl.load(p_kn + i_ch * C * K + o_tk)
        b_p = tl.load(p_p + i_chv * C * C + o_tt)
        b_G = tl.load(p_G + i_chv * C + o_t)
        last = tl.load(p_G + i_chv * C + C - 1)
        b_sd = b_s.to(dtype)
        b_d = b_u.to(tl.float32) - tl.dot(b_w, b_sd, input_precision="ieee")  # [C, BV]
        b_o = tl.dot(b_q, b_sd, input_precision="ieee") * tl.exp(b_G)[:, None]
        b_o += tl.dot(b_p, b_d.to(dtype), input_precision="ieee")
        start, n = tl.load(p_chunks + i_c * 4 + 1), tl.load(p_chunks + i_c * 4 + 2)
        p_out = p_o + (start + o_t)[:, None] * (H * R * V) + i_hv * V + o_v[None, :]
        tl.store(p_out, b_o, mask=(o_t < n)[:, None])
        b_d = (b_d * tl.exp(last - b_G)[:, None]).to(dtype)
        b_s = b_s * tl.exp(last) + tl.dot(tl.trans(b_k), b_d, input_precision="ieee")
        snapshot = tl.load(p_chunks + i_c * 4 + 3)
        if snapshot > 0:
            tl.store(p_state + snapshot * stride_slot, tl.trans(b_s))  # wide
    tl.store(p_state + write * stride_slot, tl.trans(b_s))  # wide


def _tiles(target: Target, HV: int, V: int) -> tuple[dict[str, int], ...]:
    """Options of the three kernels, fixed by target and model: num_warps decides the order of sums.

    One sequence is HV * V / BV programs of `_scan`: few heads take narrow tiles (on sm_100 these
    spill).
    """
    narrow = HV * V // 32 <= 64 and target.name != "sm_100"
    BV = min(V, 16 if narrow else 32)
    stages = {"sm_80": 2, "gfx942": 1}.get(target.name, 3)  # what shared memory holds
    return (
        dict(num_warps=4, num_stages=1),
        dict(num_warps=8, num_stages=1),
        dict(BV=BV, num_warps=4, num_stages=stages),
    )


def check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, states: torch.Tensor) -> None:
    """What the kernels ask for beyond `validate.gated_delta`: widths, layouts, float32 states."""
    for name, width in (("K", q.shape[2]), ("V", v.shape[2])):
        fits = width >= 16 and width & (width - 1) == 0
        require(fits, f"head width {name}", "a power of two from 16 up", width)
    require(states.dtype == torch.float32, "dtype of states", torch.float32, states.dtype)
    require(q.dtype in DTYPES, "dtype of q", f"one of {DTYPES}", q.dtype)
    for name, x in (("q", q), ("k", k), ("v", v)):
        packed = x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
        require(packed or x.numel() == 0, f"strides of {name}", "[*, width, 1]", x.stride())
    check_aligned(q=q, k=k, v=v)


def check_gates(g: torch.Tensor, beta: torch.Tensor) -> None:
    """Gates [T, HV], their heads side by side."""
    for name, x in (("g", g), ("beta", beta)):
        packed = x.stride(1) == 1 or x.shape[1] == 1 or x.numel() == 0
        require(packed, f"strides of {name}", "[*, 1]", x.stride())


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
    """Packed sequences q, k [T, H, K], v [T, HV, V], g, beta [T, HV] float32 -> o [T, HV, V]
    float32; states [num_slots, HV, V, K] float32 in place. See reference.gated_delta_prefill.

    Rows of q, k, v and of the gates may be apart (slices of one projection); K and V are powers of
    two from 16 up. Output rows of a padding row are not written.
    """
    validate.gated_delta(
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
    check_heads(q, k, v, states)
    check_gates(g, beta)
    require_runnable(q.device)
    table = chunk_table(
        as_ids(cu_seqlens, "cu_seqlens", q.device),
        as_ids(read_slots, "read_slots", q.device),
        as_ids(write_slots, "write_slots", q.device),
        as_ids(snapshot_slots, "snapshot_slots", q.device),
    )
    T, H, K = q.shape
    HV, V = v.shape[1:]
    C = KERNEL_CHUNK
    num_chunks, num_rows = len(table.chunks), len(table.rows)
    qn, kn = q.new_empty(2, num_chunks, H, C, K)
    w = q.new_empty(num_chunks, HV, C, K)
    u = q.new_empty(num_chunks, HV, C, V)
    p = q.new_empty(num_chunks, HV, C, C)
    G = g.new_empty(num_chunks, HV, C)
    inverse = g.new_empty(num_chunks, HV, C, C)
    o = g.new_empty(T, HV, V)
    target = target_of(q.device)
    invert, prepare, scan = _tiles(target, HV, V)
    heads = dict(H=H, R=HV // H, K=K, V=V, C=C)
    launch(
        _invert,
        (HV, num_chunks),
        k,
        g,
        beta,
        table.chunks,
        G,
        inverse,
        *(row_stride(x) for x in (k, g, beta)),
        R=HV // H,
        K=K,
        C=C,
        VEC=vector_width(k),
        PRECISION="ieee" if target.is_amd or k.dtype == torch.float32 else "tf32",
        **invert,
    )
    launch(
        _prepare,
        (H, num_chunks),
        q,
        k,
        v,
        beta,
        table.chunks,
        G,
        inverse,
        qn,
        kn,
        w,
        u,
        p,
        *(row_stride(x) for x in (q, k, v, beta)),
        VEC=vector_width(q),
        scale=K**-0.5,
        **heads,
        **prepare,
    )
    launch(
        _scan,
        (V // scan["BV"], HV, num_rows),
        qn,
        kn,
        w,
        u,
        p,
        G,
        o,
        states,
        table.chunks,
        table.rows,
        stride_slot=states.stride(0),
        **heads,
        **scan,
    )
    return o
