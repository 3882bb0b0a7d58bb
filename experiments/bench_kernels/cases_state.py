"""The kernels that keep a state: delta rule, convolution, restore. How much work is each?

T tokens, N rows, C = 64 tokens of a chunk, the other letters as in `cases.Layer`. Rows are
bfloat16 (2 bytes), g, beta, the output of the delta rule and states float32.
"""

from collections.abc import Iterator
from functools import partial

import torch

from cache.ops import LinearStateCacheOp
from cache.state_pool import StatePool, StateShape, restore_linear_state_slots
from experiments.bench_kernels import baselines as others
from experiments.bench_kernels.baselines import Tensors
from experiments.bench_kernels.cases import Baseline, Case, Layer, Sizes
from experiments.bench_kernels.ceilings import Work
from kernels import KERNEL_CHUNK, reference
from kernels.ids import Ids

REFERENCE_TOKENS = 64  # of the specification, which goes token by token


def state_cases(layer: Layer, sizes: Sizes) -> Iterator[Case]:
    for tokens in sizes.tokens:
        yield from delta_prefill(layer, tokens)
    for rows in sizes.batches:
        yield delta_step(layer, rows)
    for tokens in sizes.tokens:
        yield conv_prefill(layer, tokens)
    for rows in sizes.batches:
        yield conv_step(layer, rows)
    yield restore(layer)


# ---- delta rule


def delta_inputs(layer: Layer, num_tokens: int) -> tuple[torch.Tensor, ...]:
    """q, k, v, g, beta; decays so slow that a state matters hundreds of tokens later."""
    normal, uniform = layer.device.normal, layer.device.uniform
    q, k = (normal(num_tokens, layer.H, layer.K) for _ in range(2))
    v = normal(num_tokens, layer.HV, layer.V)
    g = -0.05 * uniform(num_tokens, layer.HV).square_()
    return q + k, k, v, g, uniform(num_tokens, layer.HV)


def delta_rows_bytes(layer: Layer, num_tokens: int) -> int:
    """q, k, v, g, beta in and o out: 2 (2 H K + HV V) + 4 HV (2 + V) a token."""
    narrow = 2 * layer.H * layer.K + layer.HV * layer.V
    return num_tokens * (2 * narrow + 4 * layer.HV * (2 + layer.V))


