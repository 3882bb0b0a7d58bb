"""Does every op that keeps a state agree with float64, and leave every other slot alone?"""

from collections.abc import Callable
from functools import partial

import torch

from cache.state_pool import StatePool, StateShape
from experiments.gpu_check import reference as wide
from experiments.gpu_check.cases import NetInputs, Rows, delta_inputs, net_inputs, pack, steps
from experiments.gpu_check.setup import Bench, Pool, nan_outputs
from kernels import reference
from kernels.heads import split_heads

VERIFY_ROWS = 16


def specification(bench: Bench) -> None:
    """The float64 compositions are `kernels.reference` itself, at a small size on the CPU."""
    draw = torch.Generator().manual_seed(bench.seed % 2**31)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, dtype=torch.float64, generator=draw)

    rows, verify = pack((1, 66, 130)), steps(5, tokens=3)
    for kind, case in (("prefill", rows), ("steps", verify)):
        T = case.num_tokens
        q, k, v = normal(T, 1, 16), normal(T, 1, 16), normal(T, 2, 16)
        g, beta = -0.05 * normal(T, 2).square(), normal(T, 2).sigmoid()
        x, weight = normal(T, 6), normal(6, 4)
        states, windows = normal(case.num_slots, 2, 16, 16), normal(case.num_slots, 3, 6)
        ids = dict(cu_seqlens=case.offsets, read_slots=case.reads, write_slots=case.writes)
        run = wide.step_slots
        delta_op, conv_op = reference.gated_delta_step, reference.causal_conv_step
        if case.snapshots is not None:
            ids["snapshot_slots"] = case.snapshots
            run = wide.prefill_slots
            delta_op, conv_op = reference.gated_delta_prefill, reference.causal_conv_prefill
        for name, core, pool, op, inputs in (
            ("delta rule", _delta_core(q, k, v, g, beta), states, delta_op, (q, k, v, g, beta)),
            ("conv", partial(_conv_core, x, weight), windows, conv_op, (x, weight)),
        ):
            y, written = run(core, pool, *case.core_slots())
            theirs = pool.clone()
            expected = op(*inputs, theirs, **ids)
            ours = pool.clone()
            for slot, value in written.items():
                ours[slot] = value
            bench.close(f"{name} {kind}", case.live(y), case.live(expected), 1e-12)
            bench.close(f"{name} {kind}: slots", ours[1:], theirs[1:], 1e-12)
    q, gate, cache = normal(70, 4, 16), normal(70, 4, 16), normal(3, 64, 2, 16)
    keys = wide.kv_rows(cache, [2, 1], 70)
    table = dict(start_positions=[0], block_tables=[[2, 1]])
    expected = reference.attention_prefill(q, gate, cache, cache, cu_seqlens=[0, 70], **table)
    bench.close("attention", wide.attend(q, gate, keys, keys), expected, 1e-12)


def delta_prefill(bench: Bench) -> None:
    s, rows = bench.sizes, pack(bench.sizes.prefill_lengths)
    for ratio in s.ratios:
        H, HV = s.key_heads, s.key_heads * ratio
        inputs = delta_inputs(bench, rows.num_tokens, H, HV)
        run = partial(bench.ops.gated_delta_prefill, *inputs)
        name = f"delta prefill, HV/H {ratio}"
        _check(bench, name, rows, run, _delta_core(*inputs), _states(bench, rows, HV), _chunked)


def delta_step(bench: Bench) -> None:
    s = bench.sizes
    for tokens in (1, 3):
        rows = steps(s.step_rows if tokens == 1 else VERIFY_ROWS, tokens)
        for ratio in s.ratios:
            H, HV = s.key_heads, s.key_heads * ratio
            inputs = delta_inputs(bench, rows.num_tokens, H, HV)
            run = partial(bench.ops.gated_delta_step, *inputs)
            name = f"delta step of {tokens}, HV/H {ratio}"
            pool = _states(bench, rows, HV)
            _check(bench, name, rows, run, _delta_core(*inputs), pool, _recurrent)


def net_step(bench: Bench) -> None:
    """The whole mixer of a step: convolution, gates and update."""
    s = bench.sizes
    for tokens in (1, 3):
        rows = steps(s.step_rows if tokens == 1 else VERIFY_ROWS, tokens)
        for ratio in s.ratios:
            x = net_inputs(bench, rows.num_tokens, ratio)
            states = _states(bench, rows, s.key_heads * ratio)
            windows = _windows(bench, rows, x.weight.shape[0])
            before = states.clone(), windows.clone()
            with nan_outputs():
                o = bench.ops.gated_delta_net_step(
                    *x[:],
                    windows.view,
                    states.view,
                    num_key_heads=s.key_heads,
                    **rows.vectors(bench),
                )
            name = f"net step of {tokens}, HV/H {ratio}"
            expected, states_after, windows_after = _net(bench, x, before, rows)
            bench.close(name, rows.live(o), rows.live(expected), s.bars.recurrent)
            states.check(bench, f"{name}: states", before[0], states_after, s.bars.recurrent)
            windows.check(bench, f"{name}: windows", before[1], windows_after, 0.0)


