"""The engine's logits against transformers in float32, however the prompt is cut."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from experiments.make_model import make_model
from tests.engine.real_model import tokens

TOLERANCE = 1e-4
PROMPT = tokens(0, 700)
LENGTHS = (1, 3, 63, 64, 65, 200, 700)
BUDGETS = (64, 100, 128, 192, 2048)
GREEDY_FROM = 65
POOLS = {"num_slots": 40, "num_blocks": 100, "block_size": 32}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, return_logits=True, max_tokens=1)

SHAPES = {
    "two value heads a key head": {},
    "one value head a key head": {"linear_num_value_heads": 2},
    "three value heads a key head": {"linear_num_value_heads": 6},
    "untied embeddings": {"tie_word_embeddings": False},
    "uneven sizes": {
        "vocab_size": 301,
        "hidden_size": 96,
        "intermediate_size": 200,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 40,
        "linear_conv_kernel_dim": 3,
        "rms_norm_eps": 1e-5,
    },
    "every second layer attends": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "attention only": {"layer_types": ["full_attention"] * 4},
}
PLAIN = "two value heads a key head"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("oracle")
    made = {
        name: make_model(root / name.replace(" ", "-"), like="tiny", overrides=overrides)
        for name, overrides in SHAPES.items()
    }
    made["sharded"] = make_model(root / "sharded", like="tiny", max_shard_mb=0.3)
    made["multimodal wrapper"] = wrapped(made[PLAIN], root / "wrapper")
    return made


def wrapped(source, out):
    """The same model under the names of a multimodal checkpoint, with tensors that are not ours."""
    out.mkdir()
    config = json.loads((source / "config.json").read_text())
    outer = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "vision_config": {"depth": 1},
        "tie_word_embeddings": config["tie_word_embeddings"],
        "text_config": config,
    }
    (out / "config.json").write_text(json.dumps(outer))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.randn(12, 4)
    tensors["model.visual.patch_embed.proj.bias"] = torch.randn(4)
    tensors["mtp.fc.weight"] = torch.randn(4, 8)
    tensors["mtp.layers.0.self_attn.q_proj.weight"] = torch.randn(8, 4)
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.fixture(scope="module")
def oracle(directories, tmp_path_factory):
    """{shape: what transformers computes}, from one process."""
    root = tmp_path_factory.mktemp("logits")
    jobs = [
        {
            "name": name,
            "directory": str(directories[name]),
            "prompt": PROMPT,
            "greedy_from": GREEDY_FROM,
        }
        for name in SHAPES
    ]
    (root / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("transformers_logits.py")
    command = [sys.executable, str(script), str(root / "jobs.json"), str(root / "logits.pt")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = torch.load(root / "logits.pt")
    same = {"sharded": made[PLAIN], "multimodal wrapper": made[PLAIN]}
    return made | same


MODELS = [*SHAPES, "sharded", "multimodal wrapper"]


def distances(outputs, reference):
    """Largest difference of the last position's logits, by prompt length."""
    return {
        n: (output.logits[0] - reference["logits"][n - 1]).abs().max().item()
        for n, output in zip(LENGTHS, outputs, strict=True)
    }


@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_any_length_cut_by_any_budget_give_the_logits_of_transformers(
    name, directories, oracle
):
    for budget in BUDGETS if name == PLAIN else (64, 192):
        llm = LLM(
            directories[name],
            max_num_batched_tokens=budget,
            enable_prefix_caching=budget != 128,
            **POOLS,
        )
        outputs = llm.generate([PROMPT[:n] for n in LENGTHS], GREEDY)
        assert max(distances(outputs, oracle[name]).values()) <= TOLERANCE, (budget, name)


@pytest.mark.parametrize("restore", ["copy", "redirect"])
def test_a_resumed_prompt_gives_the_logits_of_transformers(restore, directories, oracle):
    llm = LLM(directories[PLAIN], restore=restore, checkpoint_every=64, **POOLS)
    llm.generate([PROMPT], GREEDY)
    outputs = llm.generate([PROMPT[:n] for n in LENGTHS], GREEDY)
    assert [output.boundary for output in outputs] == [0, 0, 0, 0, 64, 192, 640]
    assert max(distances(outputs, oracle[PLAIN]).values()) <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_64_greedy_tokens_and_their_logits_are_those_of_transformers(name, directories, oracle):
    llm = LLM(directories[name], **POOLS)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, return_logits=True, max_tokens=64)
    [output] = llm.generate([PROMPT[:GREEDY_FROM]], sampling)
    assert output.token_ids == oracle[name]["greedy"].tolist()
    logits = torch.stack(output.logits)
    assert (logits - oracle[name]["greedy_logits"]).abs().max().item() <= TOLERANCE


def lose_nothing(worker):
    pass


def lose_states(worker):
    worker.state_pool.states.zero_()


def lose_windows(worker):
    worker.state_pool.windows.zero_()


def lose_kv(worker):
    worker.kv_cache.zero_()


@pytest.mark.parametrize("lose", [lose_states, lose_windows, lose_kv])
@pytest.mark.parametrize("length", [131, 700])
def test_a_lost_state_moves_the_logits_a_thousand_times_further_than_the_tolerance(
    lose, length, directories, oracle
):
    """Lost after 128 tokens in a short prompt, or only 60 tokens before the end of a long one."""
    cut = (length - 1) // 64 * 64

    def distance(lose):
        llm = LLM(directories[PLAIN], max_num_batched_tokens=64, **POOLS)
        llm.add_request(PROMPT[:length], GREEDY)
        for _ in range(cut // 64):
            assert llm.step() == []
        lose(llm.worker)
        [output] = llm.step()
        return (output.logits[0] - oracle[PLAIN]["logits"][length - 1]).abs().max().item()

    assert distance(lose_nothing) <= TOLERANCE
    assert distance(lose) > 1000 * TOLERANCE
