"""Reading config.json: what is accepted, what is computed, and what each refusal says."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from cache.eviction import prefill_flops
from engine.model_config import ModelConfig
from experiments.make_model import make_model
from experiments.model_shapes import hf_config

TEXT = {
    "model_type": "qwen3_5_text",
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
    "tie_word_embeddings": True,
    "max_position_embeddings": 1234,
    "eos_token_id": 7,
    "dtype": "bfloat16",
}
EXPECTED = ModelConfig(
    vocab_size=300,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=4,
    layer_types=("linear_attention",) * 3 + ("full_attention",),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=8,
    linear_value_head_dim=10,
    linear_conv_kernel_dim=4,
    rms_norm_eps=1e-5,
    rope_theta=1e7,
    rotary_dim=8,
    tie_word_embeddings=True,
    max_position_embeddings=1234,
    eos_token_ids=(7,),
    weights_dtype="bfloat16",
)
ABSENT = object()


def changed(config, changes):
    """The config with some fields replaced, or dropped where the value is ABSENT."""
    return {k: v for k, v in (config | changes).items() if v is not ABSENT}


def read(directory, config, generation=None):
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return replace(ModelConfig.from_directory(directory), fingerprint="")


def wrapper(text, **outer):
    return {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 2}, **outer}


def test_a_text_config_is_read_field_by_field(tmp_path):
    assert read(tmp_path, TEXT) == EXPECTED


def test_the_wrapper_gives_the_same_config_as_its_text_config(tmp_path):
    assert read(tmp_path, wrapper(TEXT)) == EXPECTED


def test_a_nested_text_config_needs_no_model_type_of_its_own(tmp_path):
    assert read(tmp_path, wrapper(changed(TEXT, {"model_type": ABSENT}))) == EXPECTED


@pytest.mark.parametrize("path_type", [str, lambda path: path])
def test_the_path_may_be_a_string(tmp_path, path_type):
    read(tmp_path, TEXT)
    assert ModelConfig.from_directory(path_type(tmp_path)).hidden_size == 48


def test_older_top_level_fields_are_read(tmp_path):
    older = {
        "rope_parameters": ABSENT,
        "rope_scaling": None,
        "rope_theta": 5000,
        "partial_rotary_factor": 0.25,
        "dtype": ABSENT,
        "torch_dtype": "float16",
    }
    expected = replace(EXPECTED, rope_theta=5000, rotary_dim=4, weights_dtype="float16")
    assert read(tmp_path, changed(TEXT, older)) == expected


def test_rope_parameters_win_over_older_fields(tmp_path):
    older = {"rope_theta": 5000, "partial_rotary_factor": 0.25}
    assert read(tmp_path, changed(TEXT, older)) == EXPECTED


def test_a_quarter_of_each_head_turns_where_no_factor_is_given(tmp_path):
    rope = {"rope_parameters": {"rope_theta": 1e7}}
    assert read(tmp_path, changed(TEXT, rope)).rotary_dim == 4


def test_layer_types_follow_from_the_interval(tmp_path):
    interval = {"layer_types": ABSENT, "full_attention_interval": 3, "num_hidden_layers": 7}
    config = read(tmp_path, changed(TEXT, interval))
    linear, full = "linear_attention", "full_attention"
    assert config.layer_types == (linear, linear, full, linear, linear, full, linear)


def test_written_layer_types_win_over_the_interval(tmp_path):
    assert read(tmp_path, changed(TEXT, {"full_attention_interval": 2})) == EXPECTED


@pytest.mark.parametrize("inner", [True, False, ABSENT])
@pytest.mark.parametrize("outer", [True, False, ABSENT])
def test_tied_embeddings_may_be_said_at_either_nesting(tmp_path, outer, inner):
    text = changed(TEXT, {"tie_word_embeddings": inner})
    config = changed(wrapper(text), {"tie_word_embeddings": outer})
    if ABSENT not in (outer, inner) and outer != inner:
        with pytest.raises(ValueError, match=r"config\.json: text_config\.tie_word_embeddings is"):
            read(tmp_path, config)
    else:
        assert read(tmp_path, config).tie_word_embeddings == (True in (outer, inner))


@pytest.mark.parametrize(
    ("text_eos", "outer_eos", "generation", "expected"),
    [
        (7, 8, {"eos_token_id": [9, 10]}, (9, 10)),
        (7, 8, {"eos_token_id": 9}, (9,)),
        (7, 8, {"temperature": 1.0}, (7,)),
        ([7, 6], 8, None, (7, 6)),
        (None, 8, None, (8,)),
        (ABSENT, ABSENT, None, ()),
        (0, 8, None, (0,)),
    ],
)
def test_eos_is_taken_from_the_most_specific_file(
    tmp_path, text_eos, outer_eos, generation, expected
):
    text = changed(TEXT, {"eos_token_id": text_eos})
    config = changed(wrapper(text), {"eos_token_id": outer_eos})
    assert read(tmp_path, config, generation).eos_token_ids == expected


def test_dtype_may_be_absent_or_sit_in_the_wrapper(tmp_path):
    text = changed(TEXT, {"dtype": ABSENT})
    assert read(tmp_path, text).weights_dtype is None
    assert read(tmp_path, wrapper(text, torch_dtype="float32")).weights_dtype == "float32"


def test_derived_sizes_follow_their_formulas():
    assert EXPECTED.num_linear_layers == 3
    assert EXPECTED.num_full_layers == 1
    assert EXPECTED.key_channels == 16
    assert EXPECTED.value_channels == 60
    assert EXPECTED.conv_channels == 92
    assert EXPECTED.recurrent_state_bytes == 3 * 6 * 8 * 10 * 4
    assert EXPECTED.conv_state_bytes(2) == 3 * 3 * 92 * 2
    assert EXPECTED.kv_bytes_per_token(2) == 1 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("like", "checkpoint_mib", "kv_bytes"),
    [("0.8b", 18.63, 12288), ("2b", 18.63, 12288), ("4b", 49.12, 32768), ("9b", 49.12, 32768)],
)
def test_published_shapes_have_their_published_sizes(tmp_path, like, checkpoint_mib, kv_bytes):
    published = hf_config(like, vocab=None, layers=None, dtype=None, overrides={})
    config = read(tmp_path, published)
    checkpoint = config.recurrent_state_bytes + config.conv_state_bytes(2)
    assert round(checkpoint / 2**20, 2) == checkpoint_mib
    assert config.kv_bytes_per_token(2) == kv_bytes
    assert (config.rotary_dim, config.rope_theta) == (64, 1e7)


def test_the_cost_of_a_prefill_counts_weights_and_pairs():
    """By hand: 3 linear layers, 1 of attention, hidden 48, MLP 96."""
    linear = 48 * (92 + 60 + 60 + 6 + 6) + 92 * 4  # qkv, z, o, a and b; the convolution
    full = 48 * (2 * 64 + 32 + 32 + 64)  # q and gate, k, v, o
    weights = 3 * linear + full + 4 * 3 * 48 * 96
    assert EXPECTED.num_multiplied_weights == weights
    assert EXPECTED.prefill_flops(0, 2) == 2 * weights * 2 + 4 * 64 * 2
    assert EXPECTED.prefill_flops(2, 6) == 2 * weights * 4 + 4 * 64 * (18 - 2)
    assert EXPECTED.prefill_flops(0, 2) + EXPECTED.prefill_flops(2, 6) == (
        EXPECTED.prefill_flops(0, 6)
    )


def test_a_prefill_of_the_9b_shape_costs_what_the_replays_assume(tmp_path):
    config = read(tmp_path, hf_config("9b", vocab=None, layers=None, dtype=None, overrides={}))
    for start, end in ((0, 1), (0, 1000), (90_000, 100_000)):
        assert config.prefill_flops(start, end) == pytest.approx(
            prefill_flops(start, end), rel=0.011
        )


SIZES = [
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
]


@pytest.mark.parametrize("field", [*SIZES, "rms_norm_eps"])
def test_a_missing_field_is_named(tmp_path, field):
    with pytest.raises(ValueError, match=rf"config\.json: missing {field}$"):
        read(tmp_path, changed(TEXT, {field: ABSENT}))


@pytest.mark.parametrize("value", [0, -1, 4.0, "4", None, True, [4]])
@pytest.mark.parametrize("field", SIZES)
def test_a_size_that_is_no_positive_integer_is_refused(tmp_path, field, value):
    with pytest.raises(ValueError) as error:
        read(tmp_path, changed(TEXT, {field: value}))
    message = str(error.value)
    assert f"config.json: {field} is {value!r}; expected a positive integer" in message


@pytest.mark.parametrize(
    "value", [0, -1e-6, "1e-6", None, True, float("nan"), float("inf"), 10**400]
)
@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta"])
def test_a_rate_that_is_no_positive_number_is_refused(tmp_path, field, value):
    rope = {"rope_parameters": {"rope_theta": value}} if field == "rope_theta" else {field: value}
    with pytest.raises(ValueError) as error:
        read(tmp_path, changed(TEXT, rope))
    assert f"config.json: {field} is {value!r}; expected a positive number" in str(error.value)


def test_more_positions_than_the_rotary_table_may_hold_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"max_position_embeddings is 10000000000000; expected at"):
        read(tmp_path, changed(TEXT, {"max_position_embeddings": 10**13}))


UNSUPPORTED = [
    ({"model_type": "llama"}, "model_type is 'llama'; expected 'qwen3_5_text' or 'qwen3_5'"),
    ({"model_type": ABSENT}, "model_type is None; expected 'qwen3_5_text' or 'qwen3_5'"),
    ({"model_type": 3}, "model_type is 3; expected 'qwen3_5_text' or 'qwen3_5'"),
    ({"model_type": "qwen3_5_moe"}, "model_type is 'qwen3_5_moe'; expected a dense model"),
    ({"model_type": "qwen3_5_moe_text"}, "'qwen3_5_moe_text'; expected a dense model"),
    ({"num_experts": 256}, "num_experts is 256; expected null or 0"),
    ({"model_type": "qwen3_5"}, "text_config is None; expected a JSON object"),
    (
        {"model_type": "qwen3_5", "text_config": {"model_type": "qwen2"}},
        "text_config.model_type is 'qwen2'; expected 'qwen3_5_text'",
    ),
    (
        {"model_type": "qwen3_5", "text_config": TEXT, "quantization_config": {"bits": 4}},
        "quantization_config is {'bits': 4}; expected null",
    ),
    ({"quantization_config": {"bits": 8}}, "quantization_config is {'bits': 8}; expected null"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected \"silu\""),
    ({"attention_bias": True}, "attention_bias is True; expected false"),
    ({"attention_bias": 0}, "attention_bias is 0; expected false"),
    ({"attn_output_gate": False}, "attn_output_gate is False; expected true"),
    ({"dtype": "float64"}, "dtype is 'float64'; expected one of float32, bfloat16, float16"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; expected true or false"),
    (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}},
        "rope_parameters.rope_type is 'yarn'; expected 'default'",
    ),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.type is 'linear'; expected 'default'"),
    ({"rope_scaling": 2.0}, "rope_scaling is 2.0; expected a JSON object"),
    ({"rope_parameters": [1]}, "rope_parameters is [1]; expected a JSON object"),
    ({"rope_parameters": {}}, "missing rope_parameters.rope_theta (or rope_theta)"),
    (
        {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 1.5}},
        "partial_rotary_factor is 1.5; expected a number in (0, 1]",
    ),
    (
        {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": "0.5"}},
        "partial_rotary_factor is '0.5'; expected a number in (0, 1]",
    ),
    ({"head_dim": 10}, "is 5; expected an even number in [2, head_dim = 10]"),
    ({"head_dim": 1}, "is 0; expected an even number in [2, head_dim = 1]"),
    (
        {"num_key_value_heads": 3},
        "num_attention_heads is 4; expected a multiple of num_key_value_heads = 3",
    ),
    (
        {"linear_num_value_heads": 3},
        "linear_num_value_heads is 3; expected a multiple of linear_num_key_heads = 2",
    ),
    ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; expected 2 to 64"),
    ({"linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim is 65; expected 2 to 64"),
    ({"num_hidden_layers": 5}, "layer_types has 4 entries; expected num_hidden_layers = 5"),
    ({"layer_types": "full_attention"}, "layer_types is 'full_attention'; expected a list"),
    (
        {"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]},
        "layer_types[3] is 'sliding_attention'; expected one of linear_attention, full_attention",
    ),
    ({"layer_types": ABSENT}, "missing layer_types (or full_attention_interval)"),
    (
        {"layer_types": ABSENT, "full_attention_interval": 0},
        "full_attention_interval is 0; expected a positive integer",
    ),
    ({"eos_token_id": "<|end|>"}, "eos_token_id is '<|end|>'; expected an integer or a list"),
    ({"eos_token_id": [1, None]}, "eos_token_id is [1, None]; expected an integer or a list"),
    ({"eos_token_id": [1, 300]}, "eos_token_id is 300; expected an integer in [0, 300)"),
    ({"eos_token_id": -1}, "eos_token_id is -1; expected an integer in [0, 300)"),
]


@pytest.mark.parametrize(("changes", "message"), UNSUPPORTED, ids=[m for _, m in UNSUPPORTED])
def test_what_is_not_supported_is_named_with_what_is(tmp_path, changes, message):
    with pytest.raises(ValueError) as error:
        read(tmp_path, changed(TEXT, changes))
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert message in str(error.value)


@pytest.mark.parametrize("eos", ["end", 300])
def test_a_wrong_eos_names_the_generation_config(tmp_path, eos):
    with pytest.raises(ValueError) as error:
        read(tmp_path, TEXT, {"eos_token_id": eos})
    expected = (
        f"{tmp_path / 'generation_config.json'}: eos_token_id is {eos!r}; expected an integer"
    )
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[1]", "holds a list; expected a JSON object"),
    ],
)
def test_a_file_that_is_no_json_object_is_named(tmp_path, name, content, message):
    (tmp_path / "config.json").write_text(json.dumps(TEXT))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        ModelConfig.from_directory(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / name}: {message}")


@pytest.mark.parametrize("name", ["empty", "absent"])
def test_a_directory_without_config_is_named(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=rf"{name}/config\.json: no such file"):
        ModelConfig.from_directory(tmp_path / name)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "a", like="tiny", seed=1)


def fingerprint(directory):
    return ModelConfig.from_directory(directory).fingerprint


def test_a_fingerprint_is_128_bits_and_the_same_for_a_copy(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    assert len(bytes.fromhex(fingerprint(model))) == 16
    assert fingerprint(copy) == fingerprint(model)


def test_another_seed_gives_another_fingerprint(model, tmp_path):
    other = make_model(tmp_path / "b", like="tiny", seed=2)
    assert fingerprint(other) != fingerprint(model)


def test_another_config_gives_another_fingerprint(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["rms_norm_eps"] *= 2
    (copy / "config.json").write_text(json.dumps(config))
    assert fingerprint(copy) != fingerprint(model)


def test_other_values_in_any_one_tensor_give_another_fingerprint(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    tensors = load_file(model / "model.safetensors")
    seen = {fingerprint(model)}
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor + 1}, copy / "model.safetensors")
        seen.add(fingerprint(copy))
    assert len(seen) == 1 + len(tensors)


def test_the_last_bytes_of_a_tensor_count(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    assert fingerprint(copy) != fingerprint(model)


def test_a_config_is_immutable_and_checks_itself_when_built_directly():
    with pytest.raises(AttributeError):
        EXPECTED.hidden_size = 1
    with pytest.raises(ValueError, match="hidden_size is 0; expected a positive integer"):
        replace(EXPECTED, hidden_size=0)
    with pytest.raises(ValueError, match=r"hidden_size is torch\.float32"):
        replace(EXPECTED, hidden_size=torch.float32)
