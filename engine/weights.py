"""Tensor names and shapes of a Qwen3.5 text model, and the reader that brings them in.

Names are canonical: without the `model.` or `model.language_model.` prefix of the files, for
example `layers.0.linear_attn.in_proj_qkv.weight`. The vision tower is not read, the draft head
(`mtp.*`) only if asked for. Everything is checked from the headers first; then one tensor at a time
is read into memory of its own, so loading needs the finished model plus one tensor.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.model_config import ModelConfig
from engine.weight_files import (
    INDEX_NAME,
    StoredTensor,
    first_few,
    read_header,
    read_index,
    weight_files,
)

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_PREFIX = re.compile(r"^model\.(language_model\.)?")
_IGNORED = re.compile(r"^(model\.)?visual\.")
_DRAFT = re.compile(r"^mtp\.")


def expected_tensors(config: ModelConfig, *, draft: bool = False) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the model, by canonical name, in the order the layers run.

    draft: those of the draft head as well.
    """
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, hidden)}
    for i, layer_type in enumerate(config.layer_types):
        shapes |= {f"layers.{i}.{name}": s for name, s in _layer(config, layer_type).items()}
    shapes["norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    if draft:
        layer = _layer(config, "full_attention")
        shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            shapes[f"mtp.{norm}.weight"] = (hidden,)
        shapes |= {f"mtp.layers.0.{name}": shape for name, shape in layer.items()}
    return shapes


def _layer(config: ModelConfig, layer_type: str) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    linear = layer_type == "linear_attention"
    mixer = _linear_attention(config) if linear else _full_attention(config)
    return {
        "input_layernorm.weight": (hidden,),
        **mixer,
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (config.intermediate_size, hidden),
        "mlp.up_proj.weight": (config.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, config.intermediate_size),
    }


def _linear_attention(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, num_heads = config.hidden_size, config.linear_num_value_heads
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj_qkv.weight": (config.conv_channels, hidden),  # rows q, k, v
        "in_proj_z.weight": (config.value_channels, hidden),
        "in_proj_b.weight": (num_heads, hidden),
        "in_proj_a.weight": (num_heads, hidden),
        "conv1d.weight": (config.conv_channels, 1, config.linear_conv_kernel_dim),
        "A_log": (num_heads,),
        "dt_bias": (num_heads,),
        "norm.weight": (config.linear_value_head_dim,),
        "out_proj.weight": (hidden, config.value_channels),
    }
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def _full_attention(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = config.hidden_size, config.head_dim
    query_rows = config.num_attention_heads * head_dim
    kv_rows = config.num_key_value_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (2 * query_rows, hidden),  # per head: query rows, then gate rows
        "k_proj.weight": (kv_rows, hidden),
        "v_proj.weight": (kv_rows, hidden),
        "o_proj.weight": (hidden, query_rows),
        "q_norm.weight": (head_dim,),
        "k_norm.weight": (head_dim,),
    }
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


@dataclass(frozen=True)
class WeightsPlan:
    """What a directory holds for one model, checked against its headers.

    `tensors` maps canonical names to places, in reading order: file by file, and within a
    file layer by layer. `num_ignored` counts tensors that are there and not read.
    """

    tensors: dict[str, StoredTensor]
    num_ignored: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors that will be read."""
        return sum(tensor.end - tensor.start for tensor in self.tensors.values())


def plan_weights(path: str | Path, config: ModelConfig, *, draft: bool = False) -> WeightsPlan:
    """Check every header of a model directory against the config, and say what to read.

    Raises ValueError for files that are missing or corrupt and for tensors that are missing,
    unexpected, there twice, or of another shape or dtype.
    """
    directory = Path(path)
    shapes = expected_tensors(config, draft=draft)
    found: dict[str, StoredTensor] = {}
    num_ignored = 0
    for stored in _stored_tensors(directory):
        name = _PREFIX.sub("", stored.name)
        tied_head = name == "lm_head.weight" and config.tie_word_embeddings
        unasked = not draft and _DRAFT.match(stored.name)
        if tied_head or unasked or _IGNORED.match(stored.name):
            num_ignored += 1
            continue
        if name in found:
            other = found[name]
            raise ValueError(
                f"{directory}: duplicate tensor {name}: {other.name} in {other.file.name} and "
                f"{stored.name} in {stored.file.name}"
            )
        found[name] = stored
    if draft and not any(_DRAFT.match(name) for name in found):
        raise ValueError(
            f"{directory}: no mtp.* tensors, so there is nothing to draft with; "
            "use num_speculative_tokens=0"
        )
    _check(directory, shapes, found)
    order = {name: i for i, name in enumerate(shapes)}
    first_of_file: dict[Path, int] = {}
    for name, stored in found.items():
        first = first_of_file.get(stored.file, order[name])
        first_of_file[stored.file] = min(first, order[name])
    names = sorted(found, key=lambda name: (first_of_file[found[name].file], order[name]))
    return WeightsPlan({name: found[name] for name in names}, num_ignored)


def read_weights(
    path: str | Path, config: ModelConfig, *, draft: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (canonical name, CPU tensor in the file's own dtype), after checking all of them.

    The checks run in this call, not at the first `next`; errors are those of `plan_weights`. Each
    tensor owns its memory: nothing keeps it, or a file, alive but the caller.
    """
    plan = plan_weights(path, config, draft=draft)
    return ((name, _read_tensor(stored)) for name, stored in plan.tensors.items())


def _read_tensor(stored: StoredTensor) -> torch.Tensor:
    data = torch.empty(stored.end - stored.start, dtype=torch.uint8)
    with stored.file.open("rb") as stream:
        stream.seek(stored.start)
        num_read = stream.readinto(data.numpy().data)
    if num_read != data.numel():
        raise ValueError(
            f"{stored.file}: truncated while reading {stored.name}: "
            f"{num_read} bytes, expected {data.numel()}"
        )
    return data.view(DTYPES[stored.dtype]).view(stored.shape)


def _stored_tensors(directory: Path) -> Iterator[StoredTensor]:
    """All tensors of all shards, after checking that index and shards agree."""
    files = weight_files(directory)
    if not files:
        raise ValueError(
            f"{directory}: no weights; expected model.safetensors or {INDEX_NAME} with its shards"
        )
    index = read_index(directory) or {}
    headers = {file.name: read_header(file) for file in files}
    lacking = [
        f"{name} (in {shard})" for name, shard in index.items() if name not in headers[shard]
    ]
    if lacking:
        raise ValueError(
            f"{directory / INDEX_NAME}: shards lack {first_few(lacking, 'tensors it names')}"
        )
    for header in headers.values():
        yield from header.values()


def _check(
    directory: Path, shapes: dict[str, tuple[int, ...]], found: dict[str, StoredTensor]
) -> None:
    """Raise one ValueError that lists everything wrong with names, shapes and dtypes."""
    missing = [name for name in shapes if name not in found]
    unexpected = [stored.name for name, stored in found.items() if name not in shapes]
    known = [(name, stored) for name, stored in found.items() if name in shapes]
    wrong_shapes = [
        f"{name} has {list(stored.shape)}, expected {list(shapes[name])}"
        for name, stored in known
        if stored.shape != shapes[name]
    ]
    wrong_dtypes = [f"{name} has {s.dtype}" for name, s in known if s.dtype not in DTYPES]
    problems = []
    if missing:
        problems.append(f"missing {first_few(missing, 'tensors')}")
    if unexpected:
        problems.append(f"unexpected {first_few(unexpected, 'tensors')}")
    if wrong_shapes:
        problems.append(first_few(wrong_shapes, "wrong shapes"))
    if wrong_dtypes:
        accepted = ", ".join(DTYPES)
        problems.append(f"{first_few(wrong_dtypes, 'wrong dtypes')}; accepted: {accepted}")
    if problems:
        raise ValueError(f"{directory}: {'; '.join(problems)}")
