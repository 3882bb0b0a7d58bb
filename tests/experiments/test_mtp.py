"""Guesses are counted, and a token, a bit or a boundary that differs is a failure."""

import json

import pytest

from experiments import mtp as module

TINY = ["--questions", "2", "--document-tokens", "256", "--guesses", "2"]


def test_a_run_counts_guesses_and_compares_every_bit(tmp_path, capsys):
    out = tmp_path / "x.json"
    assert module.main([*TINY, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["sampling"], row["guesses"]) for row in rows] == [("greedy", 2), ("drawn", 2)]
    for row in rows:
        assert row["bits_equal"] and row["answers"] == 3
        assert 0 < row["accepted"] <= row["drafted"]
        assert row["acceptance"] == row["accepted"] / row["drafted"]
        assert 1.0 < row["tokens_per_step"] <= 3.0
    assert "have its tokens and bits" in " ".join(capsys.readouterr().out.split())


def test_a_difference_is_a_failure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module, "first_difference", lambda *_: "other bits")
    assert module.main([*TINY, "--json", str(tmp_path / "x.json")]) == 1
    assert "greedy, 2 guesses, prompt 0: other bits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--guesses", "17"], "num_speculative_tokens=17"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--document-tokens", "40000"], "tokens are needed; the model has 32768"),
    ],
)
def test_what_can_not_be_measured_is_refused(options, message, tmp_path, capsys):
    assert module.main([*TINY, *options, "--json", str(tmp_path / "x.json")]) == 2
    assert message in capsys.readouterr().err