def delta_prefill_work(layer: Layer, tokens: int, num_snapshots: int) -> Work:
    """Bytes: rows, the state in and out, each snapshot out. FLOPs are those of the chunked form, a
    chunk: 4 C² K a key head (q.k, k.k) and, a value head, 6 C K V (state times q and k, its update)
    + 4 C² V (inverse times values, scores times values) + C³ (the inverse). Triangles are counted
    as the squares they are multiplied as."""
    C, K, V = KERNEL_CHUNK, layer.K, layer.V
    value_head = 6 * C * K * V + 4 * C * C * V + C**3
    flops = -(-tokens // C) * (layer.H * 4 * C * C * K + layer.HV * value_head)
    num_bytes = delta_rows_bytes(layer, tokens) + (2 + num_snapshots) * layer.state_bytes
    return Work(num_bytes, flops, layer.device.delta_rate)


def delta_prefill(layer: Layer, tokens: int) -> list[Case]:
    """One sequence, from the state in slot 1 to slot 2; then with a snapshot every 64 tokens too.

    The first is held against others, the second against the first.
    """
    device, inputs, num_chunks = layer.device, delta_inputs(layer, tokens), tokens // KERNEL_CHUNK
    states = device.normal(3 + num_chunks, layer.HV, layer.V, layer.K, dtype=torch.float32)
    theirs = (*inputs, states[1].transpose(1, 2).contiguous())
    rows = dict(
        cu_seqlens=device.ids(0, tokens), read_slots=device.ids(1), write_slots=device.ids(2)
    )
    no_slots, slots = (device.ids(*x) for x in ([-1] * num_chunks, range(3, 3 + num_chunks)))

    def prefill(snapshot_slots: Ids) -> torch.Tensor:
        return layer.ops.gated_delta_prefill(*inputs, states, **rows, snapshot_slots=snapshot_slots)

    def plain() -> Tensors:
        return prefill(no_slots), states[2]

    def specification() -> Tensors:
        first = (x[:REFERENCE_TOKENS] for x in inputs)
        return reference.gated_delta_rule(*first, states[1])[:1]

    baselines = [
        Baseline("fla naive chunk", partial(others.fla_naive_prefill, *theirs)),
        Baseline("transformers torch", partial(others.transformers_prefill, *theirs)),
    ]
    if device.has_reference:
        baselines.append(Baseline("reference", specification, tokens=REFERENCE_TOKENS))
    if kernel := device.fla_chunk_kernel():
        chunk = partial(others.fla_chunk_prefill, kernel, *theirs)
        baselines.append(Baseline("fla chunk kernel", chunk))
    plain_case = layer.case(
        "delta prefill",
        {"tokens": tokens},
        run=plain,
        baselines=tuple(baselines),
        work=delta_prefill_work(layer, tokens, 0),
    )
    snapshots_case = layer.case(
        "delta prefill + snapshots",
        {"tokens": tokens},
        run=lambda: (prefill(slots), states[2], states[-1]),  # the last one is the final state
        baselines=(Baseline("no snapshots", lambda: (*plain(), states[2])),),
        work=delta_prefill_work(layer, tokens, num_chunks),
        bar=0.0,
        reset=lambda: states[2:].fill_(torch.nan),
    )
    return [plain_case, snapshots_case]


def delta_step_work(layer: Layer, rows: int) -> Work:
    """Bytes: rows, each state in and out. FLOPs a value head: 7 K V (decay, S k, update, S q)."""
    num_bytes = delta_rows_bytes(layer, rows) + 2 * rows * layer.state_bytes
    return Work(num_bytes, 7 * rows * layer.HV * layer.K * layer.V, "float32_bmm")


def delta_step(layer: Layer, rows: int) -> Case:
    """One token of each row, its state in place."""
    inputs, slots = delta_inputs(layer, rows), layer.device.ids(*range(1, 1 + rows))
    start = layer.device.normal(1 + rows, layer.HV, layer.V, layer.K, dtype=torch.float32)
    states, theirs = start.clone(), start[1:].transpose(2, 3).contiguous()

    def step() -> Tensors:
        ops = layer.ops
        o = ops.gated_delta_step(*inputs, states, read_slots=slots, write_slots=slots)
        return o, states[1:]

    run = partial(others.transformers_step, *inputs, theirs)
    return layer.case(
        "delta step",
        {"rows": rows},
        run=step,
        baselines=(Baseline("transformers torch", run),),
        work=delta_step_work(layer, rows),
        reset=lambda: states.copy_(start),
    )


# ---- convolution


def conv_work(layer: Layer, num_tokens: int, num_windows: int) -> Work:
    """Bytes: x in, y out, taps in, windows in or out. FLOPs: 2 W a value; SiLU is not counted."""
    values = 2 * num_tokens + layer.W + num_windows * (layer.W - 1)
    flops = 2 * layer.W * num_tokens * layer.C
    return Work(2 * values * layer.C, flops, "float32_bmm")


def conv_prefill(layer: Layer, tokens: int) -> Case:
    """One sequence from its start; the window after it goes to slot 1."""
    device = layer.device
    x, weight = device.normal(tokens, layer.C), device.normal(layer.C, layer.W)
    windows = device.normal(2, layer.W - 1, layer.C)
    rows = dict(
        cu_seqlens=device.ids(0, tokens),
        read_slots=device.ids(-1),
        write_slots=device.ids(1),
        snapshot_slots=device.ids(*[-1] * (tokens // KERNEL_CHUNK)),
    )
    run = partial(others.transformers_conv, x, weight)
    return layer.case(
        "conv prefill",
        {"tokens": tokens},
        run=lambda: (layer.ops.causal_conv_prefill(x, weight, windows, **rows), windows[1]),
        baselines=(Baseline("transformers torch", lambda: (*run(), x[1 - layer.W :])),),
        work=conv_work(layer, tokens, 1),
    )


def conv_step(layer: Layer, rows: int) -> Case:
    """One token of each row, its window in place."""
    device, slots = layer.device, layer.device.ids(*range(1, 1 + rows))
    x, weight = device.normal(rows, layer.C), device.normal(layer.C, layer.W)
    start = device.normal(1 + rows, layer.W - 1, layer.C)
    windows, theirs = start.clone(), start[1:].transpose(1, 2).contiguous()

    def step() -> Tensors:
        ops = layer.ops
        y = ops.causal_conv_step(x, weight, windows, read_slots=slots, write_slots=slots)
        return y, windows[1:]

    def reset() -> None:
        windows.copy_(start)
        theirs.copy_(start[1:].transpose(1, 2))

    run = partial(others.transformers_conv_step, x, weight, theirs)
    return layer.case(
        "conv step",
        {"rows": rows},
        run=step,
        baselines=(Baseline("transformers torch", run),),
        work=conv_work(layer, rows, 2 * rows),
        reset=reset,
    )


# ---- restore


def state_shape(layer: Layer) -> StateShape:
    """Of a slot: every fourth layer is full attention, the others have a state."""
    num_layers = layer.config["num_hidden_layers"]
    return StateShape(
        num_layers=num_layers - num_layers // 4,
        num_value_heads=layer.HV,
        value_dim=layer.V,
        key_dim=layer.K,
        window_rows=layer.W - 1,
        conv_channels=layer.C,
        window_dtype=torch.bfloat16,
    )


def restore(layer: Layer) -> Case:
    """Slot 1 to slot 2, all layers, through the restore helper. Bytes: the slot in and out."""
    pool = StatePool(3, state_shape(layer), layer.device.type)
    pool.arena[1].random_(256)
    source, target = pool.arena[1].clone(), pool.arena[2].clone()
    op = LinearStateCacheOp(2, True, 1, KERNEL_CHUNK)

    def run() -> Tensors:
        restore_linear_state_slots(pool, [op], [1])
        return (pool.arena[2],)

    return layer.case(
        "restore",
        {"slot_bytes": pool.shape.slot_bytes},
        run=run,
        baselines=(Baseline("plain copy", lambda: (target.copy_(source),)),),
        work=Work(2 * pool.shape.slot_bytes, 0, "float32_bmm"),
        bar=0.0,
        reset=pool.arena[2].zero_,
    )
