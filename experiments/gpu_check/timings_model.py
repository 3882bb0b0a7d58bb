"""How long do whole steps of an 8-layer model of 9B width take, and what does redirect save?"""

from functools import partial

import torch

from cache.ops import LinearStateCacheOp
from cache.state_pool import StatePool, restore_linear_state_slots
from engine.batch import ModelInputs
from engine.model import Qwen35Model
from experiments.gpu_check.engine import launched, num_copies
from experiments.gpu_check.model import (
    BLOCK_SIZE,
    decode_inputs,
    make_config,
    make_model,
    prefill_inputs,
)
from experiments.gpu_check.setup import Bench
from experiments.gpu_check.timings import fraction, median_seconds, median_wall, write

CHECKPOINT, LIVE = 1, 2


def model(bench: Bench) -> None:
    """Decode steps, and the first step after a hit in both restore modes."""
    times = bench.sizes.times
    built, pool, kv_cache = timed_model(bench)
    _hit(bench, built, pool, kv_cache)
    for rows in times.model_rows:
        inputs = decode_inputs(bench, rows=rows, kv_len=times.model_kv_len)
        call = partial(built.forward, inputs, pool, kv_cache)
        name = f"decode step of {rows} at {times.model_kv_len}, {times.layers} layers"
        report(bench, name, call, step_bytes(bench, built, pool, rows))


def timed_model(bench: Bench) -> tuple[Qwen35Model, StatePool, torch.Tensor]:
    """The model that is timed, a state pool and a K/V cache, all of them random."""
    s, times = bench.sizes, bench.sizes.times
    config = make_config(
        times.model,
        vocab=s.vocab,
        layers=times.layers,
        overrides=times.model_overrides,
        dtype=s.dtype,
    )
    built = make_model(bench, config)
    most, kv_len = max(times.model_rows), times.model_kv_len
    num_blocks = 1 + most * -(-max(kv_len, sum(times.hit)) // BLOCK_SIZE)
    pool, kv_cache = built.make_pools(max(LIVE, most) + 1, num_blocks, BLOCK_SIZE)
    assert pool is not None
    pool.states.normal_(std=0.1, generator=bench.generator)
    pool.windows.normal_(generator=bench.generator)
    kv_cache.normal_(generator=bench.generator)
    return built, pool, kv_cache


def step_bytes(bench: Bench, built: Qwen35Model, pool: StatePool, rows: int) -> int:
    """What a decode step moves at least: weights, states and K/V."""
    weight_bytes = sum(tensor.numel() * tensor.itemsize for tensor in _matrices(built))
    kv_len, itemsize = bench.sizes.times.model_kv_len, bench.sizes.dtype.itemsize
    kv_bytes = rows * kv_len * built.config.kv_bytes_per_token(itemsize)
    return weight_bytes + 2 * rows * pool.shape.states_bytes + kv_bytes


def _matrices(built: Qwen35Model) -> list[torch.Tensor]:
    """The weights that a decode step reads, the head included."""
    linears = [built.head]
    for layer in built.layers:
        linears += [layer.gate_up, layer.down, layer.mixer.in_proj, layer.mixer.out_proj]
    return [linear._weight for linear in linears]


def report(bench: Bench, name: str, call: partial, num_bytes: int) -> None:
    """Seconds on the device, launches enqueued before, and seconds on the wall."""
    with launched() as names:
        call()
    seconds = median_seconds(bench.stopwatch, [call])
    wall = median_wall(bench.stopwatch, call)
    if bench.stopwatch.warm:
        return
    copy = bench.facts.get("bytes_per_s", 0.0)
    row = {
        "name": name,
        "ms": 1e3 * seconds,
        "wall_ms": 1e3 * wall,
        "launches": len(names),
        "bytes": num_bytes,
        "fraction_of_copy": fraction(num_bytes / copy if copy else 0.0, seconds),
    }
    bench.timings.append(row)
    bench.say(
        f"  {name}: {row['ms']:.3f} ms on the device, {row['wall_ms']:.3f} ms on the wall, "
        f"{len(names)} launches, {100 * (row['fraction_of_copy'] or 0):.0f} % of the bytes' roof"
    )


def _hit(bench: Bench, built: Qwen35Model, pool: StatePool, kv_cache: torch.Tensor) -> None:
    """Restore and prefill what follows, reading the checkpoint or a copy of it."""
    cached, tokens = bench.sizes.times.hit
    op = LinearStateCacheOp(LIVE, True, CHECKPOINT, cached)
    inputs: dict[str, ModelInputs] = {
        mode: prefill_inputs(bench, start=cached, tokens=tokens, read=read, write=LIVE)
        for mode, read in (("redirect", CHECKPOINT), ("copy", LIVE))
    }

    def first_step(mode: str) -> torch.Tensor:
        restore_linear_state_slots(pool, [op], [0], copy=mode == "copy")
        return built.forward(inputs[mode], pool, kv_cache)

    logits, seconds, wall = {}, {}, {}
    for mode in inputs:
        with launched() as names:
            logits[mode] = first_step(mode)
        copies = num_copies(names)
        expected = int(mode == "copy")
        bench.holds(
            f"{mode}: {expected} copy launches",
            copies == expected,
            f"{copies} copies in {len(names)} launches",
        )
    bench.equal("redirect and copy: logits", logits["redirect"], logits["copy"])
    for mode in inputs:
        call = partial(first_step, mode)
        seconds[mode] = median_seconds(bench.stopwatch, [call])
        wall[mode] = median_wall(bench.stopwatch, call)
    if bench.stopwatch.warm:
        return
    for mode in inputs:
        other = {
            "ms": 1e3 * seconds["copy"],
            "ratio": fraction(seconds["copy"], seconds[mode]),
        }
        result = {
            "name": f"restore and prefill of {tokens} at {cached}, {mode}",
            "ms": 1e3 * seconds[mode],
            "wall_ms": 1e3 * wall[mode],
            "baselines": {} if mode == "copy" else {"copy": other},
            "note": f"{1e3 * wall[mode]:.3f} ms on the wall",
        }
        write(bench, result)


PARTS = {"time of whole steps": model}
