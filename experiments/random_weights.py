"""Seeded random weights for a Qwen3.5 shape, streamed into safetensors files.

Linear layers are drawn with a spread of 1 / sqrt(fan in), so that deep models stay finite. Decays
are slow on many heads, so that a state of thousands of tokens ago still shows in the logits. A
tensor's values follow from seed, name and shape: not from shards, other tensors or layer count.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from engine.model_config import ModelConfig
from engine.weight_files import INDEX_NAME, ITEMSIZES
from engine.weights import DTYPES, expected_tensors

BLOCK_ELEMENTS = 1 << 20  # drawn and written at once; part of the recipe: it decides the values
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_ALWAYS_FLOAT32 = ("A_log", "linear_attn.norm.weight")


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor to be written: canonical name, safetensors dtype code, shape."""

    name: str
    code: str
    shape: tuple[int, ...]

    @property
    def file_name(self) -> str:
        """Its name in the files."""
        bare = self.name == "lm_head.weight" or self.name.startswith("mtp.")
        return self.name if bare else f"model.{self.name}"

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEMSIZES[self.code]


def plan_tensors(config: ModelConfig, dtype: str, *, draft: bool = False) -> list[PlannedTensor]:
    """All tensors of a model in layer order; decays and GDN norms are float32 in any dtype.

    draft: those of the draft head too.
    """
    return [
        PlannedTensor(name, "F32" if name.endswith(_ALWAYS_FLOAT32) else CODES[dtype], shape)
        for name, shape in expected_tensors(config, draft=draft).items()
    ]


def write_weights(
    directory: Path,
    plan: list[PlannedTensor],
    *,
    seed: int,
    max_shard_bytes: int,
    advance: Callable[[int], None],
) -> None:
    """Write one file, or shards and their index; `advance` hears the bytes of each block."""
    shards = split_shards(plan, max_shard_bytes)
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        count = len(shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        weight_map = {
            tensor.file_name: name
            for name, shard in zip(names, shards, strict=True)
            for tensor in shard
        }
        total = sum(tensor.num_bytes for tensor in plan)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    for name, shard in zip(names, shards, strict=True):
        _write_shard(directory / name, shard, seed, advance)


def split_shards(plan: list[PlannedTensor], max_shard_bytes: int) -> list[list[PlannedTensor]]:
    """Consecutive tensors, at most `max_shard_bytes` a shard; a larger tensor has its own."""
    shards: list[list[PlannedTensor]] = []
    room = 0
    for tensor in plan:
        if not shards or tensor.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    return shards


def draw(tensor: PlannedTensor, seed: int) -> Iterator[torch.Tensor]:
    """The tensor's values as flat float32 blocks of at most BLOCK_ELEMENTS, in row order."""
    key = xxhash.xxh64_intdigest(f"{seed}/{tensor.name}".encode()) >> 1
    generator = torch.Generator().manual_seed(key)
    for start in range(0, tensor.num_elements, BLOCK_ELEMENTS):
        size = min(BLOCK_ELEMENTS, tensor.num_elements - start)
        yield _draw_block(tensor, size, generator)


def _draw_block(tensor: PlannedTensor, size: int, generator: torch.Generator) -> torch.Tensor:
    name = tensor.name
    if name.endswith("A_log"):
        low, high = math.log(0.01), math.log(4.0)
        return torch.empty(size).uniform_(low, high, generator=generator)
    if name.endswith("dt_bias"):
        return torch.empty(size).uniform_(-6.0, 0.0, generator=generator)
    values = torch.randn(size, generator=generator)
    if name.endswith("linear_attn.norm.weight"):
        return values.mul_(0.1).add_(1.0)  # the one norm that multiplies by w, not by 1 + w
    if "norm" in name:
        return values.mul_(0.1)
    gain = 2.0 if name in ("embed_tokens.weight", "lm_head.weight") else 1.0
    return values.mul_(gain / math.sqrt(tensor.shape[-1]))


def _write_shard(
    file: Path, shard: list[PlannedTensor], seed: int, advance: Callable[[int], None]
) -> None:
    # Widest elements first: then every tensor starts at a multiple of its element size.
    tensors = sorted(shard, key=lambda tensor: -ITEMSIZES[tensor.code])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        entry = {"dtype": tensor.code, "shape": tensor.shape, "data_offsets": [start, end]}
        header[tensor.file_name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for block in draw(tensor, seed):
                data = block.to(DTYPES[tensor.code]).view(torch.uint8).numpy()
                stream.write(data.data)
                advance(data.nbytes)
