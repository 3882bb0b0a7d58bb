"""Through graphs: are replayed decode steps eager ones, bit for bit, and how much faster?"""

from functools import partial

import torch

from engine.decode_graphs import DecodeGraphs, graph_sizes
from engine.model import Qwen35Model
from experiments.gpu_check.engine import Reference, run
from experiments.gpu_check.model import BLOCK_SIZE, decode_inputs
from experiments.gpu_check.setup import Bench, same_bits
from experiments.gpu_check.timings_model import report, step_bytes, timed_model


def decode_graphs(bench: Bench) -> None:
    """Steps on twin pools, batch sizes falling and rising; then hits through the engine."""
    reference = Reference(bench)
    _steps(bench, reference.model)
    llm = reference.engine(cuda_graphs=True)
    s = bench.sizes
    first = reference.tokens(s.prompt_tokens)
    branch = first[: s.shared_tokens] + reference.tokens(3)
    [miss] = run(llm, [first], reference.sampling)
    reference.check("engine, miss", miss, hit=False)
    for i, output in enumerate(run(llm, [first, branch], reference.sampling)):
        reference.check(f"engine, hit {i} of 2 at once", output, hit=True)
    replays = llm.stats().decodes_replayed
    bench.holds("engine: decode steps were replayed", replays > 0, f"{replays} replays")


def graphs_of(bench: Bench, model: Qwen35Model, pools: tuple, sizes: list[int]) -> DecodeGraphs:
    pool, kv_cache = pools
    return DecodeGraphs(
        lambda inputs: model.forward(inputs, pool, kv_cache),
        sizes=sizes,
        vocab_size=model.config.vocab_size,
        max_model_len=model.config.max_position_embeddings,
        block_size=BLOCK_SIZE,
        num_blocks=kv_cache.shape[2],
        num_slots=pool.num_slots,
        device=bench.sizes.device,
    )


def _steps(bench: Bench, model: Qwen35Model) -> None:
    """Logits, every slot and every block after each step; slot 0 and block 0 are NaN before."""
    most, kv_len = bench.sizes.step_rows, bench.sizes.prompt_tokens
    num_blocks = 1 + most * -(-kv_len // BLOCK_SIZE)
    eager, graphed = (model.make_pools(most + 1, num_blocks, BLOCK_SIZE) for _ in range(2))
    graphs = graphs_of(bench, model, graphed, graph_sizes(most))
    pool, kv_cache = eager
    assert pool is not None and graphed[0] is not None
    pool.states.normal_(std=0.1, generator=bench.generator)
    pool.windows.normal_(generator=bench.generator)
    kv_cache.normal_(generator=bench.generator)
    pool.arena[0], kv_cache[:, :, 0] = 255, torch.nan
    graphed[0].arena.copy_(pool.arena)
    graphed[1].copy_(kv_cache)
    before = "capture"
    for i, rows in enumerate((most, 1, most // 2 + 1)):
        inputs = decode_inputs(bench, rows=rows, kv_len=kv_len - i)
        expected = model.forward(inputs, *eager)
        name, before = f"{rows} rows after {before}", str(rows)
        logits = graphs.run(inputs)
        bench.holds(f"{name}: finite", bool(logits.isfinite().all()))
        bench.equal(f"{name}: logits", logits, expected)
        bench.equal(f"{name}: all slots", graphed[0].arena, pool.arena)
        bench.equal(f"{name}: all blocks", graphed[1][:, :, 1:], kv_cache[:, :, 1:])
    # The control: with other states, other logits, or the checks above would prove nothing.
    graphed[0].states.mul_(0.5)
    damaged = graphs.run(inputs)
    bench.holds("control: a damaged state shows", not same_bits(damaged, logits))


def times(bench: Bench) -> None:
    """Decode steps of the timed model, eager and replayed."""
    times = bench.sizes.times
    model, pool, kv_cache = timed_model(bench)
    graphs = graphs_of(bench, model, (pool, kv_cache), list(times.model_rows))
    for rows in times.model_rows:
        inputs = decode_inputs(bench, rows=rows, kv_len=times.model_kv_len)
        name = f"decode step of {rows} at {times.model_kv_len}"
        num_bytes = step_bytes(bench, model, pool, rows)
        eager = partial(model.forward, inputs, pool, kv_cache)
        report(bench, f"{name}, launched", eager, num_bytes)
        report(bench, f"{name}, replayed", partial(graphs.run, inputs), num_bytes)


PARTS = {"decode graphs": decode_graphs}
TIMES = {"time of decode graphs": times}
