"""How fast are restore, steps, chunked prefill and convolution of a 9B layer? (GPU only.)"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cache.state_pool import StatePool, StateShape
from experiments.gpu_check.cases import delta_inputs, net_inputs
from experiments.gpu_check.setup import Bench
from experiments.gpu_check.timings import Call, row
from kernels import KERNEL_CHUNK, launch
from kernels.fla_prefill import FlaPrefill, load_chunk_rule


def kernel_alone(bench: Bench, call: Call) -> Call:
    """The launches of a call without the host's work around them."""
    with launch.recording(launch.target_of(bench.device)) as launches:
        call()

    def replay() -> None:
        for each in launches:
            each.kernel[each.grid](*each.args, **each.constexprs, **each.options)

    return replay


def restore(bench: Bench) -> None:
    """Whole slots, 49 MiB each in a 9B model, rotated through 64 of them."""
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
    pool = StatePool(65, shape, s.device, bench.ops)
    arena = pool.arena.random_(0, 256, generator=bench.generator)
    for n in s.times.restored_slots:
        pairs = [
            (list(range(first, first + n)), list(range(32 + first, 32 + first + n)))
            for first in range(1, 33, n)
        ][:16]
        calls = [partial(bench.ops.copy_slots, arena, *pair) for pair in pairs]
        others = {"index_copy_ per layer": [_per_layer(bench, pool, *pair) for pair in pairs[:4]]}
        if n == 1:
            others["torch copy_"] = [
                partial(arena[into[0]].copy_, arena[source[0]]) for source, into in pairs
            ]
        num_bytes = 2 * n * shape.slot_bytes
        goal = 0.85 if n == 1 else None
        row(bench, f"restore {n} slots", calls, num_bytes=num_bytes, baselines=others, goal=goal)
        alone = [kernel_alone(bench, call) for call in calls]
        name = f"restore {n} slots, kernel alone"
        row(bench, name, alone, num_bytes=num_bytes, goal=goal)


def _per_layer(bench: Bench, pool: StatePool, sources: list[int], targets: list[int]) -> Call:
    source, target = bench.ids(sources).tensor, bench.ids(targets).tensor

    def copy() -> None:
        for layer in range(pool.shape.num_layers):
            for view in (pool.states[:, layer], pool.windows[:, layer]):
                view.index_copy_(0, target, view.index_select(0, source))

    return copy


def step(bench: Bench) -> None:
    """A layer's step at several batch sizes, states in place, rotated through all slots."""
    s, ratio = bench.sizes, bench.sizes.ratios[0]
    HV, most = s.key_heads * ratio, max(s.times.batches)
    states = bench.normal(1 + most, HV, s.width, s.width, dtype=torch.float32)
    windows = bench.normal(1 + most, 3, s.channels)
    for rows in s.times.batches:
        firsts = range(1, 1 + most, rows)[:48]
        slots = [bench.ids(range(first, first + rows)) for first in firsts]
        inputs = delta_inputs(bench, rows, s.key_heads, HV)
        net = net_inputs(bench, rows, ratio)
        num_bytes = 2 * rows * HV * s.width * s.width * 4
        goal = 0.80 if rows == 64 else None

        def bare(ids: Any, inputs: tuple[torch.Tensor, ...] = inputs) -> None:
            bench.ops.gated_delta_step(*inputs, states, read_slots=ids, write_slots=ids)

        def whole(ids: Any, net: Any = net) -> None:
            bench.ops.gated_delta_net_step(
                *net[:],
                windows,
                states,
                num_key_heads=s.key_heads,
                read_slots=ids,
                write_slots=ids,
            )

        for name, run in (("gated_delta_step", bare), ("gated_delta_net_step", whole)):
            calls = [partial(run, ids) for ids in slots]
            row(bench, f"{name} of {rows}", calls, num_bytes=num_bytes, goal=goal)


