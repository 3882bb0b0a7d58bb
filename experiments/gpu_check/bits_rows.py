"""Do the rows of attention, of a matmul and of the rowwise ops depend on themselves alone?"""

import torch

from experiments.gpu_check.cases import Cache, queries
from experiments.gpu_check.setup import Bench
from kernels import KERNEL_CHUNK


def attention(bench: Bench) -> None:
    """Twice; each row or sequence alone; a prefill cut in two."""
    s, ops = bench.sizes, bench.ops
    cache = Cache(bench, list(s.kv_lens))
    q, gate = queries(bench, len(s.kv_lens))

    def decode(rows: list[int]) -> torch.Tensor:
        lists = dict(
            kv_lens=bench.ids([s.kv_lens[row] for row in rows]),
            block_tables=bench.tables([cache.tables[row] for row in rows]),
        )
        return ops.attention_decode(q[rows], gate[rows], cache.k, cache.v, **lists)

    y = decode(list(range(len(s.kv_lens))))
    bench.equal("attention decode: twice", decode(list(range(len(s.kv_lens)))), y)
    for row, kv_len in enumerate(s.kv_lens):
        bench.equal(f"attention decode: alone at {kv_len}", decode([row]), y[row : row + 1])

    T, C = s.split_tokens, KERNEL_CHUNK
    lengths = [T, C + 1]
    cache = Cache(bench, lengths)
    q, gate = queries(bench, sum(lengths))

    def prefill(lo: int, hi: int, offsets: list[int], starts: list[int], rows: list[int]):
        return ops.attention_prefill(
            q[lo:hi],
            gate[lo:hi],
            cache.k,
            cache.v,
            cu_seqlens=bench.ids(offsets),
            start_positions=bench.ids(starts),
            block_tables=bench.tables([cache.tables[row] for row in rows]),
        )

    y = prefill(0, T + C + 1, [0, T, T + C + 1], [0, 0], [0, 1])
    again = prefill(0, T + C + 1, [0, T, T + C + 1], [0, 0], [0, 1])
    bench.equal("attention prefill: twice", again, y)
    bench.equal("attention prefill: row 0 alone", prefill(0, T, [0, T], [0], [0]), y[:T])
    row = prefill(T, T + C + 1, [0, C + 1], [0], [1])
    bench.equal("attention prefill: row 1 alone", row, y[T:])
    for cut in sorted({C, (T - 1) // C * C}):
        left = prefill(0, cut, [0, cut], [0], [0])
        right = prefill(cut, T, [0, T - cut], [cut], [0])
        bench.equal(f"attention prefill: cut at {cut}", torch.cat([left, right]), y[:T])


def dense(bench: Bench) -> None:
    """Rows of a matmul, in either role, and of the rowwise ops: any number gives the same bits."""
    s, ops = bench.sizes, bench.ops
    most = max(s.matmul_rows)
    for N, K in s.matmuls:
        linear, x = ops.linear(bench.normal(N, K).mul_(K**-0.5)), bench.normal(most, K)
        for role in ("prefill", "decode"):
            y = linear(x, most if role == "prefill" else 0)
            name = f"matmul [{N}, {K}], {role}"
            for M in s.matmul_rows:
                some = x[most - M :].clone()  # other rows first: other tiles, too
                bench.equal(
                    f"{name}: {M} rows", linear(some, M if role == "prefill" else 0), y[most - M :]
                )
        half = most // 2
        mixed = linear(x, half)
        bench.equal(f"matmul [{N}, {K}]: decode rows of a mixed call", mixed[half:], y[half:])
    R, HV = s.rows, s.key_heads * s.ratios[0]
    x, weight = bench.normal(R, s.hidden), bench.normal(s.hidden, dtype=torch.float32)
    heads, head = bench.normal(R, s.heads, s.D), bench.normal(s.D, dtype=torch.float32)
    o = bench.normal(R, HV, s.width, dtype=torch.float32)
    gate, value = bench.normal(R, HV, s.width), bench.normal(s.width, dtype=torch.float32)
    angle, gate_up = bench.uniform(R, s.rotary_dim // 2), bench.normal(R, 2 * s.mlp)
    cos, sin = angle.cos(), angle.sin()
    runs = {
        "rms_norm": lambda r: ops.rms_norm(x[r], weight, eps=1e-6),
        "gated_rms_norm": lambda r: ops.gated_rms_norm(o[r], gate[r], value, eps=1e-6),
        "qk_norm_rotary": lambda r: ops.qk_norm_rotary(heads[r], head, cos[r], sin[r], eps=1e-6),
        "swiglu": lambda r: ops.swiglu(gate_up[r]),
    }
    for name, run in runs.items():
        y = run(slice(None))
        bench.equal(f"{name}: twice", run(slice(None)), y)
        bench.equal(f"{name}: row {R - 1} alone", run(slice(R - 1, R)), y[R - 1 :])


PARTS = {
    "bits of attention": attention,
    "bits of rows": dense,
}
