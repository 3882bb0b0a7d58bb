"""An answer counts where it is the fact's sentence, in the part of the document it is about."""

import json

import pytest

import experiments.recall_accuracy as module
from engine import LLM
from engine.builtin import BUILTIN_MODEL_DIR


@pytest.fixture(scope="module")
def llm():
    return LLM(BUILTIN_MODEL_DIR)


def test_right_answers_are_counted_by_their_distance(llm, monkeypatch):
    seen = []

    def half(_, document):
        seen.append(document)
        return [fact.sentence if i % 2 else fact.value for i, fact in enumerate(document.facts)]

    monkeypatch.setattr(module, "ask_all", half)
    row = module.measure(llm, 16, 512, 1)
    assert (row["asked"], row["exact"]) == (16, 0.5)
    [document] = seen
    parts = [[] for _ in range(module.NUM_DISTANCES)]
    for i, place in enumerate(document.positions):
        part = (len(document.sentences) - 1 - place) * 8 // len(document.sentences)
        parts[part].append(i % 2)
    assert row["exact_by_distance"] == [sum(p) / len(p) if p else None for p in parts]


def test_the_answers_are_those_of_the_model(llm):
    row = module.measure(llm, 4, 256, 1)
    assert row["exact"] == 1.0


@pytest.fixture
def half_right(monkeypatch):
    """Every measurement says that half of the answers are right; the list notes what was asked."""
    asked = []

    def some(_llm, facts, tokens, documents):
        asked.append((facts, tokens, documents))
        shares = {"exact": 0.5, "exact_of_changed": None, "exact_by_distance": [0.5, None]}
        return {"facts": facts, "tokens": tokens, "asked": 8, "documents": documents} | shares

    monkeypatch.setattr(module, "measure", some)
    return asked


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--goal", "0.5"], 0, ""),
        (["--goal", "0.51"], 1, "50.0 % are right, --goal asks for 51.0 %"),
        (["--goal", "0"], 0, ""),
        ([], 1, "50.0 % are right, --goal asks for 95.0 %"),
    ],
)
def test_too_few_right_answers_are_a_failure(half_right, tmp_path, capsys, options, status, said):
    out = tmp_path / "x.json"
    assert module.main(["--small", "--json", str(out), *options]) == status
    assert half_right == [(16, 1024, 2), (64, 4096, 2)], "the goal's size is among the small ones"
    captured = capsys.readouterr()
    assert "50.0 % are answered to the letter; never 90 %" in captured.out
    assert [line for line in captured.err.splitlines() if "asks for" in line] == [said] * bool(said)
    assert json.loads(out.read_text())["rows"][1]["exact"] == 0.5, "this run's, whatever the goal"


@pytest.mark.parametrize("text", ["95", "-0.1", "nan", "most"])
def test_a_goal_that_is_no_share_is_refused(refusal, text):
    assert f"{text!r}; expected a share from 0 to 1" in refusal(module.main, [f"--goal={text}"])


def test_a_model_that_is_not_there_is_refused(tmp_path, capsys):
    assert module.main(["--model", "/nowhere", "--json", str(tmp_path / "x.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("recall_accuracy: error: /nowhere/config.json: no such file")
