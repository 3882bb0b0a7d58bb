"""The kernel benchmark: every case is there, figures follow from what was recorded, wrong results
are not timed, formulas of work are those worked out by hand. Its times are not tested."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from experiments.bench_kernels.__main__ import parse_options, roof
from experiments.bench_kernels.cases import Baseline, Case, Layer, relative_error
from experiments.bench_kernels.cases_dense import attention_work, dense
from experiments.bench_kernels.cases_state import (
    conv_work,
    delta_prefill_work,
    delta_step_work,
    restore,
    state_shape,
)
from experiments.bench_kernels.ceilings import Device, Work
from experiments.model_shapes import SHAPES

ROOT = Path(__file__).resolve().parent.parent.parent
CASES = {
    ("delta prefill", "tokens 128"): {"fla naive chunk", "transformers torch", "reference"},
    ("delta prefill + snapshots", "tokens 128"): {"no snapshots"},
    ("delta step", "rows 1"): {"transformers torch"},
    ("delta step", "rows 2"): {"transformers torch"},
    ("conv prefill", "tokens 128"): {"transformers torch"},
    ("conv step", "rows 1"): {"transformers torch"},
    ("conv step", "rows 2"): {"transformers torch"},
    ("restore", "slot_bytes 53760"): {"plain copy"},
    ("attention prefill", "tokens 64, cached 0"): {"torch SDPA"},
    ("attention prefill", "tokens 64, cached 128"): {"torch SDPA"},
    ("attention decode", "kv_len 128"): {"torch SDPA"},
    ("dense gate_up", "rows 1"): {"torch linear"},
    ("dense gate_up", "rows 64"): {"torch linear"},
}
SPOILED = """
import sys
import torch
from experiments.bench_kernels.__main__ import main
from kernels import torch_ops
def spoil(name, line):
    original = getattr(torch_ops, name)
    def spoiled(*arguments, **options):
        result = original(*arguments, **options)
        exec(line, dict(torch=torch, result=result, arguments=arguments))
        return result
    setattr(torch_ops, name, spoiled)
for name, line in {lines}.items():
    spoil(name, line)
