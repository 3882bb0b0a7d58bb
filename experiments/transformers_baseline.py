"""What does the same model cost in transformers? Its plain torch path, on the same directory.

`fla` and `causal_conv1d` are kept from it: their kernels need a GPU, and transformers would take
them for CPU tensors too. It chooses when it is first imported, so this must come before that.
"""

import copy
import importlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import torch

_GPU_PACKAGES = ("fla", "causal_conv1d")


def transformers_on_cpu() -> Any:
    """The package, on its plain torch path. RuntimeError if `fla` was imported before."""
    for package in _GPU_PACKAGES:
        if sys.modules.setdefault(package, None) is not None:
            raise RuntimeError(f"{package} is imported already: run this in a fresh process")
    return importlib.import_module("transformers")


class TransformersBaseline:
    """transformers' Qwen3.5 in bfloat16, on the CPU. RuntimeError if `fla` was imported before."""

    def __init__(self, model_dir: Path) -> None:
        auto = transformers_on_cpu().Qwen3_5ForCausalLM
        self.model = auto.from_pretrained(model_dir, dtype=torch.bfloat16).eval()

    @property
    def description(self) -> str:
        version = importlib.metadata.version("transformers")
        return f"transformers {version}, pure torch path (no {', no '.join(_GPU_PACKAGES)})"

    @torch.inference_mode()
    def forward(self, prompt: list[int]) -> torch.Tensor:
        """Logits of the last token, nothing kept."""
        return self.model(torch.tensor([prompt]), logits_to_keep=1).logits

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> Any:
        """The cache after the prompt."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        self.model(torch.tensor([prompt]), cache=cache, use_cache=True, logits_to_keep=1)
        return cache

    @torch.inference_mode()
    def resume(self, cache: Any, suffix: list[int]) -> torch.Tensor:
        """Logits after `suffix`, on a copy of the cache: the hand-made way to share a prefix."""
        mine = copy.deepcopy(cache)
        ids = torch.tensor([suffix])
        return self.model(ids, cache=mine, use_cache=True, logits_to_keep=1).logits

    @torch.inference_mode()
    def decode(self, cache: Any, num_tokens: int) -> None:
        """That many greedy tokens, one by one; they are added to the cache."""
        token = torch.tensor([[1]])
        for _ in range(num_tokens):
            logits = self.model(token, cache=cache, use_cache=True).logits
            token = logits[:, -1:].argmax(-1)
