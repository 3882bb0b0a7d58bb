"""Does every kernel compile for every GPU, without spilling and with wide state accesses?

Needs no GPU. One model layer of each kind is built at the published shapes with tensors that have
no memory, a step of the engine and the other entry points are run on it, and each launch that would
happen is compiled for sm_80, sm_90, sm_100 and gfx942 instead. So what is compiled is what runs.
The table goes to results/aot.json; a spill, too many registers, too much shared memory or a narrow
access on a line marked `# wide` is an error.

    python -m experiments.aot [--shapes 0.8b 9b 27b] [--targets sm_90]
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cache.state_pool import StatePool
from engine.batch import ModelInputs, StateSlots
from engine.model import Qwen35Model
from engine.model_config import ModelConfig
from engine.weights import expected_tensors
from experiments.aot_compile import (
    SHARED_LIMIT,
    TARGETS,
    UNKNOWN_BITS,
    compile_launch,
    signature,
)
from experiments.model_shapes import hf_config
from experiments.options import count, results_file
from experiments.results_io import RESULTS, write_json
from kernels import Ops, ops_for
from kernels.ids import BlockTables, Ids
from kernels.launch import INTERPRETED, Launch, Target, recording

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "0.8b": ("0.8b", {}),
    "9b": ("9b", {}),
    "27b": (
        "9b",
        {
            "hidden_size": 5120,
            "intermediate_size": 17_408,
            "linear_num_value_heads": 48,
            "num_attention_heads": 24,
        },
    ),
}
BLOCK_SIZE = 64
NUM_DECODES = 64
NUM_SLOTS = 80

# Registers a thread may use, by kernel: on NVIDIA, and on AMD (vector registers, of 512). Kernels
# bound by bandwidth keep many programs on a processor; those bound by matrix products may take all.
REGISTER_BUDGETS: dict[str, tuple[int, int]] = {
    "attention.prefill": (255, 320),
    "attention.write": (40, 40),
    "attention_decode.combine": (64, 64),
    "attention_decode.parts": (168, 192),
    "causal_conv1d.prefill": (128, 128),
    "causal_conv1d.step": (64, 64),
    "gated_delta_chunk.invert": (192, 192),
    "gated_delta_chunk.prepare": (255, 256),
    "gated_delta_chunk.scan": (255, 256),
    "gated_delta_step.step": (112, 96),
    "gates.delta_gates": (64, 64),
    "gates.swiglu": (64, 64),
    "matmul.matmul": (144, 160),
    "norms.gated_rms_norm": (64, 64),
    "norms.qk_norm_rotary": (72, 72),
    "norms.rms_norm": (72, 72),
    "norms.rotary": (64, 64),
    "state_restore.move": (64, 64),
}


def config_of(shape: str) -> ModelConfig:
    """Three GDN layers and a full-attention one of this shape."""
    like, overrides = SHAPES[shape]
    fields = hf_config(like, vocab=8192, layers=4, dtype="bfloat16", overrides=overrides)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(fields))
        return ModelConfig.from_directory(directory)


def step_inputs(*, num_prefill_tokens: int, num_decodes: int, device: str) -> ModelInputs:
    """One sequence that resumes from a checkpoint, with a snapshot on the way, and decodes."""
    P, N = num_prefill_tokens, num_decodes
    prefills = 1 if P else 0
    num_chunks = -(-P // 64)
    blocks = list(range(1, P // BLOCK_SIZE + 2))
    row_ids = [BLOCK_SIZE + i for i in range(P + N)]
    return ModelInputs(
        token_ids=Ids([1] * (P + N), device).tensor,
        positions=Ids([1] * (P + N), device).tensor,
        kv_indices=Ids(row_ids, device),
        logit_rows=Ids([P - 1, *range(P, P + N)][1 - prefills :], device).tensor,
        cu_seqlens=Ids([0, P][: prefills + 1], device),
        start_positions=Ids([0] * prefills, device),
        prefill_block_tables=BlockTables([blocks] * prefills, device),
        prefill_slots=StateSlots(Ids([1] * prefills, device), Ids([2] * prefills, device)),
        snapshot_slots=Ids([3, *[-1] * num_chunks][:num_chunks], device),
        kv_lens=Ids([100] * N, device),
        decode_block_tables=BlockTables([[1, 2]] * N, device),
        decode_slots=StateSlots(Ids(range(10, 10 + N), device), Ids(range(10, 10 + N), device)),
    )


def run_everything(shape: str) -> None:
    """Call what the engine calls, and the entry points that it does not."""
    config = config_of(shape)
    tensors = (
        (name, torch.empty(sizes, dtype=torch.bfloat16, device="meta"))
        for name, sizes in expected_tensors(config).items()
    )
    model = Qwen35Model(config, tensors, dtype=torch.bfloat16, device="meta")
    pool, kv_cache = model.make_pools(NUM_SLOTS, 64, BLOCK_SIZE)
    assert pool is not None
    for P, N in ((1000, NUM_DECODES), (0, NUM_DECODES)):
        inputs = step_inputs(num_prefill_tokens=P, num_decodes=N, device="meta")
        model.forward(inputs, pool, kv_cache)
    ops = ops_for("meta")
    pool.copy([1], [2])
    ops.zero_slots(pool.arena, [1])
    _unfused(ops, config, pool)


def _unfused(ops: Ops, config: ModelConfig, pool: StatePool) -> None:
    """The ops that the model has fused into others."""
    T, bf16 = 8, torch.bfloat16
    H, HV = config.linear_num_key_heads, config.linear_num_value_heads
    K, V = config.linear_key_head_dim, config.linear_value_head_dim
    q = torch.empty(T, H, K, dtype=bf16, device="meta")
    v = torch.empty(T, HV, V, dtype=bf16, device="meta")
    g = torch.empty(T, HV, device="meta")
    slots = dict(read_slots=[1, 2], write_slots=range(3, 11), cu_seqlens=[0, 4, T])
    ops.gated_delta_step(q, q, v, g, g, pool.states[:, 0], **slots)
    x = torch.empty(T, config.num_attention_heads, config.head_dim, dtype=bf16, device="meta")
    table = torch.empty(T, config.rotary_dim // 2, device="meta")
    weight = torch.empty(config.head_dim, device="meta")
    ops.rotary(ops.rms_norm(x, weight, eps=1e-6), table, table)


def launches(shape: str, target: Target) -> list[Launch]:
    """One launch for each binary that `run_everything` would need on this target."""
    with recording(target) as recorded:
        run_everything(shape)
    distinct = {}
    for launch in recorded:
        options = sorted(launch.options.items())
        key = repr((launch.kernel.__name__, launch.kernel.__module__, signature(launch), options))
        distinct.setdefault(key, launch)
    return list(distinct.values())


def compile_all(job: tuple[str, str]) -> list[dict[str, Any]]:
    """Usage of every kernel of one (shape, target)."""
    shape, name = job
    target = Target(name)
    rows = [asdict(compile_launch(launch, target)) for launch in launches(shape, target)]
    return [{**row, "shape": shape} for row in rows]


def faults(row: dict[str, Any]) -> Iterator[str]:
    """What is wrong with one row of the table."""
    if row["kernel"] not in REGISTER_BUDGETS:
        yield "no register budget: add one to REGISTER_BUDGETS"
        return
    nvidia, amd = REGISTER_BUDGETS[row["kernel"]]
    budget = amd if row["target"].startswith("gfx") else nvidia
    if row["spills"]:
        yield f"{row['spills']} spilled"
    if row["registers"] > budget:
        yield f"{row['registers']} registers, budget {budget}"
    if row["shared_bytes"] > SHARED_LIMIT[row["target"]]:
        yield f"{row['shared_bytes']} bytes shared, limit {SHARED_LIMIT[row['target']]}"
    if row["access_bits"] not in (0, 128):
        bits = row["access_bits"]
        what = "none found" if bits == UNKNOWN_BITS else f"{bits} bits"
        yield f"accesses on lines marked wide: {what}"


def main(argv: list[str] | None = None) -> int:
    """Compile, print the table, write it; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--processes", type=count, default=2)
    parser.add_argument("--quiet", action="store_true", help="print faults and totals only")
    parser.add_argument("--output", type=results_file, default=RESULTS / "aot.json")
    options = parser.parse_args(argv)
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set, and the interpreter compiles nothing: unset it")
    jobs = [(shape, target) for target in options.targets for shape in options.shapes]
    console = Console(stderr=True)
    with ProcessPoolExecutor(options.processes) as pool:
        done = pool.map(compile_all, jobs)
        progress = track(done, "compiling", total=len(jobs), console=console)
        rows = [row for result in progress for row in result]
    table = Table("kernel", "shape", "target", "warps", "registers", "spills", "shared", "bits")
    wrong = []
    for row in rows:
        found = "; ".join(faults(row))
        columns = ("num_warps", "registers", "spills", "shared_bytes", "access_bits")
        cells = [row["kernel"], row["shape"], row["target"], *(str(row[c]) for c in columns)]
        table.add_row(*cells, style="red" if found else "")
        if found:
            wrong.append(f"{row['kernel']} at {row['shape']} for {row['target']}: {found}")
    if not options.quiet:
        Console().print(table)
    for line in wrong:
        print(f"aot: {line}", file=sys.stderr)
    if not options.output.exists() or json.loads(options.output.read_text())["kernels"] != rows:
        write_json(options.output, {"kernels": rows})  # not for a new date alone
    kernels = {row["kernel"] for row in rows}
    print(f"aot: {len(rows)} binaries of {len(kernels)} kernels, {len(wrong)} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
