"""The head is trained in the wiring that the engine runs, and leaves the model as it was."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import LLM, SamplingParams
from engine.builtin import BUILTIN_MODEL_DIR
from engine.model_config import ModelConfig
from engine.weights import read_weights

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("head")
    command = [sys.executable, "-m", "tests.experiments.train_draft_head_run", str(out)]
    subprocess.run(command, check=True, timeout=300, cwd=ROOT, capture_output=True)
    return out


def test_the_model_itself_is_what_it_was(trained):
    config = ModelConfig.from_directory(BUILTIN_MODEL_DIR)
    before = dict(read_weights(BUILTIN_MODEL_DIR, config))
    after = dict(read_weights(trained / "model", config))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_engine_guesses_what_the_trained_module_guesses(trained):
    llm = LLM(trained / "model", num_speculative_tokens=1)
    draft = llm.worker.model.draft
    told = []

    def listening(*args):
        told.append(draft(*args))
        return told[-1]

    llm.worker.model.draft = listening
    for case in json.loads((trained / "guesses.json").read_text()):
        told.clear()
        greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        [output] = llm.generate([case["prompt"]], greedy)
        assert output.token_ids[0] == case["next"]
        assert told[0] == [[case["guess"]]]
