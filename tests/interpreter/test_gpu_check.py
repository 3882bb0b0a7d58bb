"""The GPU check in Triton's interpreter: it runs to its end, and it sees what is broken."""

import json
import math
from dataclasses import replace

import pytest
import torch

from engine.decode_graphs import DecodeGraphs
from experiments.gpu_check import __main__ as gpu_check
from experiments.gpu_check import children, graphs, parts, timings
from experiments.gpu_check.__main__ import all_parts, main, quiet_interpreter
from experiments.gpu_check.engine import Reference, launched, num_copies
from experiments.gpu_check.parts import NEEDS_GPU, NOT_RUN, Budget, Part, run_all, verdict
from experiments.gpu_check.setup import Bench, Pool, alike_rows, nan_outputs, same_bits
from experiments.gpu_check.sizes import TINY
from kernels import triton_ops

QUICK = ("delta step", "rowwise", "slots")
NAMES = {group: [part.name for part in all_parts() if part.group == group] for group in "ABC"}


def run(tmp_path, *parts):
    """Exit status and results of these parts, of all of them without any."""
    output = tmp_path / "results" / "check.json"
    chosen = ["--parts", *parts] if parts else []
    status = main(["--output", str(output), "--seed", "7", *chosen])
    return status, json.loads(output.read_text())


def statuses(content):
    return {part["name"]: part["status"] for part in content["parts"]}


@pytest.fixture
def bench():
    return Bench(TINY, 7, lambda line: None)


# ---- the whole


def test_everything_but_the_timings_runs_and_passes(tmp_path, capsys):
    status, content = run(tmp_path)
    assert status == 0
    assert content["passed"] and content["mode"] == "interpreter" and content["seed"] == 7
    found = statuses(content)
    assert found == dict.fromkeys(NAMES["A"] + NAMES["B"], "passed") | dict.fromkeys(
        NAMES["C"], NEEDS_GPU
    )
    assert content["parts_skipped"] == NAMES["C"]
    for part in content["parts"]:
        if part["group"] == "C":
            continue
        assert part["checks"], part["name"]
        for check in part["checks"]:
            assert check["passed"], check
            assert check["error"] is None or check["error"] <= check["bar"] <= 1e-5, check
    assert content["num_checks"] > 200 and content["num_failed_checks"] == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("gpu_check: passed: ")


def test_every_op_of_the_triton_path_is_called(monkeypatch, tmp_path):
    called = set()

    def noting(name, op):
        def run(*args, **options):
            called.add(name)
            return op(*args, **options)

        return run

    for name in triton_ops.__all__:
        monkeypatch.setattr(triton_ops, name, noting(name, getattr(triton_ops, name)))
    run(tmp_path, *(name for name in NAMES["A"] if name != "specification"))
    assert called == set(triton_ops.__all__) - {"check_model"}  # which computes nothing


# ---- what is broken is seen, and the rest still runs


def broken(name, monkeypatch, change):
    op = getattr(triton_ops, name)

    def run(*args, **options):
        return change(op(*args, **options), args)

    monkeypatch.setattr(triton_ops, name, run)


def scaled(y, _):
    return y * 1.0001


def foreign_slot(y, args):
    args[5][-1].fill_(0.0)  # the last slot of the states, which nobody uses
    return y


def nan_row(y, _):
    y[-1] = torch.nan
    return y


@pytest.mark.parametrize("change", [scaled, foreign_slot, nan_row])
def test_a_broken_op_fails_its_part_and_no_other(monkeypatch, tmp_path, change, capsys):
    broken("gated_delta_step", monkeypatch, change)
    status, content = run(tmp_path, *QUICK)
    assert status == 1 and not content["passed"]
    assert statuses(content) == {"delta step": "failed", "slots": "passed", "rowwise": "passed"}
    assert content["parts_failed"] == ["delta step"] and content["num_failed_checks"] > 0
    failed = [c for part in content["parts"] for c in part["checks"] if not c["passed"]]
    for check in failed:
        if change is scaled:
            assert check["error"] > check["bar"] == 1e-5
        else:
            assert check["error"] is None
    assert "FAIL" in capsys.readouterr().out