sys.exit(main(sys.argv[1:]))
"""
PREFILL = "tiny delta prefill (tokens 128) is off from "
WRONG = {
    "outputs": (
        {
            "gated_delta_prefill": "result *= 1.01",
            "gated_delta_step": "result *= 1.01",
            "attention_decode": "result[0, 0, 0] = torch.nan",
        },
        {
            PREFILL + "fla naive chunk",
            PREFILL + "transformers torch",
            PREFILL + "reference",
            "tiny delta step (rows 1) is off from transformers torch",
            "tiny delta step (rows 2) is off from transformers torch",
            "tiny attention decode (kv_len 128) is off from torch SDPA",
        },
    ),
    "states": (
        {
            "gated_delta_prefill": "arguments[5][2] *= 1.01",
            "causal_conv_prefill": "arguments[2][1] *= 1.01",
            "copy_slots": "arguments[0][2, 777] += 1",
        },
        {
            PREFILL + "fla naive chunk",
            PREFILL + "transformers torch",
            "tiny delta prefill + snapshots (tokens 128) is off from no snapshots",
            "tiny conv prefill (tokens 128) is off from transformers torch",
            "tiny restore (slot_bytes 53760) is off from plain copy",
        },
    ),
    "a snapshot": (
        {"gated_delta_prefill": "arguments[5][-1, 0, 0, 0] += 1e-3"},
        {"tiny delta prefill + snapshots (tokens 128) is off from no snapshots"},
    ),
}


def bench(out, *start):
    """The finished process; a fresh one, as transformers must not find fla when it is imported."""
    command = [sys.executable, *start, "--quick", "--threads", "1", "--output", str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "kernels.json"
    run = bench(out, "-m", "experiments.bench_kernels")
    assert run.returncode == 0, run.stderr
    assert "falling back to its reference PyTorch implementation" in run.stderr
    assert "(at 64 tokens, scaled to 128)" in " ".join(run.stdout.split())
    return json.loads(out.read_text())


def test_every_case_is_there_with_its_baselines(results):
    found = {
        (row["name"], ", ".join(f"{name} {value}" for name, value in row["sizes"].items())): set(
            row["baselines"]
        )
        for row in results["cases"]
    }
    assert found == CASES
    assert results["agree"] is True and results["quick"] is True
    assert results["shapes"] == ["tiny"] and results["machine"]["threads"] == 1


def test_every_figure_follows_from_the_recorded_bytes_flops_and_seconds(results):
    peaks = results["ceilings_per_s"]["tiny"]
    assert set(peaks) == {"copy", "read", "float32_bmm", "bfloat16_linear"}
    assert all(value > 0 for value in peaks.values())
    for row in results["cases"]:
        assert row["bytes"] > 0 and row["seconds"] > 0 and row["repeats"] >= 1
        assert (row["flops"] > 0) == (row["name"] != "restore")
        assert row["gb_per_s"] == pytest.approx(1e-9 * row["bytes"] / row["seconds"])
        assert row["gflop_per_s"] == pytest.approx(1e-9 * row["flops"] / row["seconds"])
        by_bytes = row["bytes"] / max(peaks["copy"], peaks["read"])
        bfloat16 = row["name"].startswith(("attention", "dense"))
        by_flops = row["flops"] / peaks["bfloat16_linear" if bfloat16 else "float32_bmm"]
        assert row["roof_seconds"] == pytest.approx(max(by_bytes, by_flops))
        assert (row["bound_by"] == "bytes") == (by_bytes > by_flops)
        assert row["fraction_of_roof"] == pytest.approx(row["roof_seconds"] / row["seconds"])
        for name, baseline in row["baselines"].items():
            assert baseline["ratio"] == pytest.approx(baseline["seconds"] / row["seconds"]), name
            assert 0 <= baseline["error"] <= 0.008
            if name == "reference":
                assert baseline["measured_tokens"] == 64 and row["sizes"]["tokens"] == 128
    above = [row["name"] for row in results["cases"] if row["fraction_of_roof"] > 1]
    assert results["above_roof"] == [f"tiny {name}" for name in above]


@pytest.mark.parametrize(("lines", "messages"), WRONG.values(), ids=list(WRONG))
def test_a_wrong_result_fails_the_run_and_nothing_is_timed(lines, messages, tmp_path):
    out = tmp_path / "kernels.json"
    run = bench(out, "-c", SPOILED.format(lines=lines))
    assert run.returncode == 1, run.stderr
    assert "FAILED: wrong results, nothing timed" in run.stderr
    assert "GFLOP/s" not in run.stdout
    results = json.loads(out.read_text())
    assert results["agree"] is False and not {"cases", "ceilings_per_s"} & set(results)
    found = {text.split(" by ")[0] for text in results["disagreements"]}
    assert found == messages
    assert found <= {text.split(" by ")[0] for text in run.stderr.splitlines()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shapes", "7b"], "argument --shapes: '7b'; expected one of tiny, demo, 0.8b"),
        (["--tokens", "64", "100"], "--tokens 100: must be a multiple of 64"),
        (["--tokens", "0"], "argument --tokens: '0'; expected an integer of at least 1"),
        (["--batches", "two"], "argument --batches: 'two'; expected an integer of at least 1"),
        (["--repeats", "-1"], "argument --repeats: '-1'; expected an integer of at least 1"),
        (["--threads", "0"], "argument --threads: '0'; expected 1 to"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_an_option_that_can_not_be_is_refused(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_options(options)
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_device_that_is_not_there_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        parse_options(["--device", "cuda"])
    assert stopped.value.code == 2
    assert "--device cuda: " in capsys.readouterr().err


def test_a_quick_run_writes_nothing_into_the_results():
    assert parse_options(["--quick"]).output == ROOT / "build" / "bench_kernels_quick.json"
    full = parse_options(["--quick", "--tokens", "64", "--shapes", "demo"])
    assert (full.tokens, full.shapes, full.batches) == ([64], ["demo"], [1, 2])


# ---- the work of a call


def layer(shape):
    return Layer(Device(quick=True), shape, SHAPES[shape])


def test_the_work_of_the_delta_rule_is_what_a_hand_works_out():
    work = delta_step_work(layer("0.8b"), rows=1)
    assert work.num_bytes == 2 * 2**20 + 2 * 3 * 2048 + 2 * 4 * 16 + 4 * 2048
    assert work.flops == 7 * 16 * 128 * 128
    rows = 2 * (2 * 2048 + 4096) + 2 * 4 * 32 + 4 * 4096  # 9B: 16 key heads, 32 value heads
    work = delta_prefill_work(layer("9b"), tokens=128, num_snapshots=2)
    assert work.num_bytes == 128 * rows + (2 + 2) * 2 * 2**20
    key_head = 2 * (2 * 64 * 64 * 128)
    value_head = 3 * 2 * 64 * 128 * 128 + 2 * 2 * 64 * 64 * 128 + 64 * 64 * 64
    assert work.flops == 2 * (16 * key_head + 32 * value_head)


def test_the_work_of_the_others_is_what_a_hand_works_out():
    work = conv_work(layer("9b"), num_tokens=10, num_windows=2)
    assert work.num_bytes == 2 * 8192 * (10 + 10 + 4 + 2 * 3)
    assert work.flops == 2 * 4 * 10 * 8192
    work = attention_work(layer("0.8b"), tokens=2, cached=3)
    assert work.num_bytes == 2 * (3 * 2 * 8 * 256 + 2 * 5 * 2 * 256)
    assert work.flops == 4 * 8 * 256 * (4 + 5)
    work = dense(layer("tiny"), rows=3).work
    assert work.num_bytes == 2 * (512 * 128 + 3 * 128 + 3 * 512)
    assert work.flops == 2 * 3 * 512 * 128


@pytest.mark.parametrize(("shape", "mib"), [("0.8b", 18.63), ("2b", 18.63), ("9b", 49.12)])
def test_a_restore_moves_the_published_size_of_a_checkpoint(shape, mib):
    assert state_shape(layer(shape)).slot_bytes / 2**20 == pytest.approx(mib, abs=0.006)


def test_a_restore_reads_and_writes_its_slot():
    case = restore(layer("tiny"))
    assert case.work.num_bytes == 2 * case.sizes["slot_bytes"] and case.work.flops == 0


def test_the_roof_is_the_slower_of_bytes_and_flops():
    peaks = {"copy": 10.0, "read": 20.0, "float32_bmm": 100.0, "bfloat16_linear": 400.0}
    assert Work(100, 1000, "float32_bmm").roof(peaks) == (10.0, "float32_bmm")
    assert Work(100, 1000, "bfloat16_linear").roof(peaks) == (5.0, "bytes")
    case = Case("op", "tiny", {}, tuple, (), Work(100, 1000, "float32_bmm"))
    assert roof(case, 40.0, peaks)["fraction_of_roof"] == 0.25


def test_an_error_is_relative_and_no_nan_or_other_shape_passes():
    ones = torch.ones(4)
    assert relative_error(1.5 * ones, ones) == 0.5
    assert relative_error(ones.bfloat16(), ones) == 0.0
    assert relative_error(torch.full((4,), torch.nan), ones) == float("inf")
    assert relative_error(ones, torch.ones(5)) == float("inf")


def test_results_are_compared_from_the_same_start_and_all_of_them():
    state = torch.ones(3)

    def advance():
        state.mul_(2.0)
        return torch.ones(3), state

    def reset():
        state.fill_(1.0)

    same = Baseline("same", advance)
    off = Baseline("off", lambda: (torch.ones(3), torch.full((3,), 4.0)))
    first = Baseline("first", lambda: (torch.ones(2),), tokens=2)
    work = Work(1, 1, "float32_bmm")
    case = Case("op", "tiny", {"tokens": 3}, advance, (same, off, first), work, reset=reset)
    assert case.errors() == {"same": 0.0, "off": 0.5, "first": 0.0}
    assert case.scale(first) == 1.5 and case.scale(same) == 1.0
