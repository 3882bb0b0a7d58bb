"""Random-weight model directories: they load, are reproducible, and are written in blocks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import experiments.make_model as module
from engine.model_config import ModelConfig
from engine.tokenizer import Tokenizer
from engine.weights import plan_weights, read_weights
from experiments.make_model import main, make_model
from experiments.random_weights import BLOCK_ELEMENTS, PlannedTensor, draw, split_shards

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def run_python(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def contents(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny", like="tiny", seed=3)


ORACLE = """
import json, sys
sys.modules["fla"] = None  # its kernels need a GPU, and transformers would take them
import torch
from transformers import AutoTokenizer, DynamicCache, Qwen3_5ForCausalLM
torch.set_num_threads(1)
path = sys.argv[1]
model, info = Qwen3_5ForCausalLM.from_pretrained(path, output_loading_info=True)
text = "<|im_start|>user\\nnaïve 日本 🙂<|im_end|>"
tokenizer = AutoTokenizer.from_pretrained(path)
ids = tokenizer(text).input_ids

model = model.float().eval()
tokens = torch.randint(0, 256, (1, 192), generator=torch.Generator().manual_seed(1))
def split(spoil=None):
    cache = DynamicCache(config=model.config)
    model(tokens[:, :128], cache=cache)
    for layer in cache.layers:
        if spoil is not None and hasattr(layer, spoil):
            getattr(layer, spoil)[0].zero_()
    return model(tokens[:, 128:], cache=cache).logits[:, -1]
with torch.no_grad():
    full = model(tokens).logits[:, -1]
    distance = {
        "none": (split() - full).abs().max().item(),
        "recurrent_states": (split("recurrent_states") - full).abs().max().item(),
        "conv_states": (split("conv_states") - full).abs().max().item(),
    }
print(json.dumps({
    "problems": sorted(str(v) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
                       for v in info[key]),
    "num_parameters": sum(p.numel() for p in model.parameters()),
    "round_trip": tokenizer.decode(ids) == text,
    "ids": ids,
    "eos": model.generation_config.eos_token_id,
    "tied": model.config.tie_word_embeddings,
    "finite": bool(full.isfinite().all()),
    "distance": distance,
}))
"""


@pytest.mark.parametrize(
    "options",
    [
        {"like": "tiny"},
        {"like": "tiny", "layers": 7, "dtype": "bfloat16", "max_shard_mb": 0.5},
        {"like": "tiny", "overrides": {"tie_word_embeddings": False}},
    ],
    ids=["plain", "sharded bfloat16 of odd depth", "untied"],
)
def test_transformers_loads_it_and_a_wrong_state_shows_in_its_logits(tmp_path, options):
    directory = make_model(tmp_path / "model", **options)
    seen = run_python(ORACLE, directory)
    assert seen["problems"] == []
    config = ModelConfig.from_directory(directory)
    num_parameters = sum(tensor.numel() for _, tensor in read_weights(directory, config))
    assert seen["num_parameters"] == num_parameters
    assert seen["tied"] == config.tie_word_embeddings
    assert seen["eos"] == 256 and config.eos_token_ids == (256,)
    tokenizer = Tokenizer.from_directory(directory)
    text = "<|im_start|>user\nnaïve 日本 🙂<|im_end|>"
    assert seen["round_trip"] and seen["ids"] == tokenizer.encode(text)
    assert seen["finite"]
    assert seen["distance"]["none"] < 1e-3
    assert seen["distance"]["recurrent_states"] > 0.5
    assert seen["distance"]["conv_states"] > 0.5


def test_the_same_seed_gives_the_same_bytes(tiny, tmp_path):
    again = make_model(tmp_path / "again", like="tiny", seed=3)
    assert contents(again) == contents(tiny)


def test_another_seed_changes_every_tensor_and_nothing_else(tiny, tmp_path):
    other = make_model(tmp_path / "other", like="tiny", seed=4)
    before, after = contents(tiny), contents(other)
    assert before.pop("model.safetensors") != after.pop("model.safetensors")
    assert before == after
    config = ModelConfig.from_directory(tiny)
    tensors = dict(read_weights(tiny, config))
    for name, tensor in read_weights(other, config):
        assert not torch.equal(tensor, tensors[name]), name


def test_values_do_not_depend_on_shards_or_on_other_layers(tiny, tmp_path):
    sharded = make_model(tmp_path / "sharded", like="tiny", seed=3, layers=6, max_shard_mb=0.3)
    assert len(list(sharded.glob("model-*-of-*.safetensors"))) > 3
    deep = dict(read_weights(sharded, ModelConfig.from_directory(sharded)))
    for name, tensor in read_weights(tiny, ModelConfig.from_directory(tiny)):
        assert torch.equal(tensor, deep[name]), name


def test_decays_are_slow_and_every_tensor_varies(tmp_path):
    directory = make_model(tmp_path / "model", like="tiny", overrides={"hidden_size": 1024})
    for name, tensor in read_weights(directory, ModelConfig.from_directory(directory)):
        assert tensor.unique().numel() > 1, name
        if name.endswith("A_log"):
            assert torch.all((tensor.exp() > 0.0099) & (tensor.exp() < 4.01))
        elif name.endswith("dt_bias"):
            assert torch.all((tensor >= -6) & (tensor <= 0))
        elif name.endswith("linear_attn.norm.weight"):
            assert abs(tensor.mean() - 1) < 0.1
        elif tensor.ndim == 2 and name != "embed_tokens.weight":
            spread = tensor.std() * tensor.shape[1] ** 0.5
            assert 0.9 < spread < 1.1, name


def test_float32_is_kept_where_published_files_keep_it(tmp_path):
    directory = make_model(tmp_path / "model", like="tiny", dtype="bfloat16")
    for name, tensor in read_weights(directory, ModelConfig.from_directory(directory)):
        wide = name.endswith(("A_log", "linear_attn.norm.weight"))
        assert tensor.dtype == (torch.float32 if wide else torch.bfloat16), name


def test_vocabulary_layers_and_overrides_are_taken(tmp_path):
    overrides = {"intermediate_size": 64, "eos_token_id": [256, 258]}
    directory = make_model(
        tmp_path / "model", like="tiny", vocab=259, layers=5, overrides=overrides
    )
    config = ModelConfig.from_directory(directory)
    assert (config.vocab_size, config.num_hidden_layers) == (259, 5)
    assert (config.intermediate_size, config.eos_token_ids) == (64, (256, 258))
    assert config.layer_types[3:] == ("full_attention", "linear_attention")
    plan_weights(directory, config)


def test_blocks_of_a_tensor_are_bounded_and_cover_it():
    tensor = PlannedTensor("lm_head.weight", "BF16", (3, BLOCK_ELEMENTS // 2 + 1))
    sizes = [block.numel() for block in draw(tensor, seed=0)]
    assert sizes == [BLOCK_ELEMENTS, tensor.num_elements - BLOCK_ELEMENTS]


def test_a_shard_never_passes_its_limit_unless_one_tensor_does():
    plan = [PlannedTensor(f"t{i}", "F32", (size,)) for i, size in enumerate([2, 2, 1, 9, 1, 4])]
    shards = [[tensor.name for tensor in shard] for shard in split_shards(plan, 5 * 4)]
    assert shards == [["t0", "t1", "t2"], ["t3"], ["t4", "t5"]]


PEAK = """
import json, sys
from experiments.make_model import make_model

