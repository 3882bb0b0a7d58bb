"""How fast are attention and the batch-invariant matmul of a 9B layer? (GPU only.)"""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from experiments.gpu_check.cases import queries
from experiments.gpu_check.setup import Bench, error
from experiments.gpu_check.timings import Call, row

SDPA_BAR = 0.02

Sdpa = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _blocks(bench: Bench, rows: int, kv_len: int) -> tuple[torch.Tensor, list[range]]:
    """K and V of `rows` sequences in blocks, [2, blocks, 64, kv, D], and their tables."""
    s, each = bench.sizes, -(-kv_len // 64)
    cache = bench.normal(2, rows * each, 64, s.kv, s.D)
    return cache, [range(row * each, (row + 1) * each) for row in range(rows)]


def attention_prefill(bench: Bench) -> None:
    s, T = bench.sizes, bench.sizes.times.attention_tokens
    for cached in s.times.attention_cached:
        (q, gate), end = queries(bench, T), cached + T
        cache, tables = _blocks(bench, 4, end)  # four sequences in turn: the cache holds none
        calls = []
        for table in tables:
            ids = dict(
                cu_seqlens=bench.ids([0, T]),
                start_positions=bench.ids([cached]),
                block_tables=bench.tables([table]),
            )
            calls.append(partial(bench.ops.attention_prefill, q, gate, *cache, **ids))
        keys, values = _contiguous(cache, len(tables), end)  # [4, kv, end, D]
        group = s.heads // s.kv
        wide = [x.repeat_interleave(group, 1) for x in (keys, values)]
        mask = torch.ones(T, end, dtype=torch.bool, device=bench.device).tril(cached)
        variants: dict[str, Sdpa] = {"SDPA, mask, repeated heads": _masked(mask)}
        if not cached:
            variants["SDPA, is_causal, repeated heads"] = _causal
        lower_right = _lower_right(T, end)
        if lower_right is not None:
            variants["SDPA, lower right, repeated heads"] = _masked(lower_right)
        rows = q.transpose(0, 1)[None]
        ungated = (calls[0]() / gate.sigmoid()).transpose(0, 1)[None]
        others: dict[str, list[Call]] = {}
        for name, run in variants.items():
            sets = [(rows, wide[0][i : i + 1], wide[1][i : i + 1]) for i in range(len(tables))]
            if _agrees(bench, name, run, sets[0], ungated):
                others[name] = [partial(run, *each) for each in sets]
        pairs = T * cached + T * (T + 1) // 2
        flops = 4 * s.heads * s.D * pairs
        num_bytes = 2 * (3 * T * s.heads * s.D + 2 * end * s.kv * s.D)
        name = f"attention prefill of {T} at {cached}"
        row(bench, name, calls, flops=flops, num_bytes=num_bytes, baselines=others, note=_NOTE)


def attention_decode(bench: Bench) -> None:
    s, kv_len = bench.sizes, bench.sizes.times.kv_len
    group = s.heads // s.kv
    for rows in s.times.decode_rows:
        sequences = max(rows, 8)  # 32 MiB each: more than the cache holds
        q, gate = queries(bench, rows)
        cache, tables = _blocks(bench, sequences, kv_len)
        keys, values = _contiguous(cache, sequences, kv_len)
        calls, sets = [], []
        for first in range(0, sequences, rows):
            ids = dict(
                kv_lens=bench.ids([kv_len] * rows),
                block_tables=bench.tables(tables[first : first + rows]),
            )
            calls.append(partial(bench.ops.attention_decode, q, gate, *cache, **ids))
            some = slice(first, first + rows)
            sets.append((q[:, :, None], keys[some], values[some]))
        ungated = (calls[0]() / gate.sigmoid())[:, :, None]
        variants: dict[str, Sdpa] = {
            "SDPA, enable_gqa": partial(functional.scaled_dot_product_attention, enable_gqa=True),
            "SDPA, heads of a group as rows": partial(_grouped, group),
        }
        others = {
            name: [partial(run, *each) for each in sets]
            for name, run in variants.items()
            if _agrees(bench, name, run, sets[0], ungated)
        }
        num_bytes = 2 * 2 * rows * kv_len * s.kv * s.D
        name = f"attention decode of {rows} at {kv_len}"
        row(bench, name, calls, num_bytes=num_bytes, baselines=others, note=_NOTE)
        del cache, keys, values, calls, sets, others


_NOTE = "SDPA on contiguous K/V, without the gate"


def _contiguous(cache: torch.Tensor, rows: int, kv_len: int) -> tuple[torch.Tensor, ...]:
    """[rows, kv, kv_len, D] of K and of V."""
    both = cache.unflatten(1, (rows, -1)).flatten(2, 3)[:, :, :kv_len]
    return tuple(x.transpose(1, 2).contiguous() for x in both)


def _masked(mask: torch.Tensor) -> Sdpa:
    return partial(functional.scaled_dot_product_attention, attn_mask=mask)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _grouped(group: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    rows, heads, _, D = q.shape
    out = functional.scaled_dot_product_attention(q.view(rows, heads // group, group, D), k, v)
    return out.reshape(rows, heads, 1, D)


def _lower_right(tokens: int, rows: int) -> torch.Tensor | None:
    try:
        from torch.nn.attention.bias import causal_lower_right

    except ImportError:  # torch before 2.2
        return None
    return causal_lower_right(tokens, rows)


def _agrees(
    bench: Bench, name: str, run: Sdpa, inputs: tuple[torch.Tensor, ...], ours: torch.Tensor
) -> bool:
    """Whether this variant runs and gives what we do."""
    try:
        found = error(ours, run(*inputs))
    except Exception as problem:
        bench.say(f"  {name}: does not run: {type(problem).__name__}: {str(problem)[:160]}")
        return False
    if not found < SDPA_BAR:
        bench.say(f"  {name}: differs by {found:.3g}, left out")
    return found < SDPA_BAR


def matmul(bench: Bench) -> None:
    """Both roles at the layer's four weights, each in turn with others of its shape."""
    times = bench.sizes.times
    for N, K in bench.sizes.matmuls:
        copies = max(2, -(-times.rotated_bytes // (2 * N * K)))
        weights = [bench.normal(N, K).mul_(K**-0.5) for _ in range(copies)]
        linears = [bench.ops.linear(weight) for weight in weights]
        for M in times.matmul_rows:
            x = bench.normal(M, K)
            work = dict(num_bytes=2 * (N * K + M * K + M * N), flops=2 * M * N * K)
            library = [partial(functional.linear, x, weight) for weight in weights]
            for role, rows in (("prefill", M), ("decode", 0)):
                calls = [partial(linear, x, rows) for linear in linears]
                name = f"matmul [{M}, {K}] x [{N}, {K}], {role}"
                row(bench, name, calls, baselines={"functional.linear": library}, **work)
        del weights, linears


PARTS = {
    "time of attention prefill": attention_prefill,
    "time of attention decode": attention_decode,
    "time of matmul": matmul,
}