def test_an_op_that_raises_fails_its_part_with_the_traceback(monkeypatch, tmp_path):
    def refuse(*args, **options):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(triton_ops, "gated_delta_step", refuse)
    status, content = run(tmp_path, *QUICK)
    assert status == 1
    assert statuses(content) == {"delta step": "failed", "slots": "passed", "rowwise": "passed"}
    [trace] = [part["traceback"] for part in content["parts"] if part["status"] == "failed"]
    assert "no such instruction" in trace and "correctness" in trace


def test_a_matmul_whose_rows_depend_on_their_number_fails_the_bits(monkeypatch, tmp_path):
    linear = triton_ops.linear

    def with_rows(weight):
        inner = linear(weight)
        return lambda x, rows=None: inner(x, rows) * (1.0 + 1e-6 * (len(x) == 7))

    monkeypatch.setattr(triton_ops, "linear", with_rows)
    status, content = run(tmp_path, "matmul", "bits of rows")
    assert status == 1
    assert statuses(content) == {"matmul": "passed", "bits of rows": "failed"}


def test_graphs_whose_padding_follows_the_last_step_are_seen(monkeypatch, bench):
    """trap 17, as the check of a GPU finds it."""
    fill = DecodeGraphs._fill

    def rows_alone(self, inputs, size):
        self._padding = self._ids
        fill(self, inputs, size)

    monkeypatch.setattr(DecodeGraphs, "_fill", rows_alone)
    with torch.inference_mode(), quiet_interpreter():
        graphs._steps(bench, Reference(bench).model)
    failed = {check.name for check in bench.checks if not check.passed}
    assert failed == {"5 rows after 1: all slots", "5 rows after 1: all blocks"}


def test_a_copy_of_half_a_slot_is_seen(monkeypatch, tmp_path):
    def half(arena, sources, destinations):
        width = arena.shape[1] // 2
        arena[destinations, :width] = arena[sources, :width]

    monkeypatch.setattr(triton_ops, "copy_slots", half)
    status, content = run(tmp_path, "slots")
    assert status == 1 and statuses(content) == {"slots": "failed"}


def test_results_are_written_when_the_run_is_interrupted(monkeypatch, tmp_path):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(triton_ops, "copy_slots", interrupt)
    output = tmp_path / "check.json"
    with pytest.raises(KeyboardInterrupt):
        main(["--output", str(output), "--parts", "rowwise", "slots"])
    content = json.loads(output.read_text())
    assert not content["passed"]


def test_without_a_gpu_and_without_the_interpreter_it_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "GPU" in line and "TRITON_INTERPRET=1" in line


# ---- parts and their budget