def conv(bench: Bench) -> None:
    s = bench.sizes
    cases = {"prefill": pack(s.prefill_lengths)}
    cases |= {f"step of {tokens}": steps(s.step_rows, tokens) for tokens in (1, 3)}
    for kind, rows in cases.items():
        x = bench.normal(rows.num_tokens, s.channels + 64)[:, : s.channels]
        weight = bench.normal(s.channels, 4)
        prefill = rows.snapshots is not None
        op = bench.ops.causal_conv_prefill if prefill else bench.ops.causal_conv_step
        pool = _windows(bench, rows, s.channels)
        core = partial(_conv_core, x, weight)
        _check(bench, f"conv {kind}", rows, partial(op, x, weight), core, pool, _rounded)


def slots(bench: Bench) -> None:
    """copy_slots and zero_slots over the whole arena of a model's slots, copy_blocks of a cache."""
    s = bench.sizes
    shape = StateShape(
        num_layers=s.state_layers,
        num_value_heads=s.key_heads * s.ratios[0],
        value_dim=s.width,
        key_dim=s.width,
        window_rows=3,
        conv_channels=s.channels,
        window_dtype=s.dtype,
    )
    pool = StatePool(s.arena_slots, shape, s.device, bench.ops)
    pool.arena.random_(0, 256, generator=bench.generator)
    expected = pool.arena.clone()
    last = s.arena_slots - 1
    for copies in (([1, 1, 2], [3, 7, last]), ([last], [5])):
        bench.ops.copy_slots(pool.arena, *copies)
        reference.copy_slots(expected, *copies)
    bench.equal("copy_slots: whole arena", pool.arena, expected)
    bench.ops.zero_slots(pool.arena, [4, last])
    reference.zero_slots(expected, [4, last])
    bench.equal("zero_slots: whole arena", pool.arena, expected)
    kv_cache = bench.normal(2, 2, 9, 16, 2, s.width)  # layers, K and V, blocks, rows, heads
    expected = kv_cache.clone()
    bench.ops.copy_blocks(kv_cache, [1, 8], [4, 2])
    reference.copy_blocks(expected, [1, 8], [4, 2])
    bench.equal("copy_blocks: whole cache", kv_cache, expected)


# ---- parts of the above


def _chunked(bench: Bench) -> tuple[float, float]:
    """Bars of outputs and of slots."""
    return bench.sizes.bars.chunked, bench.sizes.bars.chunked


def _recurrent(bench: Bench) -> tuple[float, float]:
    return bench.sizes.bars.recurrent, bench.sizes.bars.recurrent


def _rounded(bench: Bench) -> tuple[float, float]:
    return bench.sizes.bars.rounded, 0.0


def _check(
    bench: Bench,
    name: str,
    rows: Rows,
    run: Callable[..., torch.Tensor],
    core: wide.Core,
    pool: Pool,
    bars: Callable[[Bench], tuple[float, float]],
) -> None:
    """Run the op on the pool, then the core in float64 on what the pool was."""
    before = pool.clone()
    with nan_outputs():
        y = run(pool.view, **rows.vectors(bench))
    reference_run = wide.step_slots if rows.snapshots is None else wide.prefill_slots
    expected, written = reference_run(core, before.view, *rows.core_slots())
    output_bar, slots_bar = bars(bench)
    bench.close(name, rows.live(y), rows.live(expected), output_bar)
    pool.check(bench, name, before, written, slots_bar)


def _states(bench: Bench, rows: Rows, HV: int) -> Pool:
    size, w = rows.num_slots, bench.sizes.width
    return Pool.poisoned(bench, size, HV, w, w, dtype=torch.float32, filled=rows.sources)


def _windows(bench: Bench, rows: Rows, C: int) -> Pool:
    dtype = bench.sizes.dtype
    return Pool.poisoned(bench, rows.num_slots, 3, C, dtype=dtype, filled=rows.sources)


def _delta_core(*inputs: torch.Tensor) -> wide.Core:
    return lambda start, end, state: wide.delta_rule(*(x[start:end] for x in inputs), state)


def _conv_core(
    x: torch.Tensor, weight: torch.Tensor, start: int, end: int, window: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return wide.conv(x[start:end], weight, window)


def _net(
    bench: Bench, x: NetInputs, pools: tuple[Pool, Pool], rows: Rows
) -> tuple[torch.Tensor, wide.Slots, wide.Slots]:
    """o, states and windows of a mixer's step; q, k and v are rounded in between, as specified."""
    states, windows = pools
    slots = rows.core_slots()
    y, windows_after = wide.step_slots(partial(_conv_core, x.qkv, x.weight), windows.view, *slots)
    q, k, v = split_heads(y.to(x.qkv.dtype), states.view, bench.sizes.key_heads)
    a, b, A_log, dt_bias = (t.double() for t in (x.a, x.b, x.A_log, x.dt_bias))
    g, beta = reference.delta_gates(a, b, A_log, dt_bias)
    o, states_after = wide.step_slots(_delta_core(q, k, v, g, beta), states.view, *slots)
    return o, states_after, windows_after


PARTS = {
    "specification": specification,
    "delta prefill": delta_prefill,
    "delta step": delta_step,
    "net step": net_step,
    "conv": conv,
    "slots": slots,
}
