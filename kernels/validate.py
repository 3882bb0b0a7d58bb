"""What the ops of this package refuse, checked before anything is written.

Every function raises ValueError with the expected and the actual value. Tensors are looked at for
shape, dtype, device and strides only; ids are looked at on the host. Of `Ids` and `BlockTables`,
which never change, the checks are kept: the layers of one forward pass pay for them once.

The rules for slots are in `slot_rules.py`.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from kernels.constants import KERNEL_CHUNK
from kernels.ids import BlockTables, Ids, IdVector, as_list
from kernels.slot_rules import Segments, require, row_slots, segments, snapshots, step_slots

Slots = dict[str, Any]  # read_slots, write_slots, cu_seqlens
BlockLists = BlockTables | Sequence[Sequence[int]]

_KEPT_CHECKS = 64  # a forward pass makes a handful


def as_lists(**id_vectors: IdVector) -> list[Sequence[int]]:
    """The host values of each; ValueError unless int64 vectors or integers."""
    return [as_list(ids, name) for name, ids in id_vectors.items()]


def shape(x: torch.Tensor, name: str, *sizes: int | None) -> None:
    """`x` has exactly these sizes (None: any)."""
    ok = x.ndim == len(sizes) and all(s in (None, n) for s, n in zip(sizes, x.shape, strict=True))
    require(ok, f"shape of {name}", ["*" if s is None else s for s in sizes], list(x.shape))


def same_dtype(reference: torch.Tensor, /, **others: torch.Tensor) -> None:
    """All have the floating dtype of `reference`."""
    require(reference.dtype.is_floating_point, "dtype", "a floating one", reference.dtype)
    for name, x in others.items():
        require(x.dtype == reference.dtype, f"dtype of {name}", reference.dtype, x.dtype)


def slot_view(pool: torch.Tensor, name: str) -> None:
    """A pool view [num_slots, ...]: inner dims contiguous, slots that do not overlap."""
    inner = 1
    for size, stride in zip(pool.shape[:0:-1], pool.stride()[:0:-1], strict=True):
        require(stride == inner or size == 1, f"strides of {name}", "contiguous", pool.stride())
        inner *= size
    apart = pool.shape[0] <= 1 or pool.stride(0) >= inner
    require(apart, f"slot stride of {name}", f"at least {inner}", pool.stride(0))


def same_device(x: torch.Tensor, /, **others: torch.Tensor) -> None:
    """All lie where `x` does."""
    for name, other in others.items():
        require(other.device == x.device, f"device of {name}", x.device, other.device)


def _check_rows(
    num_tokens: int,
    num_slots: int,
    read_slots: IdVector,
    write_slots: IdVector,
    cu_seqlens: IdVector | None,
    snapshot_slots: IdVector | None,
) -> Segments:
    """The segments of a prefill (with snapshots) or of steps, once their slots are checked."""
    reads, writes = as_lists(read_slots=read_slots, write_slots=write_slots)
    offsets = range(num_tokens + 1) if cu_seqlens is None else as_list(cu_seqlens, "cu_seqlens")
    pairs = segments(offsets, num_tokens=num_tokens)
    if snapshot_slots is None:
        step_slots(reads, writes, pairs, num_slots=num_slots)
    else:
        row_slots(reads, writes, num_rows=len(pairs), num_slots=num_slots)
        snaps = as_list(snapshot_slots, "snapshot_slots")
        snapshots(snaps, pairs, reads, writes, num_slots=num_slots)
    return pairs


_kept_rows = functools.lru_cache(_KEPT_CHECKS)(_check_rows)


def _rows(
    num_tokens: int,
    num_slots: int,
    read_slots: IdVector,
    write_slots: IdVector,
    cu_seqlens: IdVector | None,
    snapshot_slots: IdVector | None,
) -> Segments:
    ids = (read_slots, write_slots, cu_seqlens, snapshot_slots)
    kept = all(x is None or isinstance(x, Ids) for x in ids)
    return (_kept_rows if kept else _check_rows)(num_tokens, num_slots, *ids)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    *,
    read_slots: IdVector,
    write_slots: IdVector,
    cu_seqlens: IdVector | None = None,
    snapshot_slots: IdVector | None = None,
) -> Segments:
    """Both convolutions; returns the segments. The windows have the dtype of what they keep."""
    shape(x, "x", None, None)
    shape(weight, "weight", x.shape[1], None)
    width = weight.shape[1]
    require(1 <= width <= KERNEL_CHUNK, "conv width", f"in [1, {KERNEL_CHUNK}]", width)
    shape(windows, "windows", None, weight.shape[1] - 1, x.shape[1])
    same_dtype(x, windows=windows)
    same_device(x, weight=weight, windows=windows)
    slot_view(windows, "windows")
    num_slots = windows.shape[0]
    return _rows(x.shape[0], num_slots, read_slots, write_slots, cu_seqlens, snapshot_slots)


def gated_delta(
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
    snapshot_slots: IdVector | None = None,
) -> Segments:
    """Both delta rules; returns the segments. g, beta and the states are wide, whatever q is."""
    shape(q, "q", None, None, None)
    shape(k, "k", *q.shape)
    shape(v, "v", q.shape[0], None, None)
    grouped = q.shape[1] > 0 and v.shape[1] % q.shape[1] == 0
    require(grouped, "value heads", f"a multiple of {q.shape[1]}", v.shape[1])
    shape(g, "g", *v.shape[:2])
    shape(beta, "beta", *v.shape[:2])
    shape(states, "states", None, v.shape[1], v.shape[2], q.shape[2])
    same_dtype(q, k=k, v=v)
    is_wide = states.dtype in (torch.float32, torch.float64)  # float64: the reference
    require(is_wide, "dtype of states", torch.float32, states.dtype)
    same_dtype(states, g=g, beta=beta)
    same_device(q, k=k, v=v, g=g, beta=beta, states=states)
    slot_view(states, "states")
    num_slots = states.shape[0]
    return _rows(q.shape[0], num_slots, read_slots, write_slots, cu_seqlens, snapshot_slots)


def gated_delta_net_step(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    windows: torch.Tensor,
    states: torch.Tensor,
    num_key_heads: int,
    slots: Slots,
) -> None:
    """All that its parts check, so that a refusal comes before the first of them writes."""
    shape(states, "states", windows.shape[0], None, None, None)
    HV, V, K = states.shape[1:]
    grouped = num_key_heads > 0 and HV % num_key_heads == 0
    require(grouped, "value heads", f"a multiple of {num_key_heads}", HV)
    shape(qkv, "qkv", None, 2 * num_key_heads * K + HV * V)
    shape(a, "a", qkv.shape[0], HV)
    delta_gates(a, b, A_log, dt_bias)
    require(states.dtype == torch.float32, "dtype of states", torch.float32, states.dtype)
    slot_view(states, "states")
    same_device(qkv, a=a, b=b, A_log=A_log, dt_bias=dt_bias, states=states)
    causal_conv(qkv, conv_weight, windows, **slots)


def _attention(
    q: torch.Tensor, gate: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    """Query heads in whole groups, and one dtype and device for all."""
    shape(q, "q", None, None, None)
    shape(gate, "gate", *q.shape)
    shape(k_cache, "k_cache", None, None, None, q.shape[2])
    shape(v_cache, "v_cache", *k_cache.shape)
    same_dtype(q, gate=gate, k_cache=k_cache, v_cache=v_cache)
    same_device(q, gate=gate, k_cache=k_cache, v_cache=v_cache)
    block_size, num_kv_heads = k_cache.shape[1:3]
    require(block_size >= 1, "block size", "at least 1", block_size)
    grouped = 1 <= num_kv_heads <= q.shape[1] and q.shape[1] % num_kv_heads == 0
    require(grouped, "query heads", f"a multiple of {num_kv_heads}, at least 1", q.shape[1])


def _tables(
    kv_lens: Sequence[int], block_tables: BlockLists, num_blocks: int, block_size: int
) -> None:
    """A block table a row that covers its K/V rows; blocks beyond them are not looked at."""
    tables = block_tables.host if isinstance(block_tables, BlockTables) else block_tables
    num_tables = len(tables)
    require(num_tables == len(kv_lens), "number of block tables", len(kv_lens), num_tables)
    for row, (kv_len, table) in enumerate(zip(kv_lens, tables, strict=True)):
        needed = -(-kv_len // block_size)
        require(needed <= len(table), f"blocks of row {row}", f"at least {needed}", len(table))
        for block in dict.fromkeys(table[:needed]):  # a graph's placeholder is one block
            inside = 0 <= block < num_blocks
            require(inside, f"block of row {row}", f"in [0, {num_blocks})", block)


def _check_prefill(
    num_tokens: int,
    num_blocks: int,
    block_size: int,
    cu_seqlens: IdVector,
    start_positions: IdVector,
    block_tables: BlockLists,
) -> Segments:
    pairs = segments(as_list(cu_seqlens, "cu_seqlens"), num_tokens=num_tokens)
    starts = as_list(start_positions, "start_positions")
    require(len(starts) == len(pairs), "number of start positions", len(pairs), len(starts))
    kv_lens = []
    for row, (position, (start, end)) in enumerate(zip(starts, pairs, strict=True)):
        aligned = position >= 0 and position % KERNEL_CHUNK == 0
        require(aligned, f"start of row {row}", f"a multiple of {KERNEL_CHUNK}", position)
        kv_lens.append(position + end - start)
    _tables(kv_lens, block_tables, num_blocks, block_size)
    return pairs


_kept_prefill = functools.lru_cache(_KEPT_CHECKS)(_check_prefill)


def attention_prefill(
    q: torch.Tensor,
    gate: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cu_seqlens: IdVector,
    start_positions: IdVector,
    block_tables: BlockLists,
) -> Segments:
    """Returns the segments; each starts at a multiple of KERNEL_CHUNK from token 0."""
    _attention(q, gate, k_cache, v_cache)
    ids = (cu_seqlens, start_positions, block_tables)
    kept = all(isinstance(x, Ids | BlockTables) for x in ids)
    num_blocks, block_size = k_cache.shape[:2]
    check = _kept_prefill if kept else _check_prefill
    return check(q.shape[0], num_blocks, block_size, *ids)


def _check_decode(
    num_rows: int, num_blocks: int, block_size: int, kv_lens: IdVector, block_tables: BlockLists
) -> None:
    lengths = as_list(kv_lens, "kv_lens")
    require(len(lengths) == num_rows, "number of K/V lengths", num_rows, len(lengths))
    for row, kv_len in enumerate(lengths):
        require(kv_len >= 1, f"K/V length of row {row}", "at least 1", kv_len)
    _tables(lengths, block_tables, num_blocks, block_size)


_kept_decode = functools.lru_cache(_KEPT_CHECKS)(_check_decode)


def attention_decode(
    q: torch.Tensor,
    gate: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    kv_lens: IdVector,
    block_tables: BlockLists,
) -> None:
    """Each query has at least one K/V row, its own."""
    _attention(q, gate, k_cache, v_cache)
    kept = isinstance(kv_lens, Ids) and isinstance(block_tables, BlockTables)
    check = _kept_decode if kept else _check_decode
    num_blocks, block_size = k_cache.shape[:2]
    check(q.shape[0], num_blocks, block_size, kv_lens, block_tables)


def _check_indices(num_rows: int, block_size: int, kv_indices: IdVector) -> None:
    seen: set[int] = set()
    for index in as_list(kv_indices, "kv_indices"):
        require(0 <= index < num_rows, "K/V index", f"in [0, {num_rows})", index)
        require(index < block_size or index not in seen, "K/V index", "used once", index)
        seen.add(index)


_kept_indices = functools.lru_cache(_KEPT_CHECKS)(_check_indices)


def decode_ids(
    kv_indices: Ids,
    kv_lens: Ids,
    block_tables: BlockTables,
    read_slots: Ids,
    write_slots: Ids,
    *,
    num_blocks: int,
    block_size: int,
    num_slots: int,
) -> None:
    """All that the ops of a decode step, one token a row, check of their ids: for a graph, whose
    ops see none of them."""
    num_rows = len(kv_lens)
    require(len(kv_indices) == num_rows, "number of K/V indices", num_rows, len(kv_indices))
    _check_indices(num_blocks * block_size, block_size, kv_indices)
    _check_decode(num_rows, num_blocks, block_size, kv_lens, block_tables)
    _check_rows(num_rows, num_slots, read_slots, write_slots, None, None)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: IdVector,
) -> None:
    """A place for each row; only those of block 0, the padding block, may be hit twice.

    Blocks may lie apart, as those of one layer do where each block has all layers side by side.
    """
    shape(k, "k", len(kv_indices), None, None)
    shape(v, "v", *k.shape)
    shape(k_cache, "k_cache", None, None, *k.shape[1:])
    shape(v_cache, "v_cache", *k_cache.shape)
    same_dtype(k, v=v, k_cache=k_cache, v_cache=v_cache)
    same_device(k, v=v, k_cache=k_cache, v_cache=v_cache)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        after = cache.stride(0) >= cache.shape[1] * cache.stride(1) or cache.shape[0] <= 1
        require(after, f"strides of {name}", "one block after the other", cache.stride())
        apart = all(n <= 1 or s > 0 for n, s in zip(cache.shape, cache.stride(), strict=True))
        require(apart, f"strides of {name}", "no row on top of another", cache.stride())
    same = k_cache.numel() > 0 and not k_cache.is_meta and k_cache.data_ptr() == v_cache.data_ptr()
    require(not same, "v_cache", "other memory than k_cache", "the same")
    num_blocks, block_size = k_cache.shape[:2]
    check = _kept_indices if isinstance(kv_indices, Ids) else _check_indices
    check(num_blocks * block_size, block_size, kv_indices)


def _arena(arena: torch.Tensor, written_slots: Sequence[int]) -> None:
    shape(arena, "arena", None, None)
    require(arena.dtype == torch.uint8, "dtype of arena", torch.uint8, arena.dtype)
    slot_view(arena, "arena")
    for slot in written_slots:
        real = 1 <= slot < arena.shape[0]
        require(real, "written slot", f"in [1, {arena.shape[0]})", slot)
    distinct = len(set(written_slots)) == len(written_slots)
    require(distinct, "written slots", "distinct", list(written_slots))


def slot_copies(arena: torch.Tensor, sources: Sequence[int], destinations: Sequence[int]) -> None:
    """Distinct destinations, none of them a source, all of them real slots."""
    as_lists(sources=sources, destinations=destinations)
    _arena(arena, destinations)
    num_copies = len(destinations)
    require(len(sources) == num_copies, "number of sources", num_copies, len(sources))
    for slot in sources:
        real = 1 <= slot < arena.shape[0]
        require(real, "source slot", f"in [1, {arena.shape[0]})", slot)
    both = sorted({*sources} & {*destinations})
    require(not both, "slots that are source and destination", "none", both)


def block_copies(
    kv_cache: torch.Tensor, sources: Sequence[int], destinations: Sequence[int]
) -> tuple[torch.Tensor, list[int], list[int]]:
    """Like `slot_copies`, of the blocks of kv_cache [layers, 2, num_blocks, ...], contiguous.

    Returns the arguments of `copy_slots` that do it: the cache as an arena of the blocks of all
    layers, K and V, and the ids in it.
    """
    require(kv_cache.ndim > 3, "dims of kv_cache", "[layers, 2, num_blocks, ...]", kv_cache.ndim)
    layout = "contiguous"
    require(kv_cache.is_contiguous(), "strides of kv_cache", layout, kv_cache.stride())
    num_planes, num_blocks = kv_cache.shape[0] * kv_cache.shape[1], kv_cache.shape[2]
    arena = kv_cache.view(num_planes * num_blocks, math.prod(kv_cache.shape[3:])).view(torch.uint8)
    if not num_planes:  # a model without attention layers
        return arena, [], []
    slot_copies(arena[:num_blocks], sources, destinations)
    firsts = range(0, num_planes * num_blocks, num_blocks)
    return (
        arena,
        [first + id_ for first in firsts for id_ in sources],
        [first + id_ for first in firsts for id_ in destinations],
    )


def zeroed_slots(arena: torch.Tensor, slots: Sequence[int]) -> None:
    """Distinct slots, none of them the padding slot."""
    as_list(slots, "slots")
    _arena(arena, slots)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """One pair of tables for each row, of at most half the head's width."""
    shape(x, "x", None, None, None)
    shape(cos, "cos", x.shape[0], None)
    shape(sin, "sin", *cos.shape)
    rotated = 2 * cos.shape[1]
    require(rotated <= x.shape[2], "rotated dims", f"at most {x.shape[2]}", rotated)


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> None:
    """One value a head for each row, one parameter a head."""
    shape(a, "a", None, None)
    shape(b, "b", *a.shape)
    shape(A_log, "A_log", a.shape[1])
    shape(dt_bias, "dt_bias", a.shape[1])