class Clock:
    """Stands still but for what is added."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class FakeCuda:
    """A bench that takes itself to be on a GPU."""

    type = "cuda"


def on_fake_gpu(bench, monkeypatch, alive=lambda: True):
    bench.device = FakeCuda()
    bench.stopwatch = Seconds({})
    monkeypatch.setattr(parts, "alive", alive)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 30)


def test_parts_that_no_longer_fit_are_not_run_and_never_passed(bench, monkeypatch):
    clock = Clock()
    on_fake_gpu(bench, monkeypatch)

    def takes(seconds):
        def run(bench):
            clock.now += seconds
            bench.holds("fine", True)

        return run

    parts = [
        Part("A", "long", takes(50.0), 60.0),
        Part("A", "too long", takes(50.0), 60.0),
        Part("B", "short", takes(5.0), 10.0),
        Part("C", "timing", takes(50.0), 46.0),
    ]
    saved = []
    results = run_all(bench, parts, Budget(100.0, clock), lambda found: saved.append(len(found)))
    assert {r["name"]: r["status"] for r in results} == {
        "long": "passed",
        "too long": NOT_RUN,
        "short": "passed",
        "timing": NOT_RUN,
    }
    assert results[0]["peak_memory_gib"] == 3.0
    assert saved == [1, 1, 3, 3]  # before and after each part that ran
    outcome = verdict(results)
    assert not outcome["passed"] and outcome["parts_not_run"] == ["too long", "timing"]
    assert verdict([r for r in results if r["name"] != "too long"])["passed"]  # only a timing lacks


def test_a_part_that_checks_nothing_has_not_passed(bench):
    [result] = run_all(bench, [Part("A", "empty", lambda bench: None, 0.0)], Budget(9.0), print)
    assert result["status"] == "failed"


def test_a_run_that_ended_within_a_part_has_not_passed():
    assert verdict([{"group": "A", "name": "x", "status": "running"}])["parts_failed"] == ["x"]
    assert not verdict([])["passed"]


def test_after_the_device_died_the_rest_runs_in_another_process(bench, monkeypatch):
    on_fake_gpu(bench, monkeypatch, alive=lambda: False)
    asked = []

    def elsewhere(groups, seed, seconds):
        asked.append((groups, seed))
        return [{"group": "B", "name": "second", "status": "passed"}]

    monkeypatch.setattr(children, "continue_elsewhere", elsewhere)

    def fault(bench):
        raise RuntimeError("an illegal memory access")

    parts = [Part("A", "first", fault, 0.0), Part("B", "second", fault, 0.0)]
    results = run_all(bench, parts, Budget(9.0), lambda found: None)
    assert [r["status"] for r in results] == ["failed", "passed"]
    assert asked == [({"second": "B"}, 7)]


def test_another_process_gives_its_results_and_names_what_it_lacks(monkeypatch):
    wanted = {"rowwise": "A", "time of conv": "C"}
    results = children.continue_elsewhere(wanted, 7, 60.0)
    assert [(r["name"], r["status"]) for r in results] == [
        ("rowwise", "passed"),
        ("time of conv", NEEDS_GPU),
    ]
    monkeypatch.setattr(children, "_command", lambda *args: ["false"])
    lost = children.continue_elsewhere(wanted, 7, 60.0)
    assert [(r["group"], r["name"], r["status"]) for r in lost] == [
        ("A", "rowwise", NOT_RUN),
        ("C", "time of conv", NOT_RUN),
    ]


# ---- comparisons


def test_a_nan_a_wrong_shape_and_a_large_error_are_not_close(bench):
    x = torch.ones(4)
    bench.close("same", x, x, 0.0)
    for other in (x * 1.1, x * torch.nan, torch.ones(1), x * torch.inf):
        bench.close("other", other, x, 0.01)
    assert [check.passed for check in bench.checks] == [True, False, False, False, False]
    assert math.isclose(bench.checks[1].error, 0.1, rel_tol=1e-5)
    assert [check.error for check in bench.checks[2:]] == [None] * 3


def test_bits_tell_zeros_apart_and_take_nan_for_itself():
    x = torch.tensor([0.0, torch.nan])
    assert same_bits(x, x.clone()) and not same_bits(x, torch.tensor([-0.0, torch.nan]))
    assert not same_bits(x, x.double())


def test_a_pool_sees_every_slot_that_changed(bench):
    pool = Pool.poisoned(bench, 4, 2, dtype=torch.float32, filled={1})
    before = pool.clone()
    pool.view[2] = 1.0
    expected = torch.ones(2)
    pool.check(bench, "written", before, {2: expected}, 1e-6)
    pool.check(bench, "not expected", before, {}, 1e-6)
    pool.everything[3, 2] = 0.0  # a layer beside the view
    pool.check(bench, "beside", before, {2: expected}, 0.0)
    assert [check.passed for check in bench.checks] == [True, True, False, True, False]


def test_fresh_outputs_are_nan_inside_and_only_there():
    with nan_outputs():
        assert torch.empty(3).isnan().all() and torch.ones(1).new_empty(2).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_launches_are_counted_and_the_counter_is_taken_away(bench):
    arena = torch.zeros(4, 64, dtype=torch.uint8)
    with launched() as names:
        bench.ops.copy_slots(arena, [1], [2])
        bench.ops.rms_norm(torch.ones(1, 16), torch.ones(16), eps=1e-6)
    bench.ops.copy_slots(arena, [1], [2])
    assert len(names) == 2 and num_copies(names) == 1


# ---- timings


class Seconds:
    """A stopwatch that runs nothing: `windows` are the times of windows, in turn."""

    def __init__(self, windows, *, warm=False):
        self.windows, self.warm, self.num_windows = windows, warm, 0

    def window(self, calls):
        self.num_windows += 1
        return next(self.windows)

    def wall(self, call):
        return self.window([call])


def test_a_median_is_of_the_windows_after_the_warm_up_and_of_one_call():
    times = iter([9.0, 9.0, 0.5, 0.1, 0.2, 0.3, 0.4])
    watch = Seconds(times)
    calls = [lambda: None] * 2
    assert timings.median_seconds(watch, calls, repeats=5) == 0.15
    assert watch.num_windows == 7


def test_long_windows_are_repeated_less_often():
    for seconds, repeats in ((0.001, 21), (3.0 / 21, 21), (0.3, 10), (10.0, 5)):
        watch = Seconds(iter([seconds] * 40))
        assert timings.median_seconds(watch, [lambda: None]) == seconds
        assert watch.num_windows == 2 + repeats


def test_the_warm_up_runs_once_and_times_nothing():
    watch = Seconds(iter([1.0] * 9), warm=True)
    assert timings.median_seconds(watch, [lambda: None]) == 0.0
    assert timings.median_wall(watch, lambda: None) == 0.0
    assert watch.num_windows == 2


def test_a_summary_is_a_share_of_the_later_of_two_roofs():
    ceilings = {"bytes_per_s": 4e12, "flops_per_s": 8e14}
    found = timings.summary("x", 2e-3, ceilings, num_bytes=4e9, flops=4e11, goal=0.5)
    assert found["ms"] == 2.0
    assert found["gb_per_s"] == pytest.approx(2000.0)
    assert found["tflop_per_s"] == pytest.approx(200.0)
    assert found["fraction_of_copy"] == pytest.approx(0.5)  # 1 ms of bytes
    assert found["fraction_of_roof"] == pytest.approx(0.5)  # and 0.5 ms of FLOPs
    assert found["bound_by"] == "bytes" and found["goal_met"]
    found = timings.summary("x", 2e-3, ceilings, num_bytes=4e8, flops=4e11, goal=0.5)
    assert found["bound_by"] == "flops" and found["goal_met"] is False
    assert found["fraction_of_roof"] == pytest.approx(0.25)
    found = timings.summary("x", 2e-3, {}, num_bytes=4e9, goal=0.5)
    assert found["fraction_of_copy"] == 0.0 and found["goal_met"] is False


def test_a_baseline_that_can_not_run_is_told_and_the_others_stay(bench):
    class Running(Seconds):
        def window(self, calls):
            calls[0]()
            return super().window(calls)

    def refuse():
        raise RuntimeError("no kernel\nof this kind")

    bench.stopwatch = Running(iter([1.0] * 40))
    bench.facts = {"bytes_per_s": 1e9}
    others = {"broken": [refuse], "fine": [lambda: None] * 2}
    timings.row(bench, "ours", [lambda: None], num_bytes=5e8, baselines=others)
    [row] = bench.timings
    assert row["baselines"]["broken"]["problem"] == "RuntimeError: no kernel"
    assert row["baselines"]["fine"]["ratio"] == 0.5 and row["fraction_of_copy"] == 0.5


@pytest.mark.parametrize("warm", [False, True])
def test_every_timing_runs_its_calls(bench, monkeypatch, warm):
    """With a stopwatch that runs the first call of each window, so that the GPU code can't rot."""

    class Once(Seconds):
        def window(self, calls):
            calls[0]()
            return super().window(calls)

    monkeypatch.setattr(timings, "REPEATS", 1)
    monkeypatch.setattr(timings, "FEWEST", 1)
    few = dict.fromkeys(("batches", "matmul_rows", "model_rows", "decode_rows"), (1,))
    times = replace(TINY.times, prefill_tokens=(64,), restored_slots=(1,), **few)
    bench.sizes = replace(TINY, times=times, matmuls=TINY.matmuls[:1])
    parts = [part for part in all_parts() if part.group == "C"]
    for part in parts:
        bench.begin(part.name)
        bench.stopwatch = Once(iter([1.0] * 10_000), warm=warm)
        with torch.inference_mode(), alike_rows():
            part.run(bench)
        assert warm or bench.timings, part.name
        assert all(check.passed for check in bench.checks)
        if not warm:
            json.dumps(bench.timings, allow_nan=False)
