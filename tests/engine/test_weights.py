"""Reading safetensors directories: every layout that loads, and what each refusal says."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model_config import ModelConfig
from engine.weight_files import INDEX_NAME
from engine.weights import expected_tensors, plan_weights, read_weights
from experiments.make_model import make_model

SINGLE = "model.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A tiny tied model, its config, and its tensors by their names in the file."""
    directory = make_model(tmp_path_factory.mktemp("models") / "tiny", like="tiny")
    return directory, ModelConfig.from_directory(directory), load_file(directory / SINGLE)


@pytest.fixture
def config(source):
    return source[1]


@pytest.fixture
def tensors(source):
    return dict(source[2])


def save_sharded(directory, shards, index=None):
    """Write named shards and an index; by default the index says what the shards hold."""
    for name, shard in shards.items():
        save_file(shard, directory / name)
    if index is None:
        index = {tensor: name for name, shard in shards.items() for tensor in shard}
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def halves(tensors):
    """Two shards that interleave the layers: even and odd positions of the sorted names."""
    names = sorted(tensors)
    return {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in names[::2]},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[1::2]},
    }


def renamed(tensors, prefix):
    return {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}


def assert_reads(directory, config, tensors):
    """Everything that the model needs is read once, with the bits and dtype it was saved with."""
    pairs = list(read_weights(directory, config))
    read = dict(pairs)
    assert len(read) == len(pairs)
    assert read.keys() == expected_tensors(config).keys()
    for name, tensor in read.items():
        saved = tensors[name if name == "lm_head.weight" else f"model.{name}"]
        assert tensor.dtype == saved.dtype
        assert torch.equal(tensor, saved)


def refusal(directory, config):
    """The message of a refusal, which must come before anything is yielded."""
    with pytest.raises(ValueError) as error:
        read_weights(directory, config)
    return str(error.value)


def test_expected_tensors_are_the_published_names_and_shapes(config):
    config = replace(
        config,
        num_hidden_layers=2,
        layer_types=("linear_attention", "full_attention"),
        tie_word_embeddings=False,
        linear_value_head_dim=16,
    )
    mlp = {
        "mlp.gate_proj.weight": (256, 128),
        "mlp.up_proj.weight": (256, 128),
        "mlp.down_proj.weight": (128, 256),
        "input_layernorm.weight": (128,),
        "post_attention_layernorm.weight": (128,),
    }
    linear = mlp | {
        "linear_attn.in_proj_qkv.weight": (2 * 64 + 64, 128),
        "linear_attn.in_proj_z.weight": (64, 128),
        "linear_attn.in_proj_b.weight": (4, 128),
        "linear_attn.in_proj_a.weight": (4, 128),
        "linear_attn.conv1d.weight": (2 * 64 + 64, 1, 4),
        "linear_attn.A_log": (4,),
        "linear_attn.dt_bias": (4,),
        "linear_attn.norm.weight": (16,),
        "linear_attn.out_proj.weight": (128, 64),
    }
    full = mlp | {
        "self_attn.q_proj.weight": (256, 128),
        "self_attn.k_proj.weight": (64, 128),
        "self_attn.v_proj.weight": (64, 128),
        "self_attn.o_proj.weight": (128, 128),
        "self_attn.q_norm.weight": (32,),
        "self_attn.k_norm.weight": (32,),
    }
    assert expected_tensors(config) == {
        "embed_tokens.weight": (512, 128),
        **{f"layers.0.{name}": shape for name, shape in linear.items()},
        **{f"layers.1.{name}": shape for name, shape in full.items()},
        "norm.weight": (128,),
        "lm_head.weight": (512, 128),
    }


def test_a_single_file_is_read(source):
    assert_reads(*source)


def test_shards_are_read_through_the_index(tmp_path, config, tensors):
    save_sharded(tmp_path, halves(tensors))
    assert_reads(tmp_path, config, tensors)


def test_a_single_shard_with_an_odd_name_is_found_through_the_index(tmp_path, config, tensors):
    save_sharded(tmp_path, {"model.safetensors-00001-of-00001.safetensors": tensors})
    assert_reads(tmp_path, config, tensors)


