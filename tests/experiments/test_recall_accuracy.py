"""An answer counts where it is the fact's sentence, in the part of the document it is about."""

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


@pytest.mark.parametrize(("least", "status"), [("0.5", 0), ("0.51", 1)])
def test_too_few_right_answers_are_a_failure(monkeypatch, tmp_path, capsys, least, status):
    def some(_llm, facts, tokens, documents):
        shares = {"exact": 0.5, "exact_of_changed": None, "exact_by_distance": [0.5, None]}
        return {"facts": facts, "tokens": tokens, "asked": 8, "documents": documents} | shares

    monkeypatch.setattr(module, "measure", some)
    out = str(tmp_path / "x.json")
    assert module.main(["--small", "--json", out, "--least", least]) == status
    assert "50.0 % are answered to the letter; never 90 %" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        module.main(["--model", "/nowhere"])
    assert stopped.value.code == 2
    assert "--model: /nowhere/config.json: no such file" in capsys.readouterr().err
