"""Paged causal attention and K/V writes in plain torch; see `torch_ops` for why it is tiled."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from kernels import validate
from kernels.constants import KERNEL_CHUNK
from kernels.elementwise import sigmoid
from kernels.ids import IdVector, as_ids, as_list, as_tables
from kernels.linear import matmul_nt


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: IdVector,
) -> None:
    """Store rows k, v [R, kv, D] at flat indices (block_id * block_size + offset) of the caches."""
    validate.write_kv(k, v, k_cache, v_cache, kv_indices)
    rows = as_ids(kv_indices, "kv_indices", k.device).tensor
    block_size = k_cache.shape[1]
    for cache, x in ((k_cache, k), (v_cache, v)):
        if cache.stride(0) == block_size * cache.stride(1):
            cache.flatten(0, 1).index_copy_(0, rows, x)  # a view: blocks lie back to back
        else:
            cache[rows // block_size, rows % block_size] = x


def _gather(cache: torch.Tensor, block_table: Sequence[int], kv_len: int) -> torch.Tensor:
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
    cu_seqlens: IdVector,
    start_positions: IdVector,
    block_tables: validate.BlockLists,
) -> torch.Tensor:
    """Causal attention of packed sequences over their paged K/V; see reference.attention_prefill.

    One tile of KERNEL_CHUNK queries at a time, the query heads of a K/V head folded into its rows.
    Scores and softmax are float32; the probabilities meet V in the model's dtype.
    """
    heads, D = q.shape[1:]
    kv = k_cache.shape[2]
    above = torch.ones(KERNEL_CHUNK, KERNEL_CHUNK, dtype=torch.bool).triu_(1)
    out = torch.empty_like(q)
    segments = validate.attention_prefill(
        q,
        gate,
        k_cache,
        v_cache,
        cu_seqlens=cu_seqlens,
        start_positions=start_positions,
        block_tables=block_tables,
    )
    starts = as_list(start_positions, "start_positions")
    tables = as_tables(block_tables, q.device).host
    for (lo, hi), start, table in zip(segments, starts, tables, strict=True):
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
    return out.mul_(sigmoid(gate))


def attention_decode(
    q: torch.Tensor,
    gate: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    kv_lens: IdVector,
    block_tables: validate.BlockLists,
) -> torch.Tensor:
    """One query row of each of N sequences over its paged K/V; see reference.attention_decode."""
    validate.attention_decode(q, gate, k_cache, v_cache, kv_lens=kv_lens, block_tables=block_tables)
    heads, D = q.shape[1:]
    kv = k_cache.shape[2]
    out = torch.empty_like(q)
    lengths, tables = as_list(kv_lens, "kv_lens"), as_tables(block_tables, q.device).host
    for row, (kv_len, table) in enumerate(zip(lengths, tables, strict=True)):
        query = q[row].view(1, kv, heads // kv, D)
        keys, values = (_gather(c, table, kv_len)[None] for c in (k_cache, v_cache))
        out[row] = functional.scaled_dot_product_attention(query, keys, values).view(heads, D)
    return out.mul_(sigmoid(gate))