def status(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) * 1024

# A first model, so that what is loaded once does not count.
make_model(sys.argv[1] + "/first", like="tiny", dtype=sys.argv[2])
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
before = status("VmRSS")
out = make_model(sys.argv[1] + "/wide", like="tiny", vocab=int(sys.argv[3]), dtype=sys.argv[2])
size = (out / "model.safetensors").stat().st_size
print(json.dumps([status("VmHWM") - before, size]))
"""


@pytest.mark.parametrize(("dtype", "vocab"), [("float32", 200_000), ("bfloat16", 400_000)])
def test_memory_does_not_grow_with_the_model(tmp_path, dtype, vocab):
    peak, size = run_python(PEAK, tmp_path, dtype, vocab)
    assert size > 100e6
    assert peak < 50e6  # two blocks are 8 MB; the allocator adds some of its own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"like": "27b"}, "--like is '27b'; expected one of tiny, demo, 0.8b, 2b, 4b, 9b"),
        ({"vocab": 258}, "--vocab is 258; expected at least 259: 256 bytes and 3 special tokens"),
        ({"layers": 0}, "--layers is 0; expected at least 1"),
        ({"dtype": "int8"}, "--dtype is 'int8'; expected one of float32, bfloat16, float16"),
        ({"max_shard_mb": 0}, "--max-shard-mb is 0; expected more than 0"),
        ({"overrides": {"hiden_size": 8}}, "overrides name hiden_size; expected fields of config"),
        ({"overrides": {"head_dim": 6}}, "is 1; expected an even number in [2, head_dim = 6]"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_and_leaves_nothing(tmp_path, options, message):
    with pytest.raises(ValueError) as error:
        make_model(tmp_path / "model", **({"like": "tiny"} | options))
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_an_occupied_path_is_refused_and_kept(tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    for occupied in (tmp_path, tmp_path / "note.txt"):
        with pytest.raises(ValueError, match="exists and is not an empty directory"):
            make_model(occupied, like="tiny")
    assert contents(tmp_path) == {"note.txt": b"mine"}


def test_an_empty_directory_and_missing_parents_are_used(tmp_path):
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "a" / "b"):
        assert make_model(out, like="tiny") == out
        assert (out / "model.safetensors").is_file()


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(directory, plan, **options):
        (directory / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_model(tmp_path / "model", like="tiny")
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    out = tmp_path / "model"
    assert main(["--like", "tiny", "--layers", "1", "--vocab", "300", "--seed", "9", str(out)]) == 0
    config = ModelConfig.from_directory(out)
    tensors = [tensor for _, tensor in read_weights(out, config)]
    num_parameters = sum(tensor.numel() for tensor in tensors)
    expected = f"{num_parameters:,} parameters, {4 * num_parameters:,} bytes"
    assert expected in capsys.readouterr().out
    expected = make_model(tmp_path / "same", like="tiny", layers=1, vocab=300, seed=9)
    assert contents(out) == contents(expected)


def test_the_command_refuses_in_one_line(tmp_path, capsys):
    assert main(["--like", "tiny", "--vocab", "3", str(tmp_path / "model")]) == 2
    assert capsys.readouterr().err.startswith("make_model: --vocab is 3; expected at least 259")