def test_the_index_wins_over_a_stale_single_file(tmp_path, config, tensors):
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, tmp_path / SINGLE)
    save_sharded(tmp_path, halves(tensors))
    assert_reads(tmp_path, config, tensors)


@pytest.mark.parametrize("split", [False, True])
def test_shards_without_an_index_are_found_by_name(tmp_path, config, tensors, split):
    shards = halves(tensors) if split else {"model.safetensors-00001-of-00001.safetensors": tensors}
    save_sharded(tmp_path, shards)
    (tmp_path / INDEX_NAME).unlink()
    assert_reads(tmp_path, config, tensors)


def test_the_wrapper_prefix_is_removed(tmp_path, config, tensors):
    save_file(renamed(tensors, "model.language_model."), tmp_path / SINGLE)
    assert_reads(tmp_path, config, tensors)


def test_names_without_a_prefix_are_read(tmp_path, config, tensors):
    save_file(renamed(tensors, ""), tmp_path / SINGLE)
    assert_reads(tmp_path, config, tensors)


def test_vision_and_draft_tensors_are_counted_and_not_read(tmp_path, config, tensors):
    others = {
        "model.visual.blocks.0.attn.qkv.weight": torch.zeros(3, dtype=torch.int8),
        "visual.patch_embed.proj.bias": torch.zeros(1),
        "mtp.fc.weight": torch.zeros(2),
        "mtp.layers.0.input_layernorm.weight": torch.zeros(2),
    }
    save_file(tensors | others, tmp_path / SINGLE)
    assert_reads(tmp_path, config, tensors)
    assert plan_weights(tmp_path, config).num_ignored == 4


def test_an_untied_head_is_read(tmp_path, config, tensors):
    tensors["lm_head.weight"] = torch.randn(512, 128)
    save_file(tensors, tmp_path / SINGLE)
    assert_reads(tmp_path, replace(config, tie_word_embeddings=False), tensors)


def test_a_tied_head_that_is_there_is_ignored(tmp_path, config, tensors):
    save_file(tensors | {"lm_head.weight": torch.randn(512, 128)}, tmp_path / SINGLE)
    assert_reads(tmp_path, config, tensors)
    assert plan_weights(tmp_path, config).num_ignored == 1


def test_each_tensor_keeps_its_own_dtype(tmp_path, config, tensors):
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    mixed = {name: tensors[name].to(dtypes[i % 3]) for i, name in enumerate(sorted(tensors))}
    save_file(mixed, tmp_path / SINGLE)
    assert_reads(tmp_path, config, mixed)


def test_the_plan_knows_how_many_bytes_will_be_read(source):
    directory, config, _ = source
    num_elements = sum(math.prod(shape) for shape in expected_tensors(config).values())
    assert plan_weights(directory, config).num_bytes == 4 * num_elements


def test_tensors_come_file_by_file_and_within_a_file_layer_by_layer(tmp_path, config, tensors):
    shards = halves(tensors)
    save_sharded(tmp_path, shards)
    plan = plan_weights(tmp_path, config)
    assert [name for name, _ in read_weights(tmp_path, config)] == list(plan.tensors)
    order = list(expected_tensors(config))
    expected = []
    for name in sorted(shards, key=lambda name: "model.embed_tokens.weight" not in shards[name]):
        canonical = {tensor.removeprefix("model.") for tensor in shards[name]}
        expected += [tensor for tensor in order if tensor in canonical]
    assert list(plan.tensors) == expected


def test_a_tensor_outlives_its_file_and_may_be_written(tmp_path, source):
    directory = shutil.copytree(source[0], tmp_path / "copy")
    name, tensor = next(read_weights(directory, source[1]))
    saved = source[2][f"model.{name}"]
    (directory / SINGLE).write_bytes(b"")
    assert torch.equal(tensor, saved)
    assert torch.equal(tensor.add_(1), saved + 1)


PEAK = """
import sys
import torch
from engine.model_config import ModelConfig
from engine.weights import read_weights

def status(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) * 1024

config = ModelConfig.from_directory(sys.argv[1])
torch.empty(1).numpy()
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
before = status("VmRSS")
total = 0
for _, tensor in read_weights(sys.argv[1], config):
    total += tensor.sum().item()
    del tensor
print(status("VmHWM") - before)
"""


