"""Paged attention of single queries in Triton: parts of the K/V rows at once, then their sum.

The specification is `reference_attention.attention_decode`; see `attention` for what is exact and
why. A part has SPLIT rows, doubled until the sequence has at most MOST_PARTS, which bounds the
workspace. So how a sequence is split follows from its own length; parts are counted from row 0,
each is summed in order, and they are combined in order, eight at a time: a row's bits depend on its
own K/V alone. A part beyond a row's own K/V does nothing and is never read.

I/O: each K and V row once (the query heads of a K/V head are the rows of one tile), and 4 * (D + 2)
bytes a head and part, written and read.
"""

import math

import torch
import triton
import triton.language as tl

from kernels import validate
from kernels.attention import Tiling, attend_tile, cache_strides, kv_places, require_layout
from kernels.ids import IdVector, as_ids, as_list, as_tables
from kernels.launch import Target, cdiv, launch, next_power_of_2, require_runnable, target_of
from kernels.rows import row_stride

SPLIT = 256  # K/V rows of a part: 64 programs already for one sequence of 4096 rows and 4 K/V heads
MOST_PARTS = 64  # longer parts from 16,384 K/V rows up

_DECODE = {
    "sm_80": Tiling(BN=32, num_warps=4, num_stages=3),
    "sm_90": Tiling(BN=32, num_warps=4, num_stages=3),
    "sm_100": Tiling(BN=32, num_warps=4, num_stages=3),
    "gfx942": Tiling(BN=32, num_warps=4, num_stages=1),
}
_DECODE_FLOAT32 = Tiling(BN=16, num_warps=4, num_stages=1)
_PARTS = 8  # parts combined in one step


def decode_tiling(target: Target, dtype: torch.dtype) -> Tiling:
    """Fixed by the target and the model, never by what is in a batch."""
    return _DECODE_FLOAT32 if dtype == torch.float32 else _DECODE[target.name]


def most_parts_of(kv_len: int) -> int:
    """How many parts a sequence of at most `kv_len` rows can have (just above SPLIT * MOST_PARTS
    rows it has only half as many): what a graph for all lengths up to this one needs."""
    return min(cdiv(kv_len, SPLIT), MOST_PARTS)


@triton.jit
def _part_rows(kv_len, SPLIT: tl.constexpr, MOST_PARTS: tl.constexpr):
    rows = tl.full([], SPLIT, tl.int32)
    while tl.cdiv(kv_len, rows) > MOST_PARTS:
        rows *= 2
    return rows


@triton.jit(do_not_specialize=["table_width", "num_parts"])
def _parts_kernel(
    p_q,
    p_k_cache,
    p_v_cache,
    p_lens,
    p_tables,
    p_acc,
    p_max,
    p_sum,
    table_width,
    num_parts,
    row_q,
    SQH: tl.constexpr,
    SKB: tl.constexpr,
    SKR: tl.constexpr,
    SKH: tl.constexpr,
    SVB: tl.constexpr,
    SVR: tl.constexpr,
    SVH: tl.constexpr,
    SCALE: tl.constexpr,
    KV: tl.constexpr,
    G: tl.constexpr,  # query heads of a K/V head
    BG: tl.constexpr,  # the same, as rows of a dot
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    BN: tl.constexpr,
):
    i_kv, i_part, i_row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_len = tl.load(p_lens + i_row).to(tl.int32)
    part_rows = _part_rows(kv_len, SPLIT, MOST_PARTS)
    start = i_part * part_rows
    if start >= kv_len:
        return
    o_g, o_n, o_d = tl.arange(0, BG), tl.arange(0, BN), tl.arange(0, D)
    m_g = o_g < G
    o_head = i_kv * G + o_g
    o_q = o_head.to(tl.int64)[:, None] * SQH + o_d[None, :]
    b_q = tl.load(p_q + i_row * row_q + o_q, mask=m_g[:, None], other=0.0)  # [BG, D]

    p_table = p_tables + i_row * table_width
    p_k_head = p_k_cache + i_kv.to(tl.int64) * SKH + o_d[None, :]
    p_v_head = p_v_cache + i_kv.to(tl.int64) * SVH + o_d[None, :]
    b_max = tl.full([BG], -float("inf"), tl.float32)
    b_sum = tl.zeros([BG], tl.float32)
    b_acc = tl.zeros([BG, D], tl.float32)
    for n0 in range(start, tl.minimum(start + part_rows, kv_len), BN):
        block, o_row_in_block = kv_places(p_table, n0, kv_len, BN, BLOCK_SIZE)
        m_n = n0 + o_n < kv_len
        o_k, o_v = block * SKB + o_row_in_block * SKR, block * SVB + o_row_in_block * SVR
        b_k = tl.load(p_k_head + o_k[:, None], mask=m_n[:, None], other=0.0)  # wide
        b_v = tl.load(p_v_head + o_v[:, None], mask=m_n[:, None], other=0.0)  # wide
        b_max, b_sum, b_acc = attend_tile(b_q, b_k, b_v, m_n[None, :], b_max, b_sum, b_acc, SCALE)

    o_part = (i_row * num_parts + i_part) * (KV * G) + o_head
    tl.store(p_max + o_part, b_max, mask=m_g)
    tl.store(p_sum + o_part, b_sum, mask=m_g)
    tl.store(p_acc + o_part[:, None] * D + o_d[None, :], b_acc, mask=m_g[:, None])


