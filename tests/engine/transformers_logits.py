"""Logits of transformers' Qwen3.5, in a process of its own: `transformers_logits.py JOBS OUT`.

JOBS is JSON, [{"name", "directory", "prompt", "greedy_from"}]. OUT gets, for each name, the logits
after every token of the prompt, the greedy continuation of its first `greedy_from` tokens, and the
logits it was chosen from. The engine's process may have imported fla, and transformers would take
fla's GPU kernels for CPU tensors: here it can't be imported.
"""

import json
import sys

sys.modules["fla"] = None  # before transformers is imported

import torch  # noqa: E402
from transformers import DynamicCache, Qwen3_5ForCausalLM  # noqa: E402

NUM_GREEDY = 64


@torch.no_grad()
def run(job):
    model = Qwen3_5ForCausalLM.from_pretrained(job["directory"], dtype=torch.float32).eval()
    prompt = torch.tensor([job["prompt"]])
    cache = DynamicCache(config=model.config)
    rows = [model(prompt[:, : job["greedy_from"]], cache=cache).logits[0, -1]]
    chosen = [rows[0].argmax()]
    while len(chosen) < NUM_GREEDY:
        rows.append(model(chosen[-1].view(1, 1), cache=cache).logits[0, -1])
        chosen.append(rows[-1].argmax())
    return {
        "logits": model(prompt).logits[0],
        "greedy": torch.stack(chosen),
        "greedy_logits": torch.stack(rows),
    }


def main(jobs_file, out):
    torch.set_num_threads(1)
    with open(jobs_file) as stream:
        jobs = json.load(stream)
    torch.save({job["name"]: run(job) for job in jobs}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