@pytest.mark.parametrize("max_shard_mb", [512, 20])
def test_reading_holds_one_tensor_in_memory_not_the_model(tmp_path, max_shard_mb):
    directory = make_model(
        tmp_path / "wide",
        like="tiny",
        overrides={"intermediate_size": 16384},
        max_shard_mb=max_shard_mb,
    )
    plan = plan_weights(directory, ModelConfig.from_directory(directory))
    largest = max(tensor.end - tensor.start for tensor in plan.tensors.values())
    assert plan.num_bytes > 100e6 and largest < 9e6
    command = [sys.executable, "-c", PEAK, str(directory)]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert peak < 5 * largest  # the allocator keeps some of what was freed


def test_missing_tensors_are_counted_and_the_first_named(tmp_path, config, tensors):
    del tensors["model.layers.1.linear_attn.A_log"]
    save_file(tensors, tmp_path / SINGLE)
    message = refusal(tmp_path, config)
    assert message == f"{tmp_path}: missing 1 tensors: layers.1.linear_attn.A_log"
    kept = {name: tensor for name, tensor in tensors.items() if "layers.0" not in name}
    save_file(kept, tmp_path / SINGLE)
    message = refusal(tmp_path, config)
    assert "missing 15 tensors: layers.0.input_layernorm.weight, layers.0.linear_attn" in message
    assert message.endswith(", ...")
    assert message.count("layers.0") == 5


def test_an_untied_model_without_head_misses_its_head(source):
    config = replace(source[1], tie_word_embeddings=False)
    assert refusal(source[0], config).endswith("missing 1 tensors: lm_head.weight")


def test_missing_and_unexpected_tensors_are_told_together(tmp_path, config, tensors):
    tensors["model.layers.3.self_attn.q_proj.bias"] = torch.zeros(4)
    tensors["model.layers.4.input_layernorm.weight"] = torch.zeros(4)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / SINGLE)
    message = refusal(tmp_path, config)
    assert "missing 1 tensors: norm.weight; unexpected 2 tensors: " in message
    assert "model.layers.3.self_attn.q_proj.bias" in message
    assert "model.layers.4.input_layernorm.weight" in message


def test_a_wrong_shape_is_told_with_the_expected_one(tmp_path, config, tensors):
    tensors["model.layers.0.linear_attn.conv1d.weight"] = torch.zeros(256, 4)
    tensors["model.norm.weight"] = torch.zeros(64)
    save_file(tensors, tmp_path / SINGLE)
    message = refusal(tmp_path, config)
    assert "2 wrong shapes: " in message
    assert "layers.0.linear_attn.conv1d.weight has [256, 4], expected [256, 1, 4]" in message
    assert "norm.weight has [64], expected [128]" in message


@pytest.mark.parametrize(
    ("dtype", "code"),
    [(torch.float64, "F64"), (torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")],
)
def test_a_dtype_that_is_not_supported_is_named(tmp_path, config, tensors, dtype, code):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, tmp_path / SINGLE)
    message = refusal(tmp_path, config)
    assert f"1 wrong dtypes: norm.weight has {code}; accepted: F32, BF16, F16" in message


def test_a_directory_without_weights_is_refused(tmp_path, config):
    expected = f"{tmp_path}: no weights; expected model.safetensors or {INDEX_NAME}"
    assert refusal(tmp_path, config).startswith(expected)


def test_a_missing_shard_is_named(tmp_path, config, tensors):
    save_sharded(tmp_path, halves(tensors))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    message = refusal(tmp_path, config)
    assert message.startswith(f"{tmp_path / INDEX_NAME}: names 1 shard files: ")
    assert f"model-00002-of-00002.safetensors missing in {tmp_path}" in message


def test_an_index_that_names_what_its_shard_lacks_is_refused(tmp_path, config, tensors):
    shards = halves(tensors)
    index = {tensor: name for name, shard in shards.items() for tensor in shard}
    first = "model-00001-of-00002.safetensors"
    moved = next(iter(shards["model-00002-of-00002.safetensors"]))
    save_sharded(tmp_path, shards, index | {moved: first})
    message = refusal(tmp_path, config)
    assert f"shards lack 1 tensors it names: {moved} (in {first})" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "weight_map is None; expected tensor names"),
        ('{"weight_map": {}}', "weight_map is {}; expected tensor names"),
        ('{"weight_map": {"a": 3}}', "weight_map['a'] is 3; expected a file of that directory"),
        (
            '{"weight_map": {"a": "../b.safetensors"}}',
            "weight_map['a'] is '../b.safetensors'; expected a file of that directory",
        ),
    ],
)
def test_a_bad_index_is_refused(tmp_path, config, content, message):
    (tmp_path / INDEX_NAME).write_text(content)
    assert refusal(tmp_path, config).startswith(f"{tmp_path / INDEX_NAME}: {message}")