@triton.jit(do_not_specialize=["num_parts"])
def _combine_kernel(
    p_acc,
    p_max,
    p_sum,
    p_lens,
    p_gate,
    p_out,
    num_parts,
    row_gate,
    SGH: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
):
    i_head, i_row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    kv_len = tl.load(p_lens + i_row).to(tl.int32)
    parts = tl.cdiv(kv_len, _part_rows(kv_len, SPLIT, MOST_PARTS))
    o_p, o_d = tl.arange(0, PARTS), tl.arange(0, D)
    p_first = i_row * num_parts * HEADS + i_head
    total_max = -float("inf")
    total = 0.0
    b_acc = tl.zeros([D], tl.float32)
    for i_part in range(0, parts, PARTS):
        m_p = i_part + o_p < parts  # the first one always is
        o_part = p_first + (i_part + o_p).to(tl.int64) * HEADS
        b_max = tl.load(p_max + o_part, mask=m_p, other=-float("inf"))
        b_sum = tl.load(p_sum + o_part, mask=m_p, other=0.0)
        o_acc = o_part[:, None] * D + o_d[None, :]
        b_part = tl.load(p_acc + o_acc, mask=m_p[:, None], other=0.0)  # [PARTS, D]
        new_max = tl.maximum(total_max, tl.max(b_max, 0))
        b_weight = tl.exp2(b_max - new_max)
        shrink = tl.exp2(total_max - new_max)
        total = total * shrink + tl.sum(b_weight * b_sum, 0)
        b_acc = b_acc * shrink + tl.sum(b_weight[:, None] * b_part, 0)
        total_max = new_max
    b_gate = tl.load(p_gate + i_row * row_gate + i_head * SGH + o_d).to(tl.float32)
    b_out = b_acc * (1.0 / total) * tl.sigmoid(b_gate)
    tl.store(p_out + (i_row * HEADS + i_head) * D + o_d, b_out.to(p_out.dtype.element_ty))


def attention_decode(
    q: torch.Tensor,
    gate: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    kv_lens: IdVector,
    block_tables: validate.BlockLists,
) -> torch.Tensor:
    """One query row of each of N sequences over its paged K/V; see reference.attention_decode.

    q, gate [N, heads, D]: the last dim contiguous, other strides free; returns a contiguous array.
    """
    require_runnable(q.device)
    validate.attention_decode(q, gate, k_cache, v_cache, kv_lens=kv_lens, block_tables=block_tables)
    require_layout(q, gate, k_cache, v_cache)
    tables = as_tables(block_tables, q.device).tensor
    lens = as_ids(kv_lens, "kv_lens", q.device).tensor
    (num_rows, heads, D), kv = q.shape, k_cache.shape[2]
    num_parts = most_parts_of(max(as_list(kv_lens, "kv_lens"), default=0))
    acc = torch.empty(num_rows, num_parts, heads, D, dtype=torch.float32, device=q.device)
    part_max, part_sum = (torch.empty(acc.shape[:3], device=q.device) for _ in range(2))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tiling = decode_tiling(target_of(q.device), q.dtype)
    launch(
        _parts_kernel,
        (kv, num_parts, num_rows),
        q,
        k_cache,
        v_cache,
        lens,
        tables,
        acc,
        part_max,
        part_sum,
        tables.shape[1],
        num_parts,
        row_stride(q),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        SQH=q.stride(1),
        **cache_strides(k_cache, v_cache),
        SCALE=math.log2(math.e) * D**-0.5,
        KV=kv,
        G=heads // kv,
        BG=max(16, next_power_of_2(heads // kv)),
        D=D,
        SPLIT=SPLIT,
        MOST_PARTS=MOST_PARTS,
        BN=min(tiling.BN, SPLIT),
    )
    launch(
        _combine_kernel,
        (heads, num_rows),
        acc,
        part_max,
        part_sum,
        lens,
        gate,
        out,
        num_parts,
        row_stride(gate),
        num_warps=4,
        num_stages=1,
        SGH=gate.stride(1),
        HEADS=heads,
        D=D,
        SPLIT=SPLIT,
        MOST_PARTS=MOST_PARTS,
        PARTS=_PARTS,
    )
    return out
