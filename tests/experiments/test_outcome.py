"""A run that fails leaves nothing of an older run, and says why."""

import json
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest

from experiments.outcome import asked, failed, publish, publish_rows, remove_results

SCRIPTS = {  # what does the work in each, and its smallest options
    "warm_start": ("measure", ["--prefix-tokens", 128, "--questions", 1]),
    "recall_accuracy": ("measure", ["--small"]),
    "semantic_drift": ("measure", ["--small"]),
    "ttft_vs_prefix": ("measure_prefix", ["--prefixes", 64]),
    "stride_sweep": ("engine_rows", ["--small", "--traces", "/nowhere"]),
    "concurrency": ("measure", ["--small", "--clients", 1]),
    "multi_turn": ("measure", ["--small", "--conversations", 1]),
    "restore_cost": ("measure", ["--small"]),
    "mtp": ("measure", ["--small", "--guesses", 1]),
}


@pytest.fixture
def old(tmp_path):
    """The results file of an older run; its picture lies beside it."""
    path = tmp_path / "x.json"
    path.write_text('{"conclusion": "of an older run"}')
    path.with_suffix(".png").write_bytes(b"of an older run")
    return path


def drawn(results, path):
    path.write_text(results["conclusion"])


def test_what_an_older_run_left_is_removed_and_nothing_else(old):
    other = old.with_name("y.json")
    other.write_text("{}")
    remove_results(old)
    assert list(old.parent.iterdir()) == [other]
    remove_results(old)  # nor does it mind if there was nothing


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_that_breaks_leaves_nothing_of_an_older_one(old, monkeypatch, name):
    def broken(*_, **__):
        raise RuntimeError("no memory")

    script = import_module(f"experiments.{name}")
    work, options = SCRIPTS[name]
    monkeypatch.setattr(script, work, broken)
    with pytest.raises(RuntimeError, match="no memory"):
        script.main([str(option) for option in [*options, "--json", old]])
    assert list(old.parent.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "restore_cost"])
def test_a_model_that_is_not_there_costs_no_older_results(old, capsys, name):
    script = import_module(f"experiments.{name}")
    options = [*SCRIPTS[name][1], "--json", old, "--model", "/nowhere"]
    try:
        status = script.main([str(option) for option in options])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith(f"{name}: error: /nowhere/config.json")
    assert old.exists() and old.with_suffix(".png").exists(), "no run has begun"


def test_results_are_written_drawn_and_answered(old, capsys):
    assert publish(old, {"conclusion": "Yes."}, [], drawn) == 0
    assert json.loads(old.read_text())["conclusion"] == "Yes."
    assert old.with_suffix(".png").read_text() == "Yes."
    assert capsys.readouterr().out.endswith("Yes.\n")


def test_failed_results_have_no_picture(old, capsys):
    assert publish(old, {"conclusion": None}, ["one", "two"], drawn) == 1
    assert json.loads(old.read_text())["conclusion"] is None
    assert not old.with_suffix(".png").exists()
    assert capsys.readouterr().err == "FAILED\none\ntwo\n"


def test_no_table_and_no_conclusion_are_made_of_wrong_answers(old):
    options = Namespace(json=old, repeats=3)

    def never(_):
        raise AssertionError("of wrong answers")

    how = {"table": never, "conclusion": never, "draw": never}
    assert publish_rows(options, "Why?", [{"ms": 1.0}], ["a bit"], **how) == 1
    content = json.loads(old.read_text())
    del content["machine"]
    assert content == {
        "question": "Why?",
        "conclusion": None,
        "rows": [{"ms": 1.0}],
        "options": {"repeats": 3},
        "passed": False,
        "failures": ["a bit"],
    }


def test_no_folder_of_this_machine_is_in_the_results():
    options = Namespace(model=Path("/home/a/tiny"), traces=Path("/b"), json=Path("/c"), threads=1)
    assert asked(options) == {"model": "tiny", "threads": 1}


def test_a_failure_is_named(capsys):
    assert failed(["a bit differs"]) == 1
    assert capsys.readouterr().err == "FAILED\na bit differs\n"