@pytest.mark.parametrize("indexed", [True, False])
def test_a_tensor_in_two_shards_is_refused(tmp_path, config, tensors, indexed):
    shards = halves(tensors)
    first, second = shards.values()
    name = next(iter(first))
    save_sharded(tmp_path, dict(zip(shards, (first, second | {name: first[name]}), strict=True)))
    if not indexed:
        (tmp_path / INDEX_NAME).unlink()
    message = refusal(tmp_path, config)
    assert f"duplicate tensor {name.removeprefix('model.')}: " in message
    assert all(shard in message for shard in shards)


def test_one_tensor_under_two_prefixes_is_refused(tmp_path, config, tensors):
    tensors["model.language_model.norm.weight"] = torch.zeros(128)
    save_file(tensors, tmp_path / SINGLE)
    message = refusal(tmp_path, config)
    assert "duplicate tensor norm.weight: " in message
    assert "model.language_model.norm.weight" in message


def with_header(text, data=b"\0" * 8):
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "corrupt or truncated safetensors: 0 bytes"),
        (b"\x10\0\0", "corrupt or truncated safetensors: 3 bytes"),
        ((100).to_bytes(8, "little") + b"{}", "10 bytes can't hold a header of 100 bytes"),
        (b"\xff" * 16, "16 bytes can't hold a header of 18446744073709551615 bytes"),
        (with_header(b"{]"), "corrupt safetensors header"),
        (with_header(b"[]"), "corrupt safetensors header"),
        (with_header(b'{"a": 3}'), "corrupt safetensors header"),
        (with_header(b'{"a": {"dtype": "F32"}}'), "corrupt safetensors header"),
        (
            with_header(b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}'),
            "a of dtype F32 and shape [3] needs 12 bytes, not 8",
        ),
        (
            with_header(b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [8, 4]}}'),
            "a has shape [-1] and bytes [8, 4)",
        ),
        (
            with_header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}'),
            "a starts at byte",
        ),
        (
            with_header(b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}'),
            "truncated or corrupt safetensors: 78 bytes, its header says 82",
        ),
        (
            with_header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
            "truncated or corrupt safetensors: 77 bytes, its header says 73",
        ),
        (
            with_header(
                b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
                b' "a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}'
            ),
            "1 names occur twice: a",
        ),
    ],
)
def test_a_corrupt_file_is_named_with_what_is_wrong(tmp_path, config, content, message):
    (tmp_path / SINGLE).write_bytes(content)
    refused = refusal(tmp_path, config)
    assert refused.startswith(f"{tmp_path / SINGLE}: ")
    assert message in refused


def test_a_file_cut_short_is_refused_before_the_first_tensor(source, tmp_path):
    directory = shutil.copytree(source[0], tmp_path / "cut")
    content = (directory / SINGLE).read_bytes()
    (directory / SINGLE).write_bytes(content[:-1])
    expected = f"{len(content) - 1} bytes, its header says {len(content)}"
    assert expected in refusal(directory, source[1])


def test_a_file_that_shrinks_after_the_checks_is_refused(source, tmp_path):
    directory = shutil.copytree(source[0], tmp_path / "shrinks")
    tensors = read_weights(directory, source[1])
    (directory / SINGLE).write_bytes((directory / SINGLE).read_bytes()[:-1])
    with pytest.raises(ValueError, match="truncated while reading"):
        list(tensors)
