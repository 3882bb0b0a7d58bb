"""Where the fields of a model sit in the JSON files of a Hugging Face directory.

`config.json` is either the text config itself (`qwen3_5_text`) or the multimodal wrapper
(`qwen3_5`) with the text config under `text_config`. This module finds the fields in either,
refuses what the engine can't run, and leaves the rules between sizes to `ModelConfig`.
"""

import json
from pathlib import Path
from typing import Any

TEXT_MODEL_TYPE = "qwen3_5_text"
WRAPPER_MODEL_TYPE = "qwen3_5"

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "rms_norm_eps",
    "max_position_embeddings",
)
# Fields that may be absent and, where present, must hold one of these values.
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "quantization_config": (None,),
    "num_experts": (None, 0),
}
_DEFAULT_PARTIAL_ROTARY_FACTOR = 0.25


def read_text_fields(directory: Path) -> tuple[dict[str, Any], Path]:
    """The keyword arguments of `ModelConfig`, eos and fingerprint aside, and the file of them.

    Raises ValueError where the file or a field is missing, of the wrong kind or not supported.
    """
    raw, file = _read_config(directory)
    text = _text_config(raw, file)
    for source in (raw, text):
        for field, supported in _SUPPORTED.items():
            value = source.get(field, supported[0])
            if not any(value == v and type(value) is type(v) for v in supported):
                raise _unsupported(file, field, value, " or ".join(map(json.dumps, supported)))
    missing = [field for field in _REQUIRED if field not in text]
    if missing:
        raise ValueError(f"{file}: missing {', '.join(missing)}")
    fields = {field: text[field] for field in _REQUIRED}
    fields["layer_types"] = _layer_types(text, file)
    fields["rope_theta"], fields["rotary_dim"] = _rope(text, file)
    fields["tie_word_embeddings"] = _tie_word_embeddings(raw, text, file)
    fields["weights_dtype"] = next(
        (
            source[key]
            for source in (text, raw)
            for key in ("dtype", "torch_dtype")
            if source.get(key) is not None
        ),
        None,
    )
    return fields, file


def read_eos_token_ids(directory: Path) -> tuple[tuple[Any, ...], Path]:
    """Ids that end a text, and the file they are from.

    `generation_config.json` wins where it names any; then the text config, then the wrapper. No
    file need name one: the result is then empty. Raises ValueError for anything but an id or a
    list of ids.
    """
    raw, config_file = _read_config(directory)
    sources = [(_text_config(raw, config_file), config_file), (raw, config_file)]
    generation_file = directory / "generation_config.json"
    if generation_file.is_file():
        sources.insert(0, (_read_json(generation_file), generation_file))
    for source, file in sources:
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise _unsupported(file, "eos_token_id", value, "an integer or a list of integers")
        return tuple(ids), file
    return (), config_file


def _read_config(directory: Path) -> tuple[dict[str, Any], Path]:
    file = directory / "config.json"
    if not file.is_file():
        raise ValueError(f"{file}: no such file; expected a Hugging Face model directory")
    return _read_json(file), file


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_bytes())
    except ValueError as error:  # also bytes that are not UTF-8
        raise ValueError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: holds a {type(raw).__name__}; expected a JSON object")
    return raw


def _unsupported(file: Path, field: str, value: object, accepted: str) -> ValueError:
    return ValueError(f"{file}: {field} is {value!r}; expected {accepted}")


def _text_config(raw: dict[str, Any], file: Path) -> dict[str, Any]:
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and "moe" in model_type:
        accepted = "a dense model (mixture of experts is not supported)"
        raise _unsupported(file, "model_type", model_type, accepted)
    if model_type == TEXT_MODEL_TYPE:
        return raw
    if model_type != WRAPPER_MODEL_TYPE:
        accepted = f"{TEXT_MODEL_TYPE!r} or {WRAPPER_MODEL_TYPE!r}"
        raise _unsupported(file, "model_type", model_type, accepted)
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise _unsupported(file, "text_config", text, "a JSON object")
    inner_type = text.get("model_type", TEXT_MODEL_TYPE)
    if inner_type != TEXT_MODEL_TYPE:
        raise _unsupported(file, "text_config.model_type", inner_type, repr(TEXT_MODEL_TYPE))
    return text


def _layer_types(text: dict[str, Any], file: Path) -> tuple[Any, ...]:
    """`layer_types` as written, or else the pattern of `full_attention_interval`."""
    layer_types = text.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            raise _unsupported(file, "layer_types", layer_types, "a list of layer types")
        return tuple(layer_types)
    interval = text.get("full_attention_interval")
    if interval is None:
        raise ValueError(f"{file}: missing layer_types (or full_attention_interval)")
    for field, value in (
        ("full_attention_interval", interval),
        ("num_hidden_layers", text["num_hidden_layers"]),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise _unsupported(file, field, value, "a positive integer")
    return tuple(
        "linear_attention" if (i + 1) % interval else "full_attention"
        for i in range(text["num_hidden_layers"])
    )


def _rope(text: dict[str, Any], file: Path) -> tuple[Any, int]:
    """(rope_theta, rotary_dim), from `rope_parameters` or from the older top-level fields."""
    for field in ("rope_parameters", "rope_scaling"):
        rope = text.get(field)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise _unsupported(file, field, rope, "a JSON object")
        for key in ("rope_type", "type"):
            rope_type = rope.get(key, "default")
            if rope_type != "default":
                raise _unsupported(file, f"{field}.{key}", rope_type, "'default'")
    found = {**text, **(text.get("rope_parameters") or {})}
    if "rope_theta" not in found:
        raise ValueError(f"{file}: missing rope_parameters.rope_theta (or rope_theta)")
    factor = found.get("partial_rotary_factor", _DEFAULT_PARTIAL_ROTARY_FACTOR)
    number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not number or not 0 < factor <= 1:
        raise _unsupported(file, "partial_rotary_factor", factor, "a number in (0, 1]")
    head_dim = text["head_dim"]
    if not isinstance(head_dim, int) or isinstance(head_dim, bool):
        raise _unsupported(file, "head_dim", head_dim, "a positive integer")
    return found["rope_theta"], int(head_dim * factor)


def _tie_word_embeddings(raw: dict[str, Any], text: dict[str, Any], file: Path) -> Any:
    """The flag sits at either nesting; absent means untied, as in transformers."""
    outer, inner = raw.get("tie_word_embeddings"), text.get("tie_word_embeddings")
    if outer is not None and inner is not None and outer != inner:
        accepted = f"the same as in the wrapper: {outer!r}"
        raise _unsupported(file, "text_config.tie_word_embeddings", inner, accepted)
    return next((value for value in (inner, outer) if value is not None), False)
