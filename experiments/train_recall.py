"""Can a small Qwen3.5 answer questions about a long document? Trains the built-in model.

The model is transformers' own Qwen3.5 with its chunked delta rule, on the CPU. Documents grow by
curriculum: a stage ends when nearly every answer is right, the last ones are 4,096 tokens long. The
loss is mostly that of the answers. Everything is seeded; Ctrl-C or `--minutes` saves, `--resume`
goes on.

    python -m experiments.train_recall --out engine/builtin_model
"""

import argparse
import json
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from experiments import model_shapes
from experiments.options import count, thread_count
from experiments.recall_documents import training_text
from experiments.recall_tokenizer import CHAT_TEMPLATE, recall_tokenizer
from experiments.transformers_baseline import transformers_on_cpu

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "build" / "train_recall.pt"
SEED = 1
ANSWER_WEIGHT, TEXT_WEIGHT = 1.0, 0.02
PEAK_LR, WARM_UP_STEPS = 2e-3, 100


@dataclass(frozen=True)
class Stage:
    """Rows of `tokens` with at most `facts` facts, until `accuracy` or `steps`."""

    tokens: int
    rows: int
    facts: int
    questions: int
    sentences: int
    accuracy: float
    steps: int


# The last two have no accuracy to end them: there the learning rate falls to zero.
STAGES = (
    Stage(256, 12, 8, 8, 8, 0.85, 1500),
    Stage(256, 12, 14, 8, 14, 0.85, 1500),
    Stage(512, 8, 24, 16, 28, 0.90, 1500),
    Stage(768, 6, 40, 24, 44, 0.90, 1500),
    Stage(1024, 6, 64, 32, 70, 0.90, 200),
    Stage(2048, 3, 84, 48, 160, 0.90, 200),
    Stage(1024, 6, 76, 32, 80, 2.0, 120),
    Stage(4096, 2, 96, 72, 340, 2.0, 850),
)
DECAY_STAGES = 2

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 32_768,
    "eos_token_id": model_shapes.FIRST_SPECIAL_ID + model_shapes.SPECIAL_TOKENS.index("<|im_end|>"),
}


