"""Can a draft head guess a small model's answers? Trains the built-in model's, on its documents.

The model is frozen; the head is a layer of transformers' Qwen3.5 wired as `engine.draft_head` says.
It learns its first guess and, from its own hidden row, the second. Seeded; minutes on one core.

    python -m experiments.train_draft_head --model engine/builtin_model
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from engine.builtin import BUILTIN_MODEL_DIR
from experiments.options import count, thread_count
from experiments.train_recall import STAGES, Batches
from experiments.transformers_baseline import transformers_on_cpu

SEED = 2
PEAK_LR, WARM_UP_STEPS = 3e-3, 20
STAGE = 4  # documents of 1,024 tokens
HELD_OUT = 1_000_000  # index of the first batch that is not trained on


def new_head(model: Any) -> Any:
    """A torch module with the names of the `mtp.*` tensors; guesses start as the model's own."""
    transformers_on_cpu()
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    config = model.config
    hidden, eps = config.hidden_size, config.rms_norm_eps
    head = torch.nn.Module()
    head.fc = torch.nn.Linear(2 * hidden, hidden, bias=False)
    head.pre_fc_norm_embedding = qwen.Qwen3_5RMSNorm(hidden, eps=eps)
    head.pre_fc_norm_hidden = qwen.Qwen3_5RMSNorm(hidden, eps=eps)
    head.layers = torch.nn.ModuleList(
        [qwen.Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))]
    )
    head.norm = qwen.Qwen3_5RMSNorm(hidden, eps=eps)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return head


def guesses(
    head: Any, model: Any, ids: torch.Tensor, hidden: torch.Tensor, depth: int
) -> Iterator[torch.Tensor]:
    """Logits [rows, tokens, vocab] of `depth` guesses: what follows each token.

    hidden [rows, tokens, hidden_size], after the model's final norm; row p is made of token p and
    of hidden row p - 1, then of the head's own.
    """
    positions = torch.arange(ids.shape[1])[None].expand(len(ids), -1)
    rotations = model.model.rotary_emb(hidden, positions[None].expand(3, -1, -1))
    embedded = head.pre_fc_norm_embedding(model.model.embed_tokens(ids))
    for _ in range(depth):
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
        x = head.fc(torch.cat([embedded, head.pre_fc_norm_hidden(before)], dim=-1))
        hidden = head.norm(head.layers[0](x, position_embeddings=rotations))
        yield model.lm_head(hidden)


def loss_and_hits(
    head: Any, model: Any, batch: tuple[torch.Tensor, ...], depth: int = 2
) -> tuple[torch.Tensor, list[float]]:
    """(weighted cross entropy, share of right guesses within answers, of each depth).

    A right guess is the model's own likeliest token: what it would say, not what is true.
    """
    ids, weights, _ = batch
    with torch.no_grad():
        hidden = model.model(ids, use_cache=False).last_hidden_state
        said = model.lm_head(hidden).argmax(-1)
    total, shares = torch.zeros(()), []
    in_answers = weights == weights.max()
    for ahead, logits in enumerate(guesses(head, model, ids, hidden, depth)):
        first = 1 + ahead  # rows whose hidden rows, own or the model's, all exist
        used = torch.zeros_like(in_answers)
        used[:, first:-1] = weights[:, first + 1 :] > 0
        each = torch.nn.functional.cross_entropy(logits[used], said[used], reduction="none")
        at = torch.cat([weights[:, 1:], torch.zeros_like(weights[:, :1])], dim=1)[used]
        total = total + (each * at).sum() / at.sum()
        answered = torch.zeros_like(in_answers)
        answered[:, first:-1] = in_answers[:, first + 1 :]
        right = logits[answered].argmax(-1) == said[answered]
        shares.append(right.float().mean().item())
    return total, shares


def train(model: Any, *, steps: int, seed: int) -> Any:
    """A trained head."""
    torch.manual_seed(seed)
    head = new_head(model)
    optimizer = torch.optim.AdamW(head.parameters(), lr=PEAK_LR, betas=(0.9, 0.98))
    batches = Batches()
    for step in track(range(steps), "draft head", console=Console(stderr=True)):
        rate = PEAK_LR * min(1.0, (step + 1) / WARM_UP_STEPS) * (1.0 - step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, _ = loss_and_hits(head, model, batches.batch(seed, STAGE, step))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
    return head


def add_to_model(head: Any, directory: Path) -> None:
    """Write the head's tensors into the directory's weights, in bfloat16, all or nothing."""
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if not n.startswith("mtp.")}
    for name, tensor in head.state_dict().items():
        tensors[f"mtp.{name}"] = tensor.to(torch.bfloat16).contiguous()
    temporary = file.with_suffix(".tmp")
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    temporary.replace(file)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=BUILTIN_MODEL_DIR, help="gets the head")
    parser.add_argument("--steps", type=count, default=300)
    parser.add_argument("--threads", type=thread_count, default=1, help="of torch")
    parser.add_argument("--seed", type=count, default=SEED)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    auto = transformers_on_cpu().Qwen3_5ForCausalLM
    try:
        model = auto.from_pretrained(options.model, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        parser.error(f"--model {options.model}: {error}")
    model.requires_grad_(False)
    head = train(model, steps=options.steps, seed=options.seed)
    add_to_model(head, options.model)
    with torch.no_grad():
        held_out = Batches().batch(options.seed, STAGE, HELD_OUT)
        _, shares = loss_and_hits(head, model, held_out)
    told = " and ".join(f"{100 * share:.0f} %" for share in shares)
    print(
        f"{options.model}: of the words of answers about held-out documents of "
        f"{STAGES[STAGE].tokens:,} tokens the head guesses {told}, one and two words ahead"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
