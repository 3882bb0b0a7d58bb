"""The benchmark runs to its end, and what it calls a hit is one. Its times are not tested."""

import json
import subprocess
import sys
from pathlib import Path

from experiments.bench_cpu import host_work
from experiments.make_model import make_model

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_benchmark_runs_on_a_tiny_model_and_writes_every_figure(tmp_path):
    model = make_model(tmp_path / "model", like="tiny", dtype="bfloat16", show_progress=False)
    out = tmp_path / "bench.json"
    options = ["--prefix-tokens", "128", "--repeats", "1", "--threads", "1"]
    command = ["-m", "experiments.bench_cpu", "--model", str(model), "--json", str(out), *options]
    run = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    results = json.loads(out.read_text())
    for part in ("cold_prefill", "warm", "decode", "restore", "host_work"):
        assert all(isinstance(value, float) for value in results[part].values()), part
    assert results["warm"]["identical_ms"] > 0 and results["machine"]["threads"] == 1


def test_host_work_reaches_the_last_boundary_of_the_prompt():
    figures = host_work(num_tokens=1024)
    assert set(figures) == {
        "first_ms",
        "further_stride_median_ms",
        "further_stride_max_ms",
        "full_hit_ms",
    }
    assert all(value > 0 for value in figures.values())
