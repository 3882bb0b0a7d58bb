"""Does every op without a state agree with float64: attention, K/V writes, rowwise ops, matmul?"""

import itertools

import torch

from experiments.gpu_check import reference as wide
from experiments.gpu_check.cases import Cache, queries
from experiments.gpu_check.setup import Bench, nan_outputs
from kernels import reference

EPS = 1e-6


def attention(bench: Bench) -> None:
    s = bench.sizes
    lengths, starts = zip(*s.attention_prefills, strict=True)
    cache = Cache(bench, [sum(pair) for pair in s.attention_prefills])
    offsets = [0, *itertools.accumulate(lengths)]
    q, gate = queries(bench, offsets[-1])
    with nan_outputs():
        out = bench.ops.attention_prefill(
            q,
            gate,
            cache.k,
            cache.v,
            cu_seqlens=bench.ids(offsets),
            start_positions=bench.ids(starts),
            block_tables=bench.tables(cache.tables),
        )
    pairs = itertools.pairwise(offsets)
    for (lo, hi), start, table in zip(pairs, starts, cache.tables, strict=True):
        keys, values = (wide.kv_rows(x, table, start + hi - lo) for x in (cache.k, cache.v))
        expected = wide.attend(q[lo:hi], gate[lo:hi], keys, values)
        name = f"attention prefill, {hi - lo} tokens at {start}"
        bench.close(name, out[lo:hi], expected, s.bars.attention)

    cache = Cache(bench, list(s.kv_lens))
    q, gate = queries(bench, len(s.kv_lens))
    lists = dict(kv_lens=bench.ids(s.kv_lens), block_tables=bench.tables(cache.tables))
    with nan_outputs():
        out = bench.ops.attention_decode(q, gate, cache.k, cache.v, **lists)
    for row, (kv_len, table) in enumerate(zip(s.kv_lens, cache.tables, strict=True)):
        keys, values = (wide.kv_rows(x, table, kv_len) for x in (cache.k, cache.v))
        one = slice(row, row + 1)
        expected = wide.attend(q[one], gate[one], keys, values)
        bench.close(f"attention decode at {kv_len}", out[one], expected, s.bars.attention)


def write_kv(bench: Bench) -> None:
    s = bench.sizes
    rows, num_blocks = s.rows, s.rows // 64 + 3
    size = (2, num_blocks, 64, s.kv, s.D)
    cache = torch.full(size, float("nan"), dtype=s.dtype, device=bench.device)
    expected = cache.clone()
    packed = bench.normal(rows, 2 * s.kv * s.D + 64)[:, : 2 * s.kv * s.D]
    k, v = (x.unflatten(-1, (s.kv, s.D)) for x in packed.chunk(2, -1))
    order = torch.randperm(64 * (num_blocks - 1), generator=bench.generator, device=bench.device)
    indices = [64 + i for i in order[:rows].tolist()]
    bench.ops.write_kv(k, v, *cache, bench.ids(indices))
    reference.write_kv(k, v, *expected, indices)
    bench.equal("write_kv: whole cache", cache, expected)


def rowwise(bench: Bench) -> None:
    s, ops = bench.sizes, bench.ops
    R, HV = s.rows, s.key_heads * s.ratios[0]
    bar = s.bars.rounded
    x = bench.normal(R, s.hidden)
    heads, gates = bench.normal(R, s.heads, 2, s.D)[:, :, 0], bench.normal(R, HV, s.width)
    o = bench.normal(R, HV, s.width, dtype=torch.float32)
    weight, head, value = (bench.normal(n, dtype=torch.float32) for n in (s.hidden, s.D, s.width))
    angle = bench.uniform(R, s.rotary_dim // 2, low=-3.1, high=3.1)
    cos, sin = angle.cos(), angle.sin()
    gate_up = bench.normal(R, 2 * s.mlp)
    a, b = bench.normal(R, 2 * HV).chunk(2, -1)
    A_log, dt_bias = bench.uniform(HV, low=-4.0, high=1.0), bench.uniform(HV, low=-6.0, high=6.0)
    with nan_outputs():
        found = {
            "rms_norm": ops.rms_norm(x, weight, eps=EPS),
            "rms_norm of heads": ops.rms_norm(heads, head, eps=EPS),
            "gated_rms_norm": ops.gated_rms_norm(o, gates, value, eps=EPS),
            "rotary": ops.rotary(heads, cos, sin),
            "qk_norm_rotary": ops.qk_norm_rotary(heads, head, cos, sin, eps=EPS),
            "swiglu": ops.swiglu(gate_up),
        }
        g, beta = ops.delta_gates(a, b, A_log, dt_bias)

    def double(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.double() for t in tensors)

    normed = reference.rms_norm(*double(heads, head), eps=EPS)
    expected = {
        "rms_norm": reference.rms_norm(*double(x, weight), eps=EPS),
        "rms_norm of heads": normed,
        "gated_rms_norm": reference.gated_rms_norm(*double(o, gates, value), eps=EPS),
        "rotary": reference.rotary(*double(heads, cos, sin)),
        "qk_norm_rotary": reference.rotary(normed, *double(cos, sin)),
        "swiglu": wide.swiglu(gate_up),
    }
    for name, out in found.items():
        bench.holds(f"{name}: dtype", out.dtype == s.dtype, str(out.dtype))
        bench.close(name, out, expected[name], bar)
    wanted = reference.delta_gates(*double(a, b, A_log, dt_bias))
    bench.close("delta_gates: g", g, wanted[0], s.bars.float32)
    bench.close("delta_gates: beta", beta, wanted[1], s.bars.float32)


def matmul(bench: Bench) -> None:
    s = bench.sizes
    for N, K in s.matmuls:
        weight = bench.normal(N, K).mul_(K**-0.5)
        linear = bench.ops.linear(weight)
        for M in s.matmul_rows:
            x = bench.normal(M, K + 64)[:, :K]
            expected = x.double() @ weight.double().T
            for role, prefill_rows in (("prefill", M), ("decode", 0), ("both", M // 2)):
                with nan_outputs():
                    y = linear(x, prefill_rows)
                name = f"matmul [{M}, {K}] x [{N}, {K}], {role}"
                bench.close(name, y, expected, s.bars.matmul)


PARTS = {
    "attention": attention,
    "write_kv": write_kv,
    "rowwise": rowwise,
    "matmul": matmul,
}
