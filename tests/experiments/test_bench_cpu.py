"""The benchmark runs to its end, what it times has the right bits, and it tells when it has not.

Its times are not tested. trap 35: a cache that costs time where nothing is reused; the benchmark
measures that.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.bench_cpu import parse_options
from experiments.host_work import host_work
from experiments.make_model import make_model
from experiments.warm_start import parse_options as warm_start_options

ROOT = Path(__file__).resolve().parent.parent.parent
SPOILED = """
import sys
import engine.worker
from experiments.bench_cpu import main
original = engine.worker.restore_linear_state_slots
def spoiled(pool, ops, *arguments, **options):
    for op in ops:
        if op.restore_requested:
            pool.states[op.restore_src_slot_id] *= 1.01
    return original(pool, ops, *arguments, **options)
engine.worker.restore_linear_state_slots = spoiled
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return make_model(folder / "tiny", like="tiny", dtype="bfloat16", seed=1)


def bench(model, out, *start):
    """The finished process; a fresh one, as the baseline must import its packages first."""
    options = ["--prefix-tokens", "128", "--repeats", "1", "--threads", "1"]
    command = [sys.executable, *start, "--model", str(model), "--json", str(out), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_benchmark_runs_on_a_tiny_model_and_writes_every_figure(model, tmp_path):
    out = tmp_path / "bench.json"
    run = bench(model, out, "-m", "experiments.bench_cpu")
    assert run.returncode == 0, run.stderr
    results = json.loads(out.read_text())
    for part in ("cold_prefill", "warm", "decode", "restore", "host_work"):
        assert all(isinstance(value, float) for value in results[part].values()), part
    assert results["warm"]["identical_ms"] > 0 and results["machine"]["threads"] == 1
    assert results["cold_prefill"]["cost_of_caching"] > -1
    assert results["bits_equal"] is True
    assert results["model"] == {
        "name": "tiny",
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "vocab_size": 512,
        "dtype": "bfloat16",
    }
    assert "pure torch path (no fla, no causal_conv1d)" in results["baseline"]
    assert "falling back to its reference PyTorch implementation" in run.stderr


def test_a_checkpoint_that_is_off_by_one_part_in_a_hundred_fails_the_run_without_figures(
    model, tmp_path
):
    out = tmp_path / "bench.json"
    run = bench(model, out, "-c", SPOILED)
    assert run.returncode == 1
    assert "FAILED: caching changes the answers" in run.stderr
    for request in ("shared prefix", "identical prompt"):
        assert f"{request}: logits of new token 0 differ in" in run.stderr
    results = json.loads(out.read_text())
    assert results["bits_equal"] is False and len(results["differences"]) == 2
    assert "warm" not in results


@pytest.mark.parametrize("parse", [parse_options, warm_start_options])
@pytest.mark.parametrize("threads", ["0", "-1", str((os.cpu_count() or 1) + 1), "two"])
def test_a_number_of_threads_that_the_machine_has_not_is_refused(parse, threads, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(["--threads", threads])
    assert stopped.value.code == 2
    message = f"argument --threads: '{threads}'; expected 1 to {os.cpu_count()}"
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prefix-tokens", "100"], "--prefix-tokens 100: must be a multiple of 64"),
        (["--prefix-tokens", "0"], "argument --prefix-tokens: '0'; expected an integer"),
        (["--repeats", "0"], "argument --repeats: '0'; expected an integer of at least 1"),
        (["--prefix-tokens", "4096"], "4225 tokens are needed; the model has 4096 positions"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_an_option_that_can_not_be_is_refused(model, options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_options(["--model", str(model), *options])
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_host_work_reaches_the_last_boundary_of_the_prompt():
    figures = host_work(num_tokens=1024)
    assert set(figures) == {
        "first_ms",
        "further_stride_median_ms",
        "further_stride_max_ms",
        "full_hit_ms",
    }
    assert all(value > 0 for value in figures.values())