def prefill_work(s: Any, tokens: int, num_snapshots: int) -> tuple[int, int]:
    """Bytes: q, k, v, g, beta in, o out, the state in and out, each snapshot out. FLOPs of the
    chunked form, a chunk of C: 4 C^2 K a key head; 6 C K V + 4 C^2 V + C^3 a value head."""
    H, HV, K, C = s.key_heads, s.key_heads * s.ratios[0], s.width, KERNEL_CHUNK
    num_bytes = tokens * (2 * (2 * H * K + HV * K) + 4 * HV * (2 + K))
    num_bytes += (2 + num_snapshots) * 4 * HV * K * K
    value_head = 6 * C * K * K + 4 * C * C * K + C**3
    return num_bytes, -(-tokens // C) * (4 * C * C * K * H + HV * value_head)


def chunked_prefill(bench: Bench) -> None:
    """One sequence, with a snapshot on the way and without, beside fla where it is there."""
    s = bench.sizes
    HV, C = s.key_heads * s.ratios[0], KERNEL_CHUNK
    fla, note = _fla()
    if note:
        bench.say(f"  {note}")
    for tokens in s.times.prefill_tokens:
        num_sets = 4 if tokens < 8192 else 2  # 16 KiB a token
        sets = [delta_inputs(bench, tokens, s.key_heads, HV) for _ in range(num_sets)]
        num_snapshots = tokens // s.times.snapshot_every
        states = bench.normal(3 + num_snapshots, HV, s.width, s.width, dtype=torch.float32)
        every = s.times.snapshot_every // C
        for snaps in (0, num_snapshots):
            entries = [-1] * (tokens // C)
            if snaps:
                entries[every - 1 :: every] = range(3, 3 + snaps)
            ids = dict(
                cu_seqlens=bench.ids([0, tokens]),
                read_slots=bench.ids([1]),
                write_slots=bench.ids([2]),
                snapshot_slots=bench.ids(entries),
            )

            def calls(
                op: Callable[..., object],
                sets: list[Any] = sets,
                states: torch.Tensor = states,
                ids: dict[str, Any] = ids,
            ) -> list[Call]:
                return [partial(op, *inputs, states, **ids) for inputs in sets]

            num_bytes, flops = prefill_work(s, tokens, snaps)
            name = f"delta prefill of {tokens}, {snaps} snapshots"
            work = dict(num_bytes=num_bytes, flops=flops)
            others = {} if fla is None else {"fla chunk kernel": calls(fla)}
            ours = calls(bench.ops.gated_delta_prefill)
            row(bench, name, ours, baselines=others, note=note, **work)
            if tokens == s.times.prefill_tokens[len(s.times.prefill_tokens) // 2] and not snaps:
                for each in _each_kernel(bench, ours[0]):
                    row(bench, f"  of it {each[0]}", [each[1]])
        del sets, states


def _each_kernel(bench: Bench, call: Call) -> list[tuple[str, Call]]:
    """The launches of a call one by one."""
    with launch.recording(launch.target_of(bench.device)) as launches:
        call()
    calls = []
    for each in launches:
        run = partial(each.kernel[each.grid], *each.args, **each.constexprs, **each.options)
        calls.append((each.kernel.fn.__name__, run))
    return calls


def _fla() -> tuple[Any, str]:
    try:
        return FlaPrefill(load_chunk_rule()), ""
    except Exception as problem:  # not there, or there and broken
        return None, f"not compared with fla: {type(problem).__name__}: {problem}"


def conv_prefill(bench: Bench) -> None:
    s = bench.sizes
    for tokens in s.times.prefill_tokens[:2]:
        weight, windows = bench.normal(s.channels, 4), bench.normal(3, 3, s.channels)
        xs = [bench.normal(tokens, s.channels) for _ in range(4)]
        ids = dict(
            cu_seqlens=bench.ids([0, tokens]),
            read_slots=bench.ids([1]),
            write_slots=bench.ids([2]),
            snapshot_slots=bench.ids([-1] * (tokens // KERNEL_CHUNK)),
        )
        calls = [partial(bench.ops.causal_conv_prefill, x, weight, windows, **ids) for x in xs]
        row(bench, f"conv prefill of {tokens}", calls, num_bytes=2 * 2 * tokens * s.channels)


PARTS = {
    "time of restore": restore,
    "time of steps": step,
    "time of chunked prefill": chunked_prefill,
    "time of conv": conv_prefill,
}
