"""Bits at widths and shapes where libraries switch paths, which the tiny models do not reach."""

import pytest
import torch

from engine import LLM, SamplingParams
from experiments.make_model import make_model

WIDE = {"hidden_size": 2048, "intermediate_size": 2048}
MIXED = ["linear_attention", "full_attention"] * 3


def params(max_tokens):
    return SamplingParams(
        temperature=0.0, ignore_eos=True, return_logits=True, max_tokens=max_tokens
    )


def text(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 512, (length,), generator=generator).tolist()


def assert_same_bits(output, expected):
    assert output.token_ids == expected.token_ids
    assert all(torch.equal(a, b) for a, b in zip(output.logits, expected.logits, strict=True))


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    overrides = WIDE | {"layer_types": ["linear_attention", "full_attention"]}
    out = tmp_path_factory.mktemp("wide") / "model"
    return make_model(out, like="tiny", seed=11, layers=2, dtype="bfloat16", overrides=overrides)


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory):
    """Six layers, three of full attention: K/V rows depend on attention below them."""
    out = tmp_path_factory.mktemp("deep") / "model"
    return make_model(out, like="tiny", seed=11, layers=6, overrides={"layer_types": MIXED})


@pytest.mark.usefixtures("threads")
def test_a_suffix_of_one_token_has_the_bits_of_a_cold_run_in_wide_layers(wide_model):
    llm = LLM(wide_model, max_num_seqs=2, memory_budget_bytes=256 << 20)
    for first in range(8):
        prompt = [first, *text(64)]
        cold, warm = (llm.generate(prompt, params(1))[0] for _ in range(2))
        assert (cold.boundary, warm.boundary) == (0, 64)
        assert_same_bits(warm, cold)


@pytest.mark.usefixtures("threads")
def test_decoding_alone_has_the_bits_of_a_batch_in_wide_layers(wide_model):
    """trap 34: output depends on what else is in the batch."""
    llm = LLM(
        wide_model, max_num_seqs=4, memory_budget_bytes=256 << 20, enable_prefix_caching=False
    )
    alone = llm.generate([[1, 2, 3]], params(20))[0]
    together = llm.generate([[1, 2, 3], [4, 5, 6], text(90)], params(20))[0]
    assert_same_bits(together, alone)


@pytest.mark.parametrize("block_size", [1, 2, 8, 64])
def test_rows_of_the_tile_a_prompt_ends_in_are_not_shared(deep_model, block_size):
    options = {"block_size": block_size, "max_num_seqs": 2, "memory_budget_bytes": 64 << 20}
    llm = LLM(deep_model, **options)
    off = LLM(deep_model, enable_prefix_caching=False, **options)
    prompt = text(200)
    for end in (65, 67, 100, 150, 190, 200):
        warm, cold = (engine.generate(prompt[:end], params(2))[0] for engine in (llm, off))
        assert_same_bits(warm, cold)
    assert llm.stats().hits == 5


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("restore", ["copy", "redirect"])
def test_warm_is_cold_in_a_deep_model_with_several_attention_layers(deep_model, restore):
    options = {"max_num_seqs": 4, "memory_budget_bytes": 64 << 20, "block_size": 16}
    llm = LLM(deep_model, restore=restore, placement="every(448)", **options)
    off = LLM(deep_model, enable_prefix_caching=False, **options)
    shared = text(700)
    prompts = [shared[:n] + text(m, seed=n) for n, m in [(700, 1), (650, 40), (512, 64), (699, 3)]]
    llm.generate(shared, params(1))
    together = llm.generate(prompts, params(4))
    for output, prompt in zip(together, prompts, strict=True):
        assert output.num_cached_tokens >= 448
        assert_same_bits(output, off.generate(prompt, params(4))[0])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("model", ["wide_model", "deep_model"])
def test_without_onednn_warm_is_cold_as_well(model, request, monkeypatch):
    """The fallback of machines whose torch has no oneDNN."""
    monkeypatch.setattr("kernels.linear._onednn_packs", lambda dtype: False)
    directory = request.getfixturevalue(model)
    options = {"max_num_seqs": 4, "memory_budget_bytes": 256 << 20}
    llm = LLM(directory, **options)
    off = LLM(directory, enable_prefix_caching=False, **options)
    shared = text(320)
    prompts = [shared[:n] + text(m, seed=n) for n, m in [(320, 1), (256, 1), (300, 40), (64, 3)]]
    llm.generate(shared, params(1))
    together = llm.generate(prompts, params(4))
    assert [output.num_cached_tokens > 0 for output in together].count(True) >= 2
    for output, prompt in zip(together, prompts, strict=True):
        assert_same_bits(output, off.generate(prompt, params(4))[0])
