"""The kernels without a state: attention over the paged K/V cache, the dense layer of the MLP."""

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from experiments.bench_kernels import baselines as others
from experiments.bench_kernels.cases import ATTENTION_BAR, Baseline, Case, Layer, Sizes
from experiments.bench_kernels.ceilings import Work
from kernels.linear import PackedLinear

BLOCK_SIZE = 64


def dense_cases(layer: Layer, sizes: Sizes) -> Iterator[Case]:
    for cached in (0, sizes.cached):
        yield attention_prefill(layer, sizes.chunk, cached)
    yield attention_decode(layer, sizes.cached)
    for rows in (1, sizes.chunk):
        yield dense(layer, rows)


def attention_work(layer: Layer, tokens: int, cached: int) -> Work:
    """Bytes, 2 a value: q and gate in, out, K and V in. FLOPs: 4 D a head and pair of query and
    key; query t meets cached + t + 1 keys. Softmax and gate are not counted."""
    num_pairs = tokens * cached + tokens * (tokens + 1) // 2
    values = 3 * tokens * layer.heads * layer.D + 2 * (cached + tokens) * layer.kv * layer.D
    return Work(2 * values, 4 * layer.heads * layer.D * num_pairs, "bfloat16_linear")


def caches(layer: Layer, num_rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor], range]:
    """K and V in blocks, the same rows lying together, and the block table."""
    num_blocks = -(-num_rows // BLOCK_SIZE)
    sizes = (1 + num_blocks, BLOCK_SIZE, layer.kv, layer.D)
    paged = [layer.device.normal(*sizes) for _ in range(2)]
    together = [cache[1:].flatten(0, 1)[:num_rows].clone() for cache in paged]
    return paged, together, range(1, 1 + num_blocks)


def attention_prefill(layer: Layer, tokens: int, cached: int) -> Case:
    """A chunk of one sequence on its cached tokens, K and V written already."""
    device = layer.device
    q, gate = (device.normal(tokens, layer.heads, layer.D) for _ in range(2))
    paged, together, table = caches(layer, cached + tokens)
    rows = dict(
        cu_seqlens=device.ids(0, tokens),
        start_positions=device.ids(cached),
        block_tables=device.tables(table),
    )
    seen = torch.ones(tokens, cached + tokens, dtype=torch.bool, device=q.device).tril_(cached)
    sdpa = partial(others.sdpa, q, gate, *together, seen)
    return layer.case(
        "attention prefill",
        {"tokens": tokens, "cached": cached},
        run=lambda: (layer.ops.attention_prefill(q, gate, *paged, **rows),),
        baselines=(Baseline("torch SDPA", sdpa),),
        work=attention_work(layer, tokens, cached),
        bar=ATTENTION_BAR,
    )


def attention_decode(layer: Layer, kv_len: int) -> Case:
    """One token of one sequence, the last of its kv_len."""
    device = layer.device
    q, gate = (device.normal(1, layer.heads, layer.D) for _ in range(2))
    paged, together, table = caches(layer, kv_len)
    rows = dict(kv_lens=device.ids(kv_len), block_tables=device.tables(table))
    sdpa = partial(others.sdpa, q, gate, *together, None)
    return layer.case(
        "attention decode",
        {"kv_len": kv_len},
        run=lambda: (layer.ops.attention_decode(q, gate, *paged, **rows),),
        baselines=(Baseline("torch SDPA", sdpa),),
        work=attention_work(layer, 1, kv_len - 1),
        bar=ATTENTION_BAR,
    )


def dense(layer: Layer, rows: int) -> Case:
    """gate_up of the MLP, [2 F, hidden]. Bytes, 2 a value: weight, x, y. FLOPs: 2 a weight and
    row."""
    out_features, hidden = 2 * layer.config["intermediate_size"], layer.config["hidden_size"]
    weight = layer.device.normal(out_features, hidden)
    x, linear = layer.device.normal(rows, hidden), PackedLinear(weight)
    num_values = weight.numel() + x.numel() + rows * out_features
    return layer.case(
        "dense gate_up",
        {"rows": rows},
        run=lambda: (linear(x),),
        baselines=(Baseline("torch linear", lambda: (functional.linear(x, weight),)),),
        work=Work(2 * num_values, 2 * rows * weight.numel(), "bfloat16_linear"),
    )
