"""The specification of attention and of the paged K/V cache, one query at a time.

Part of `reference.py`, which has the rules; the ops are imported from there. heads query heads, kv
K/V heads, D head width; caches [num_blocks, block_size, kv, D] belong to the caller.
"""

import torch

from kernels import validate
from kernels.ids import IdVector, as_list


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def attend(
    q: torch.Tensor, gate: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """One query q, gate [heads, D] against keys, values [rows, kv, D], scale D^-0.5.

    Query head h uses K/V head h // (heads/kv); the result is multiplied by sigmoid(gate).
    """
    ratio = q.shape[0] // keys.shape[1]
    out = torch.empty_like(q)
    for head in range(q.shape[0]):
        k, v = _wide(keys[:, head // ratio]), _wide(values[:, head // ratio])  # [rows, D]
        weights = torch.softmax(k @ _wide(q[head]) * q.shape[1] ** -0.5, dim=0)
        out[head] = ((weights @ v) * torch.sigmoid(_wide(gate[head]))).to(q.dtype)
    return out


def _kv_rows(cache: torch.Tensor, block_table: list[int], num_rows: int) -> torch.Tensor:
    """The first K/V rows of a sequence, in token order: [num_rows, kv, D]."""
    block_size = cache.shape[1]
    rows = [cache[block_table[t // block_size], t % block_size] for t in range(num_rows)]
    return torch.stack(rows)


def attention_prefill(
    q: torch.Tensor,
    gate: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cu_seqlens: IdVector,
    start_positions: list[int],
    block_tables: list[list[int]],
) -> torch.Tensor:
    """Causal attention of packed segments q, gate [T, heads, D] against the paged K/V cache.

    k_cache, v_cache [num_blocks, block_size, kv, D] already hold the rows of the segment itself:
    token t of segment i attends to the rows [0, start_positions[i] + t].
    """
    segments = validate.attention_prefill(
        q,
        gate,
        k_cache,
        v_cache,
        cu_seqlens=cu_seqlens,
        start_positions=start_positions,
        block_tables=block_tables,
    )
    out = torch.empty_like(q)
    for (start, end), position, table in zip(segments, start_positions, block_tables, strict=True):
        for t in range(start, end):
            kv_len = position + t - start + 1
            keys, values = _kv_rows(k_cache, table, kv_len), _kv_rows(v_cache, table, kv_len)
            out[t] = attend(q[t], gate[t], keys, values)
    return out


def attention_decode(
    q: torch.Tensor,
    gate: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    kv_lens: list[int],
    block_tables: list[list[int]],
) -> torch.Tensor:
    """One query a row, q, gate [N, heads, D], against the first kv_lens[i] rows of its sequence."""
    validate.attention_decode(q, gate, k_cache, v_cache, kv_lens=kv_lens, block_tables=block_tables)
    out = torch.empty_like(q)
    for row, (kv_len, table) in enumerate(zip(kv_lens, block_tables, strict=True)):
        keys, values = _kv_rows(k_cache, table, kv_len), _kv_rows(v_cache, table, kv_len)
        out[row] = attend(q[row], gate[row], keys, values)
    return out


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: IdVector,
) -> None:
    """Store row i of k, v [R, kv, D] at block kv_indices[i] // block_size, the rest its offset."""
    validate.write_kv(k, v, k_cache, v_cache, kv_indices)
    block_size = k_cache.shape[1]
    for row, index in enumerate(as_list(kv_indices, "kv_indices")):
        k_cache[index // block_size, index % block_size] = k[row]
        v_cache[index // block_size, index % block_size] = v[row]
