"""The built-in model is small, loads in transformers, and answers by what its states remember."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import LLM, SamplingParams
from engine.builtin import BUILTIN_MODEL_DIR
from experiments.recall_accuracy import measure
from experiments.recall_documents import prompt
from experiments.recall_tokenizer import CHAT_TEMPLATE, recall_tokenizer
from experiments.recall_workload import fitting_document, question_prompts
from experiments.train_recall import recall_config

ANSWER = SamplingParams(temperature=0.0, max_tokens=12, return_logits=True)


@pytest.fixture(scope="module")
def llm():
    return LLM(BUILTIN_MODEL_DIR)


@pytest.fixture(scope="module")
def document(llm):
    return fitting_document(llm.tokenizer, "built-in test", max_tokens=1024)


def test_it_is_small_and_its_files_are_what_the_training_writes():
    size = sum(file.stat().st_size for file in BUILTIN_MODEL_DIR.iterdir())
    assert size < 8_000_000
    assert json.loads((BUILTIN_MODEL_DIR / "config.json").read_text()) == recall_config()
    text = (BUILTIN_MODEL_DIR / "tokenizer.json").read_text()
    assert text == recall_tokenizer().to_str(pretty=True)
    settings = json.loads((BUILTIN_MODEL_DIR / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == CHAT_TEMPLATE


def test_three_recurrent_layers_to_one_of_attention(llm):
    types = [llm.model_config.num_linear_layers, llm.model_config.num_full_layers]
    assert types[0] == 3 * types[1] > 0


def test_transformers_gives_the_same_logits_and_answer(llm, document, tmp_path):
    ids = next(question_prompts(llm.tokenizer, document, [document.facts[2]]))
    job = {"name": "it", "directory": str(BUILTIN_MODEL_DIR), "prompt": ids}
    (tmp_path / "jobs.json").write_text(json.dumps([job | {"greedy_from": len(ids)}]))
    script = Path(__file__).with_name("transformers_logits.py")
    command = [sys.executable, str(script), str(tmp_path / "jobs.json"), str(tmp_path / "out.pt")]
    subprocess.run(command, check=True, timeout=300)
    theirs = torch.load(tmp_path / "out.pt", weights_only=True)["it"]
    [ours] = llm.generate([ids], ANSWER)
    number = len(ours.token_ids)
    assert ours.token_ids == theirs["greedy"][:number].tolist()
    torch.testing.assert_close(
        torch.stack(list(ours.logits)), theirs["greedy_logits"][:number], rtol=0, atol=1e-4
    )


def test_it_answers_in_whole_sentences_and_ends_them_itself(llm, document):
    outputs = llm.generate([prompt(document, fact) for fact in document.facts], ANSWER)
    right = 0
    for fact, output in zip(document.facts, outputs, strict=True):
        assert output.finish_reason == "stop"
        assert output.text.startswith(f" {fact.name} {fact.relation.verb} ")
        right += output.text.strip() == fact.sentence
    assert right >= 0.9 * len(document.facts)


def test_any_other_text_can_be_sent(llm):
    [output] = llm.generate(["Größe: 3 \N{MULTIPLICATION SIGN} 4?\n\N{SNOWMAN}"], ANSWER)
    assert output.finish_reason in ("stop", "length")


def test_it_answers_95_percent_about_64_facts_in_a_document_of_4096_tokens(llm):
    """Two of the held-out documents of `experiments.recall_accuracy`."""
    row = measure(llm, 64, 4096, 2)
    assert row["asked"] == 128 and row["exact"] >= 0.95
