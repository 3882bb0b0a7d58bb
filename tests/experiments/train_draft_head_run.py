"""Run by test_train_draft_head.py in a process of its own: transformers without fla.

`python -m tests.experiments.train_draft_head_run OUT`: a few steps on a copy of the built-in model
in OUT/model, and OUT/guesses.json: prompts, and what the trained module guesses after the model's
own next token.
"""

import json
import shutil
import sys
from pathlib import Path

import torch

from engine.builtin import BUILTIN_MODEL_DIR
from experiments.recall_documents import user_turn
from experiments.recall_tokenizer import recall_tokenizer
from experiments.train_draft_head import add_to_model, guesses, main, train
from experiments.transformers_baseline import transformers_on_cpu

QUESTIONS = [
    "Ada lives in Oslo. Adam plays the harp. Where does Ada live?",
    "Zoe keeps a falcon. Noah bakes fresh scones. What does Noah bake?",
    "Maria plays the tuba. The river rested at noon. What does Maria play?",
]


def run(out: Path) -> None:
    torch.set_num_threads(1)
    auto = transformers_on_cpu().Qwen3_5ForCausalLM
    shutil.copytree(BUILTIN_MODEL_DIR, out / "model")
    assert main(["--model", str(out / "model"), "--steps", "2"]) == 0
    model = auto.from_pretrained(out / "model", dtype=torch.float32).eval()
    model.requires_grad_(False)
    head = train(model, steps=3, seed=7)
    for parameter in head.parameters():  # as it is read back
        parameter.data = parameter.data.to(torch.bfloat16).float()
    add_to_model(head, out / "model")
    told = []
    for question in QUESTIONS:
        ids = recall_tokenizer().encode(user_turn(question)).ids
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            batch = torch.tensor([ids])
            hidden = model.model(batch).last_hidden_state
            [logits] = guesses(head, model, batch, hidden, 1)
        told.append({"prompt": ids[:-1], "next": ids[-1], "guess": int(logits[0, -1].argmax())})
    (out / "guesses.json").write_text(json.dumps(told))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
