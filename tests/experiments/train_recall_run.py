"""Training in a process of its own, where nothing has imported fla: `train_recall_run.py OUT`.

Trains a few steps in one go and with a stop between, and writes what both came to.
"""

import sys
from pathlib import Path

import torch

from experiments import train_recall
from experiments.train_recall import Stage, Training, losses, write_model

STEPS = 6


def state(training):
    return {name: tensor.clone() for name, tensor in training.model.state_dict().items()}


def main(out):
    torch.set_num_threads(1)
    train_recall.STAGES = (
        Stage(64, 2, 2, 2, 3, 2.0, 3),
        Stage(64, 2, 3, 2, 3, 2.0, 2),
        Stage(64, 2, 3, 2, 3, 2.0, 2),
    )
    whole = Training(5)
    rates, seen = [], []
    for _ in range(STEPS):
        rates.append(whole.learning_rate())
        seen.append(whole.advance())
    first = Training(5)
    for _ in range(STEPS // 2):
        first.advance()
    first.save(Path(out) / "half.pt")
    second = Training(9)
    second.load(Path(out) / "half.pt")
    for _ in range(STEPS - STEPS // 2):
        second.advance()
    batch = whole.batches.batch(5, 0, 0)
    write_model(whole.model, Path(out) / "model")
    torch.save(
        {
            "whole": state(whole),
            "resumed": state(second),
            "stages": (whole.stage, second.stage),
            "history": len(second.history),
            "rates": rates,
            "losses": seen,
            "batch": batch,
            "same_batch": Training(5).batches.batch(5, 0, 0),
            "loss": losses(whole.model, batch)[0].item(),
            "again": whole.done,
        },
        Path(out) / "out.pt",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
