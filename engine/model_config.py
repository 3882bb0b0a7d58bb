"""The shape of one Qwen3.5 text model, read from a Hugging Face directory.

`ModelConfig` holds every field the engine needs and checks the rules between them, whoever builds
it. `ModelConfig.from_directory` takes them from the files of a directory (`hf_config` knows where
each one sits). Whatever is missing, wrong or not supported is a ValueError that names the file, the
field, the value and what is accepted.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import xxhash

from engine.hf_config import read_eos_token_ids, read_text_fields
from engine.weight_files import weights_digest
from kernels import KERNEL_CHUNK

LAYER_TYPES = ("linear_attention", "full_attention")
WEIGHTS_DTYPES = ("float32", "bfloat16", "float16")

MAX_POSITIONS = 1 << 24
"""The rotary table has a row for each position."""

_SIZES = (
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
    "max_position_embeddings",
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and rules of a dense Qwen3.5 text decoder.

    `rotary_dim` is the leading part of `head_dim` that RoPE turns. `weights_dtype` is what the
    files say about themselves, or None. `fingerprint` identifies shape and weights (see
    `from_directory`). Raises ValueError where a value has the wrong type or breaks a rule.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()
    weights_dtype: str | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        for field in _SIZES:
            value = getattr(self, field)
            _require(_is_int(value) and value > 0, field, value, "a positive integer")
        accepted = f"at most {MAX_POSITIONS}"
        positions = self.max_position_embeddings
        _require(positions <= MAX_POSITIONS, "max_position_embeddings", positions, accepted)
        for field in ("rms_norm_eps", "rope_theta"):
            _require_positive_number(field, getattr(self, field))
        _require(
            isinstance(self.tie_word_embeddings, bool),
            "tie_word_embeddings",
            self.tie_word_embeddings,
            "true or false",
        )
        _require(
            self.weights_dtype in (None, *WEIGHTS_DTYPES),
            "dtype",
            self.weights_dtype,
            f"one of {', '.join(WEIGHTS_DTYPES)}",
        )
        self._check_layer_types()
        self._check_heads()
        for token_id in self.eos_token_ids:
            in_vocabulary = _is_int(token_id) and 0 <= token_id < self.vocab_size
            accepted = f"an integer in [0, {self.vocab_size}), the vocabulary"
            _require(in_vocabulary, "eos_token_id", token_id, accepted)

    def _check_layer_types(self) -> None:
        for i, layer_type in enumerate(self.layer_types):
            accepted = f"one of {', '.join(LAYER_TYPES)}"
            _require(layer_type in LAYER_TYPES, f"layer_types[{i}]", layer_type, accepted)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries; "
                f"expected num_hidden_layers = {self.num_hidden_layers}"
            )

    def _check_heads(self) -> None:
        for many, few in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            divisor = getattr(self, few)
            value = getattr(self, many)
            _require(value % divisor == 0, many, value, f"a multiple of {few} = {divisor}")
        width = self.linear_conv_kernel_dim
        accepted = f"2 to {KERNEL_CHUNK}, the kernel chunk"
        _require(2 <= width <= KERNEL_CHUNK, "linear_conv_kernel_dim", width, accepted)
        _require(
            _is_int(self.rotary_dim)
            and 0 < self.rotary_dim <= self.head_dim
            and self.rotary_dim % 2 == 0,
            "rotary_dim (head_dim * partial_rotary_factor)",
            self.rotary_dim,
            f"an even number in [2, head_dim = {self.head_dim}]",
        )

    @property
    def num_linear_layers(self) -> int:
        """Layers that keep a recurrent state."""
        return self.layer_types.count("linear_attention")

    @property
    def num_full_layers(self) -> int:
        """Layers that keep K/V rows."""
        return self.layer_types.count("full_attention")

    @property
    def key_channels(self) -> int:
        """Rows of all q heads (or of all k heads) of one GDN layer: nk * K."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_channels(self) -> int:
        """Rows of all value heads of one GDN layer: nv * V."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels C of the short convolution over q, k and v together: 2 * nk * K + nv * V."""
        return 2 * self.key_channels + self.value_channels

    @property
    def recurrent_state_bytes(self) -> int:
        """Bytes of the float32 recurrent states [L, HV, V, K] of one sequence."""
        return self.num_linear_layers * self.value_channels * self.linear_key_head_dim * 4

    def conv_state_bytes(self, itemsize: int) -> int:
        """Bytes of the conv windows [L, W-1, C] of one sequence, at `itemsize` bytes an element."""
        columns = self.linear_conv_kernel_dim - 1
        return self.num_linear_layers * columns * self.conv_channels * itemsize

    def kv_bytes_per_token(self, itemsize: int, *, draft: bool = False) -> int:
        """Bytes of K and V of one token over all full-attention layers, the draft head's too."""
        layers = self.num_full_layers + draft
        return layers * 2 * self.num_key_value_heads * self.head_dim * itemsize

    @property
    def num_multiplied_weights(self) -> int:
        """Weights that every token of a prefill is multiplied with: all matrices and convolutions.

        The output head is not among them (of a prompt only the last token needs it), nor are
        embeddings and norms.
        """
        attention = self.num_attention_heads * self.head_dim
        kv = self.num_key_value_heads * self.head_dim
        full = self.hidden_size * (3 * attention + 2 * kv)  # q, its gate and o; k and v
        values = self.value_channels
        columns = self.conv_channels + 2 * values + 2 * self.linear_num_value_heads
        linear = self.hidden_size * columns + self.conv_channels * self.linear_conv_kernel_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        layers = self.num_linear_layers * linear + self.num_full_layers * full
        return layers + self.num_hidden_layers * mlp

    def prefill_flops(self, start: int, end: int) -> float:
        """Of the tokens [start, end) of one prompt, those before them being cached.

        Two a token and weight, and four a pair of tokens that attend and channel of the queries
        (scores and values); a token attends to those before it and itself. What the delta rule
        does besides its projections is left out: a percent.
        """
        pairs = (end * end - start * start) / 2
        channels = self.num_full_layers * self.num_attention_heads * self.head_dim
        return 2.0 * self.num_multiplied_weights * (end - start) + 4.0 * channels * pairs

    @classmethod
    def from_directory(cls, path: str | Path) -> "ModelConfig":
        """Read a model directory.

        The fingerprint is an xxh3_128 of these fields and of `weights_digest`: two models of one
        shape with other weights differ. A directory without weights files has a config alone.
        Raises ValueError for everything that is missing, wrong or not supported.
        """
        directory = Path(path)
        fields, file = read_text_fields(directory)
        with _named(file):
            config = cls(**fields)
        eos_token_ids, file = read_eos_token_ids(directory)
        with _named(file):
            config = replace(config, eos_token_ids=eos_token_ids)
        return replace(config, fingerprint=_fingerprint(config, directory))


def _fingerprint(config: ModelConfig, directory: Path) -> str:
    canonical = json.dumps(asdict(config), sort_keys=True) + weights_digest(directory)
    return xxhash.xxh3_128_hexdigest(canonical.encode())


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(ok: bool, field: str, value: object, accepted: str) -> None:
    if not ok:
        raise ValueError(f"{field} is {value!r}; expected {accepted}")


def _require_positive_number(field: str, value: object) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool)
    ok = ok and 0 < value <= sys.float_info.max  # type: ignore[operator]
    _require(ok, field, value, "a positive number")


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Put the file's name before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