def recall_config() -> dict[str, Any]:
    """The built-in model's config.json."""
    vocab = recall_tokenizer().get_vocab_size()
    return model_shapes.hf_config(
        "tiny", vocab=-(-vocab // 64) * 64, layers=None, dtype="float32", overrides=SHAPE
    )


# ---- data


class Batches:
    """Seeded batches: batch i of a stage is the same whatever came before it."""

    def __init__(self) -> None:
        self._tokenizer = recall_tokenizer()

    def batch(self, seed: int, stage: int, index: int) -> tuple[torch.Tensor, ...]:
        """(ids, weights, is_value), each [rows, tokens].

        weights: of each token's loss; zero on padding. is_value: the word that an answer turns on.
        """
        shape = STAGES[stage]
        rng = random.Random(f"{seed}/{stage}/{index}")
        ids = torch.full((shape.rows, shape.tokens), model_shapes.END_OF_TEXT_ID)
        weights = torch.zeros(shape.rows, shape.tokens)
        is_value = torch.zeros(shape.rows, shape.tokens, dtype=torch.bool)
        for row in range(shape.rows):
            facts = rng.randint(max(2, shape.facts // 2), shape.facts)
            pieces = training_text(
                rng,
                num_facts=facts,
                num_questions=shape.questions,
                num_sentences=rng.randint(facts, max(facts, shape.sentences)),
            )
            end = 0
            for text, is_answer in pieces:
                tokens = self._tokenizer.encode(text).ids[: shape.tokens - end]
                ids[row, end : end + len(tokens)] = torch.tensor(tokens, dtype=torch.long)
                weight = ANSWER_WEIGHT if is_answer else TEXT_WEIGHT
                weights[row, end : end + len(tokens)] = weight
                if is_answer and len(tokens) >= 4:
                    is_value[row, end + 3] = True
                end += len(tokens)
        return ids, weights, is_value


# ---- model


def new_model(seed: int) -> Any:
    """transformers' model, started where recall is near.

    Decays are slow, so that facts of long ago are there to be learnt. Queries and keys start as the
    same mean of the last words, so that a question finds the place where its words stood before.
    """
    transformers = transformers_on_cpu()
    torch.manual_seed(seed)
    config = transformers.Qwen3_5TextConfig(**recall_config())
    model = transformers.Qwen3_5ForCausalLM(config).float()
    key_rows = config.linear_num_key_heads * config.linear_key_head_dim
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.uniform_(-7.0, -2.0)
            elif name.endswith("A_log"):
                parameter.uniform_(math.log(0.5), math.log(2.0))
            elif name.endswith("conv1d.weight"):
                parameter.normal_(0.0, 0.1)
                parameter[: 2 * key_rows] += 0.5
                parameter[2 * key_rows :, :, -1] += 1.0
            elif parameter.dim() == 2:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
                if name.endswith("in_proj_qkv.weight"):
                    parameter[:key_rows] = parameter[key_rows : 2 * key_rows]
    return model


def losses(model: Any, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, float]:
    """(weighted mean cross entropy, share of the answers' values that were the likeliest word)."""
    ids, weights, is_value = batch
    logits = model(ids, use_cache=False).logits[:, :-1]
    targets, weights, is_value = ids[:, 1:], weights[:, 1:], is_value[:, 1:]
    used = weights > 0
    each = torch.nn.functional.cross_entropy(logits[used], targets[used], reduction="none")
    loss = (each * weights[used]).sum() / weights.sum()
    right = logits[is_value].argmax(-1) == targets[is_value]
    return loss, right.float().mean().item()


# ---- training


class Training:
    """Model, optimizers and where the curriculum stands; all of it is in a checkpoint."""

    def __init__(self, seed: int) -> None:
        self.model = new_model(seed)
        self.seed = seed
        matrices = {
            name: p
            for name, p in self.model.named_parameters()
            if p.dim() == 2 and "embed_tokens" not in name
        }
        others = [p for name, p in self.model.named_parameters() if name not in matrices]
        self.optimizers = (
            torch.optim.Muon(
                matrices.values(), lr=PEAK_LR, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.0),
        )
        self.batches = Batches()
        self.stage = self.stage_step = self.step = 0
        self.accuracy = 0.0  # running mean over the stage's last steps
        self.seconds = 0.0
        self.history: list[dict[str, float]] = []

    @property
    def done(self) -> bool:
        return self.stage == len(STAGES)

    def learning_rate(self) -> float:
        rate = PEAK_LR * min(1.0, (self.step + 1) / WARM_UP_STEPS)
        decaying = STAGES[-DECAY_STAGES:]
        into = self.stage - (len(STAGES) - DECAY_STAGES)
        if into < 0:
            return rate
        passed = sum(stage.steps for stage in decaying[:into]) + self.stage_step
        return rate * (1.0 - passed / sum(stage.steps for stage in decaying))

    def advance(self) -> float:
        """One step; returns its loss. Raises FloatingPointError when that is not finite."""
        began = time.perf_counter()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate()
        batch = self.batches.batch(self.seed, self.stage, self.stage_step)
        loss, accuracy = losses(self.model, batch)
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"the loss of step {self.step} is {loss.item()}")
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.seconds += time.perf_counter() - began
        self._move_on(loss.item(), accuracy)
        return loss.item()

    def _move_on(self, loss: float, accuracy: float) -> None:
        keep = min(0.95, self.stage_step / (self.stage_step + 1))
        self.accuracy = keep * self.accuracy + (1 - keep) * accuracy
        self.step += 1
        self.stage_step += 1
        stage = STAGES[self.stage]
        learnt = self.stage_step >= 20 and self.accuracy >= stage.accuracy
        if learnt or self.stage_step >= stage.steps:
            self.history.append(
                {
                    "facts": stage.facts,
                    "tokens": stage.tokens,
                    "steps": self.stage_step,
                    "accuracy": round(self.accuracy, 4),
                    "loss": round(loss, 4),
                    "seconds": round(self.seconds),
                }
            )
            self.stage, self.stage_step, self.accuracy = self.stage + 1, 0, 0.0

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".tmp")
        fields = ("seed", "stage", "stage_step", "step", "accuracy", "seconds", "history")
        state = {name: getattr(self, name) for name in fields}
        state["model"] = self.model.state_dict()
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save(state, temporary)
        temporary.replace(file)

    def load(self, file: Path) -> None:
        state = torch.load(file, weights_only=True)
        self.model.load_state_dict(state.pop("model"))
        for optimizer, its_state in zip(self.optimizers, state.pop("optimizers"), strict=True):
            optimizer.load_state_dict(its_state)
        for name, value in state.items():
            setattr(self, name, value)


def write_model(model: Any, out: Path) -> None:
    """The directory in Hugging Face's layout: tensors in bfloat16, computed with in float32."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    config = recall_config()
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": config["eos_token_id"]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    recall_tokenizer().save(str(out / "tokenizer.json"))


def train(training: Training, *, minutes: float, checkpoint: Path) -> None:
    """Train to the end, or for some minutes; saves every two minutes and whenever it stops."""
    stop = time.monotonic() + 60 * minutes
    saved = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(STAGES))
        try:
            while not training.done and time.monotonic() < stop:
                stage = training.stage
                loss = training.advance()
                progress.update(
                    task,
                    completed=training.stage,
                    description=f"step {training.step}, stage {stage + 1}: "
                    f"{STAGES[stage].facts} facts, {training.accuracy:.3f} right, loss {loss:.3f}",
                )
                if training.stage != stage:
                    progress.console.print(json.dumps(training.history[-1]))
                if time.monotonic() - saved > 120:
                    training.save(checkpoint)
                    saved = time.monotonic()
        finally:
            training.save(checkpoint)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="of the training")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop and save after")
    parser.add_argument("--threads", type=thread_count, default=2, help="of torch")
    parser.add_argument("--seed", type=count, default=SEED)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    training = Training(options.seed)
    if options.resume:
        if not options.checkpoint.is_file():
            parser.error(f"--resume: there is no {options.checkpoint}; start without --resume")
        training.load(options.checkpoint)
    try:
        train(training, minutes=options.minutes, checkpoint=options.checkpoint)
    except KeyboardInterrupt:
        print(f"stopped at step {training.step}: --resume goes on", file=sys.stderr)
        return 130
    write_model(training.model, options.out)
    size = (options.out / "model.safetensors").stat().st_size
    state = "trained" if training.done else f"stopped in stage {training.stage + 1}"
    print(f"{options.out}: {size:,} bytes, {state} after {training.seconds / 60:.0f} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
