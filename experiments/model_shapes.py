"""Which shapes of Qwen3.5 can be made with random weights, and what their config files say."""

from typing import Any

FIRST_SPECIAL_ID = 256  # after one token for each byte
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT_ID = FIRST_SPECIAL_ID
MIN_VOCAB_SIZE = FIRST_SPECIAL_ID + len(SPECIAL_TOKENS)
PUBLISHED_VOCAB_SIZE = 248_320

_PUBLISHED: dict[str, Any] = {
    "vocab_size": PUBLISHED_VOCAB_SIZE,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262_144,
    "dtype": "bfloat16",
}


def _published(
    hidden: int, layers: int, value_heads: int, heads: int, kv_heads: int, mlp: int, *, tied: bool
) -> dict[str, Any]:
    return _PUBLISHED | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "linear_num_value_heads": value_heads,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "tie_word_embeddings": tied,
    }


_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "dtype": "float32",
}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "demo": _TINY
    | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "max_position_embeddings": 32_768,
    },
    "0.8b": _published(1024, 24, 16, 8, 2, 3584, tied=True),
    "2b": _published(2048, 24, 16, 8, 2, 6144, tied=True),
    "4b": _published(2560, 32, 32, 16, 4, 9216, tied=True),
    "9b": _published(4096, 32, 32, 16, 4, 12_288, tied=False),
}


def hf_config(
    like: str,
    *,
    vocab: int | None,
    layers: int | None,
    dtype: str | None,
    overrides: dict[str, Any],
) -> dict[str, Any]:
    """The `config.json` of a shape, with what the caller sets itself on top.

    Raises ValueError for an unknown shape, a field that is in no config, a vocabulary too small for
    the byte tokenizer, or no layers.
    """
    if like not in SHAPES:
        raise ValueError(f"--like is {like!r}; expected one of {', '.join(SHAPES)}")
    shape = dict(SHAPES[like])
    chosen = {"vocab_size": vocab, "num_hidden_layers": layers, "dtype": dtype}
    shape |= {field: value for field, value in chosen.items() if value is not None}
    unknown = sorted(set(overrides) - set(_with_constants(shape)))
    if unknown:
        raise ValueError(f"overrides name {', '.join(unknown)}; expected fields of config.json")
    config = _with_constants(shape | overrides)
    if config["vocab_size"] < MIN_VOCAB_SIZE:
        raise ValueError(
            f"--vocab is {config['vocab_size']}; expected at least {MIN_VOCAB_SIZE}: "
            f"256 bytes and {len(SPECIAL_TOKENS)} special tokens"
        )
    if config["num_hidden_layers"] < 1:
        raise ValueError(f"--layers is {config['num_hidden_layers']}; expected at least 1")
    return config


def _with_constants(shape: dict[str, Any]) -> dict[str, Any]:
    """Add what all shapes share, and the layer pattern: every fourth layer is full attention."""
    constants = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "layer_types": [
            "linear_attention" if (i + 1) % 4 else "full_attention"
            for i in range(shape["num_hidden_layers"])
        ],
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_section": mrope_section(shape["head_dim"] // 4),
            "mrope_interleaved": True,
        },
        "eos_token_id": END_OF_TEXT_ID,
        "bos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
    }
    return constants | shape


def mrope_section(rotary_dim: int) -> list[int]:
    """Frequencies of each of the three position axes; [11, 11, 10] for the published 64."""
    num_frequencies = rotary_dim // 2
    return [(num_frequencies + 2 - axis) // 3 for axis in range(3)]
