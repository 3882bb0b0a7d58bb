"""The cost of a restore: real slot sizes, and a way that leaves other bytes makes it fail."""

import json

import pytest
import torch

from engine import LLM
from engine.builtin import BUILTIN_MODEL_DIR
from experiments.restore_bench import Bench, state_shape
from experiments.restore_cost import draw, main


def run(tmp_path, *more):
    """Exit status, the results file, and the path of the picture."""
    path = tmp_path / "out.json"
    options = ["--models", "built-in", "--sequences", 3, 1, "--repeats", 2, "--json", path, *more]
    status = main([str(option) for option in options])
    return status, json.loads(path.read_text()), path.with_suffix(".png")


def test_all_ways_are_measured_on_equal_bytes(tmp_path, capsys):
    status, content, picture = run(tmp_path)
    assert status == 0 and content["passed"] and content["failures"] == []
    rows = content["rows"]
    assert [(row["model"], row["sequences"]) for row in rows] == [("built-in", 1), ("built-in", 3)]
    for row in rows:
        assert row["bytes_equal"] is True
        moved = 2 * row["sequences"] * row["slot_mib"] * 2**20  # read and written
        for way in ("per_layer", "fused", "plain"):
            assert row[f"{way}_gb_per_s"] == pytest.approx(moved / row[f"{way}_ms"] / 1e6)
        for name in ("redirect", "step", "copy_and_step", "redirect_and_step"):
            assert row[f"{name}_ms"] > 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.endswith(" ".join(content["conclusion"].split()))
    again = tmp_path / "again.png"
    draw(content, again)
    assert again.read_bytes() == picture.read_bytes()


def forget_a_layer(self):
    for source, live in zip(self.sources, self.live, strict=True):
        self.pool.arena[live] = self.pool.arena[source]
        self.pool.windows[live, -1] = 0


def one_slot_off(self):
    arena, num = self.pool.arena, self.num
    arena[num + 1 :] = arena[1 : num + 1].roll(1, 0)


@pytest.mark.parametrize(
    ("way", "broken", "failure"),
    [
        ("per_layer", forget_a_layer, "per_layer: the live slots are not the checkpoints"),
        ("plain", one_slot_off, "plain: the live slots are not the checkpoints"),
        ("fused", lambda self: None, "fused: the live slots are not the checkpoints"),
        ("redirect", lambda self: [], "redirect: []"),
    ],
)
def test_a_broken_way_fails_the_run(tmp_path, monkeypatch, capsys, way, broken, failure):
    run(tmp_path)
    monkeypatch.setattr(Bench, way, broken)
    status, content, picture = run(tmp_path, "--sequences", 2)
    assert status == 1 and content["conclusion"] is None and not picture.exists()
    assert f"built-in, 2 sequences: {failure}" in content["failures"]
    assert content["rows"][0]["bytes_equal"] is False
    assert failure in capsys.readouterr().err


def test_a_redirected_step_that_reads_its_own_slot_fails():
    bench = Bench(state_shape("built-in"), 2, "cpu")
    assert bench.differences() == []
    step = bench.step
    bench.step = lambda read: step(bench.live)
    assert bench.differences() == [
        "redirect: the first step gives other outputs than after a copy",
        "redirect: the first step leaves other states than after a copy",
    ]


def test_a_changed_checkpoint_fails():
    bench = Bench(state_shape("built-in"), 2, "cpu")
    redirect = bench.redirect

    def flip_one_bit():
        bench.pool.arena[2, 5] ^= 1
        return redirect()

    bench.redirect = flip_one_bit
    assert "a checkpoint was changed" in bench.differences()


def test_the_checkpoints_and_layers_differ():
    bench = Bench(state_shape("built-in"), 3, "cpu")
    for view in (bench.pool.states, bench.pool.windows):
        parts = view[1:4].flatten(0, 1)  # [3 slots x L, ...]
        pairs = [(i, j) for i in range(len(parts)) for j in range(i)]
        assert not any(torch.equal(parts[i], parts[j]) for i, j in pairs)


def test_slots_are_those_of_the_models():
    llm = LLM(BUILTIN_MODEL_DIR, num_slots=2, num_blocks=2, max_num_seqs=1)
    assert state_shape("built-in") == llm.worker.state_pool.shape
    mib = {name: state_shape(name).slot_bytes / 2**20 for name in ("0.8b", "9b")}
    assert {name: round(size, 2) for name, size in mib.items()} == {"0.8b": 18.63, "9b": 49.12}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sequences", "0"], "--sequences: '0'; expected an integer of at least 1"),
        (["--models", "70b"], "--models: invalid choice: '70b'"),
        (["--sequences", "100000"], "GB are needed; this machine has less"),
    ],
)
def test_a_bad_option_is_one_clear_error(refusal, options, message):
    line = refusal(main, options)
    assert line.startswith("restore_cost: error: ") and message in line
