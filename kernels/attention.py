"""Paged attention in Triton: K/V writes and causal prefill. The decode is in `attention_decode`.

The specification is `reference_attention`, the interface that of `torch_attention`.

A row's bits depend on nothing but its own sequence: query tiles are KERNEL_CHUNK tokens counted
from token 0, K/V tiles are counted from row 0 and visited in order, and a tile that is masked for a
row multiplies its sums by one and adds zeros. Tiles are fixed for each target. K/V rows at or
beyond kv_len are never loaded, so whatever lies there, NaN too, can't reach a result.

Scores, softmax and sums are float32; the probabilities meet V in the model's dtype; a result is
rounded once, after the gate. I/O of a prefill: q, gate and out once each, and for each tile of
queries and HEADS query heads the K and V rows before its end (from L2, mostly).
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import validate
from kernels.constants import KERNEL_CHUNK
from kernels.ids import Ids, IdVector, as_ids, as_list, as_tables
from kernels.launch import Target, launch, next_power_of_2, require_runnable, target_of
from kernels.rows import DTYPES, row_stride
from kernels.slot_rules import require

_KEPT_TILES = 8  # one a forward pass, and a few for passes that alternate


class Tiling(NamedTuple):
    """K/V rows of a tile, and how the kernel is compiled."""

    BN: int
    num_warps: int
    num_stages: int
    HEADS: int = 1  # query heads of a prefill tile, at most


_PREFILL = {  # no spills at D 256 on Triton 3.6 to 3.9; larger tiles of sm_80, sm_100 have some
    "sm_80": Tiling(BN=32, num_warps=8, num_stages=2),
    "sm_90": Tiling(BN=64, num_warps=8, num_stages=2, HEADS=2),
    "sm_100": Tiling(BN=32, num_warps=8, num_stages=2, HEADS=2),
    "gfx942": Tiling(BN=32, num_warps=4, num_stages=2),
}
_PREFILL_FLOAT32 = Tiling(BN=16, num_warps=8, num_stages=1)


def prefill_tiling(target: Target, dtype: torch.dtype, heads_per_kv: int) -> Tiling:
    """Fixed by the target and the model, never by what is in a batch."""
    tiling = _PREFILL_FLOAT32 if dtype == torch.float32 else _PREFILL[target.name]
    return tiling._replace(HEADS=min(tiling.HEADS, heads_per_kv))


@triton.jit
def _write_kernel(
    p_k,
    p_v,
    p_k_cache,
    p_v_cache,
    p_indices,
    row_k,
    row_v,
    SKB: tl.constexpr,
    SKR: tl.constexpr,
    SKH: tl.constexpr,
    SVB: tl.constexpr,
    SVR: tl.constexpr,
    SVH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    index = tl.load(p_indices + i_row)  # int64
    block, row = index // BLOCK_SIZE, index % BLOCK_SIZE
    o_x = tl.arange(0, BLOCK)
    m_x = o_x < KV * D
    b_k = tl.load(p_k + i_row * row_k + o_x, mask=m_x)
    b_v = tl.load(p_v + i_row * row_v + o_x, mask=m_x)
    o_head, o_d = (o_x // D).to(tl.int64), o_x % D
    tl.store(p_k_cache + block * SKB + row * SKR + o_head * SKH + o_d, b_k, mask=m_x)
    tl.store(p_v_cache + block * SVB + row * SVR + o_head * SVH + o_d, b_v, mask=m_x)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: IdVector,
) -> None:
    """Store rows k, v [R, kv, D] at flat indices (block_id * block_size + offset) of the caches.

    Rows may be slices of a wider array; the heads and dims of one row are contiguous. Of several
    rows for one index of block 0, the padding block, any may stay.
    """
    require_runnable(k.device)
    validate.write_kv(k, v, k_cache, v_cache, kv_indices)
    kv, D = k.shape[1:]
    for name, x in (("k", k), ("v", v)):
        contiguous = x.shape[0] == 0 or x[0].is_contiguous()
        require(contiguous, f"strides of {name}", "contiguous rows", x.stride())
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require(cache.stride(3) == 1, f"strides of {name}", "a contiguous last dim", cache.stride())
    launch(
        _write_kernel,
        (k.shape[0],),
        k,
        v,
        k_cache,
        v_cache,
        as_ids(kv_indices, "kv_indices", k.device).tensor,
        row_stride(k),
        row_stride(v),
        num_warps=2,
        num_stages=1,
        **cache_strides(k_cache, v_cache),
        KV=kv,
        D=D,
        BLOCK=next_power_of_2(kv * D),
    )


def require_layout(
    q: torch.Tensor, gate: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    """What the attention kernels need beyond `validate`: head width, dtype, dims without gaps."""
    D = q.shape[2]
    require(D >= 16 and D & (D - 1) == 0, "head dim", "a power of two of at least 16", D)
    require(q.dtype in DTYPES, "dtype", DTYPES, q.dtype)
    for name, x in (("q", q), ("gate", gate), ("k_cache", k_cache), ("v_cache", v_cache)):
        require(x.stride(-1) == 1, f"strides of {name}", "a contiguous last dim", x.stride())


def cache_strides(k_cache: torch.Tensor, v_cache: torch.Tensor) -> dict[str, int]:
    """Strides of block, row and head, and the block size, as the kernels want them."""
    k_strides = zip(("SKB", "SKR", "SKH"), k_cache.stride(), strict=False)
    v_strides = zip(("SVB", "SVR", "SVH"), v_cache.stride(), strict=False)
    return {**dict(k_strides), **dict(v_strides), "BLOCK_SIZE": k_cache.shape[1]}


@triton.jit
def kv_places(p_table, n0, kv_len, BN: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Block and offset in it, int64, of the K/V rows from n0 on: one block a tile where it fits."""
    o_n = tl.arange(0, BN)
    if BLOCK_SIZE % BN == 0:
        block = tl.load(p_table + n0 // BLOCK_SIZE).to(tl.int64)
        return block, (n0 % BLOCK_SIZE + o_n).to(tl.int64)
    else:
        o_n += n0
        b_block = tl.load(p_table + o_n // BLOCK_SIZE, mask=o_n < kv_len, other=0).to(tl.int64)
        return b_block, (o_n % BLOCK_SIZE).to(tl.int64)


@triton.jit
def attend_tile(b_q, b_k, b_v, m_s, b_max, b_sum, b_acc, SCALE: tl.constexpr):
    """One step of the running softmax, base 2. Each row of b_q has met a key by now (m_s)."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * SCALE  # [BM, BN]
    b_s = tl.where(m_s, b_s, -float("inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
    b_p = tl.exp2(b_s - b_new_max[:, None])
    b_shrink = tl.exp2(b_max - b_new_max)
    b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision="ieee")
    return b_new_max, b_sum, b_acc


@triton.jit
def _store_gated(b_mixed, p_gate, p_out, m_out):
    """Store mixed * sigmoid(gate), rounded once."""
    b_gate = tl.load(p_gate, mask=m_out, other=0.0).to(tl.float32)
    tl.store(p_out, (b_mixed * tl.sigmoid(b_gate)).to(p_out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["table_width"])
def _prefill_kernel(
    p_q,
    p_gate,
    p_k_cache,
    p_v_cache,
    p_out,
    p_tiles,
    p_tables,
    table_width,
    row_q,
    row_gate,
    SQH: tl.constexpr,
    SGH: tl.constexpr,
    SKB: tl.constexpr,
    SKR: tl.constexpr,
    SKH: tl.constexpr,
    SVB: tl.constexpr,
    SVR: tl.constexpr,
    SVH: tl.constexpr,
    SCALE: tl.constexpr,
    KV: tl.constexpr,
    G: tl.constexpr,  # query heads of a K/V head
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BN: tl.constexpr,
):
    GROUPS: tl.constexpr = (G + HEADS - 1) // HEADS
    i_tile, i_kv = tl.program_id(0) // (KV * GROUPS), tl.program_id(0) // GROUPS % KV
    i_group = tl.program_id(0) % GROUPS
    i_seq = tl.load(p_tiles + i_tile * 4)
    first = tl.load(p_tiles + i_tile * 4 + 1)  # row of q; int64 as all of p_tiles
    position = tl.load(p_tiles + i_tile * 4 + 2).to(tl.int32)
    num_tokens = tl.load(p_tiles + i_tile * 4 + 3).to(tl.int32)
    kv_len = position + num_tokens

    o_m, o_n, o_d = tl.arange(0, HEADS * TOKENS), tl.arange(0, BN), tl.arange(0, D)
    o_t, o_h = o_m % TOKENS, o_m // TOKENS  # rows of a tile: head by head
    m_m = ((o_t < num_tokens) & (i_group * HEADS + o_h < G))[:, None]
    head = (i_kv * G + i_group * HEADS).to(tl.int64)
    o_row, o_head = o_t.to(tl.int64)[:, None], o_h.to(tl.int64)[:, None]
    p_q += first * row_q + head * SQH
    b_q = tl.load(p_q + (o_row * row_q + o_head * SQH + o_d[None, :]), mask=m_m, other=0.0)

    p_table = p_tables + i_seq * table_width
    p_k_head = p_k_cache + i_kv.to(tl.int64) * SKH + o_d[None, :]
    p_v_head = p_v_cache + i_kv.to(tl.int64) * SVH + o_d[None, :]
    b_max = tl.full([HEADS * TOKENS], -float("inf"), tl.float32)
    b_sum = tl.zeros([HEADS * TOKENS], tl.float32)
    b_acc = tl.zeros([HEADS * TOKENS, D], tl.float32)
    for n0 in range(0, kv_len, BN):
        block, o_row_in_block = kv_places(p_table, n0, kv_len, BN, BLOCK_SIZE)
        m_n = (n0 + o_n < kv_len)[:, None]
        o_k, o_v = block * SKB + o_row_in_block * SKR, block * SVB + o_row_in_block * SVR
        b_k = tl.load(p_k_head + o_k[:, None], mask=m_n, other=0.0)  # wide
        b_v = tl.load(p_v_head + o_v[:, None], mask=m_n, other=0.0)  # wide
        m_s = n0 + o_n[None, :] <= position + o_t[:, None]  # a token's own row and those before
        b_max, b_sum, b_acc = attend_tile(b_q, b_k, b_v, m_s, b_max, b_sum, b_acc, SCALE)

    # By halves of D, for the whole of the gate beside the sums would not fit into the registers.
    b_halves = tl.permute(tl.reshape(b_acc, [HEADS * TOKENS, 2, D // 2]), (0, 2, 1))
    b_left, b_right = tl.split(b_halves)
    b_scale = (1.0 / b_sum)[:, None]
    o_half = tl.arange(0, D // 2)[None, :]
    p_gate += first * row_gate + head * SGH
    p_out += first * (KV * G * D) + head * D
    o_gate = o_row * row_gate + o_head * SGH + o_half
    o_out = o_row * (KV * G * D) + o_head * D + o_half
    _store_gated(b_left * b_scale, p_gate + o_gate, p_out + o_out, m_m)
    _store_gated(b_right * b_scale, p_gate + D // 2 + o_gate, p_out + D // 2 + o_out, m_m)


def _tiles(cu_seqlens: IdVector, starts: IdVector, device: torch.device) -> Ids:
    """Four ids a query tile: sequence, first packed token, its position, number of tokens.

    Those with the most K/V rows come first, so that the last programs to start are short ones.
    """
    offsets, positions = as_list(cu_seqlens, "cu_seqlens"), as_list(starts, "start_positions")
    tiles = [
        (seq, token, position + token - lo, min(KERNEL_CHUNK, hi - token))
        for seq, (lo, hi, position) in enumerate(
            zip(offsets[:-1], offsets[1:], positions, strict=True)
        )
        for token in range(lo, hi, KERNEL_CHUNK)
    ]
    tiles.sort(key=lambda tile: -tile[2])
    return Ids([value for tile in tiles for value in tile], device)


_kept_tiles = functools.lru_cache(_KEPT_TILES)(_tiles)


def attention_prefill(
    q: torch.Tensor,
    gate: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cu_seqlens: IdVector,
    start_positions: IdVector,
    block_tables: validate.BlockLists,
) -> torch.Tensor:
    """Causal attention of packed sequences over their paged K/V; see reference.attention_prefill.

    q, gate [T, heads, D]: the last dim contiguous, other strides free; returns a contiguous array.
    """
    require_runnable(q.device)
    validate.attention_prefill(
        q,
        gate,
        k_cache,
        v_cache,
        cu_seqlens=cu_seqlens,
        start_positions=start_positions,
        block_tables=block_tables,
    )
    require_layout(q, gate, k_cache, v_cache)
    tables = as_tables(block_tables, q.device).tensor
    kept = isinstance(cu_seqlens, Ids) and isinstance(start_positions, Ids)
    tiles = (_kept_tiles if kept else _tiles)(cu_seqlens, start_positions, q.device)
    (heads, D), kv = q.shape[1:], k_cache.shape[2]
    tiling = prefill_tiling(target_of(q.device), q.dtype, heads // kv)
    num_programs = len(tiles) // 4 * kv * -(-heads // kv // tiling.HEADS)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(
        _prefill_kernel,
        (num_programs,),
        q,
        gate,
        k_cache,
        v_cache,
        out,
        tiles.tensor,
        tables,
        tables.shape[1],
        row_stride(q),
        row_stride(gate),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        SQH=q.stride(1),
        SGH=gate.stride(1),
        **cache_strides(k_cache, v_cache),
        SCALE=math.log2(math.e) * D**-0.5,
        KV=kv,
        G=heads // kv,
        D=D,
        TOKENS=KERNEL_CHUNK,
        HEADS=tiling.HEADS,
        BN=tiling.BN,
    )
    return out
