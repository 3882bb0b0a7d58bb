"""Training is seeded, goes on where it stopped, and weighs the words of its answers."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.model_config import ModelConfig
from engine.weights import read_weights
from experiments.recall_tokenizer import recall_tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("training")
    command = [sys.executable, "-m", "tests.experiments.train_recall_run", str(out)]
    subprocess.run(command, check=True, timeout=300, cwd=ROOT)
    return torch.load(out / "out.pt", weights_only=True) | {"model": out / "model"}


def test_a_stopped_training_ends_with_the_bits_of_one_that_went_through(run):
    assert run["whole"].keys() == run["resumed"].keys()
    for name, tensor in run["whole"].items():
        assert torch.equal(tensor, run["resumed"][name]), name
    assert run["stages"] == (2, 2) and run["history"] == 2


def test_the_learning_rate_rises_then_falls_through_the_last_stages(run):
    from experiments.train_recall import PEAK_LR, WARM_UP_STEPS

    rise = [PEAK_LR * (step + 1) / WARM_UP_STEPS for step in range(6)]
    fall = [1, 1, 1, 1, 3 / 4, 2 / 4]
    expected = [up * down for up, down in zip(rise, fall, strict=True)]
    assert run["rates"] == pytest.approx(expected)
    assert all(math.isfinite(loss) for loss in run["losses"])


def test_a_batch_weighs_answers_most_and_marks_their_values(run):
    ids, weights, is_value = run["batch"]
    for mine, same in zip(run["batch"], run["same_batch"], strict=True):
        assert torch.equal(mine, same)
    tokenizer = recall_tokenizer()
    [end] = tokenizer.encode("<|im_end|>").ids
    assert is_value.any()
    for row, at in is_value.nonzero().tolist():
        assert torch.all(weights[row, at - 3 : at + 1] == 1.0)
        answer = tokenizer.decode(ids[row, at - 3 : at + 1].tolist())
        assert len(answer.split()) == 4
        assert (ids[row, at + 1 : at + 3] == end).any() or at + 2 >= ids.shape[1]
    assert set(weights.unique().tolist()) <= {0.0, torch.tensor(0.02).item(), 1.0}


def test_the_model_is_written_in_bfloat16_and_read_as_it_was(run):
    config = ModelConfig.from_directory(run["model"])
    read = dict(read_weights(run["model"], config))
    assert read and all(tensor.dtype == torch.bfloat16 for tensor in read.values())
    for name, tensor in read.items():
        assert torch.equal(tensor, run["whole"][f"model.{name}"].bfloat16()), name
