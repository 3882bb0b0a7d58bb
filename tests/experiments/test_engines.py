"""Engines to compare have one model's weights, read text, and have room for all that is served."""

import shutil
from dataclasses import replace

import pytest

from engine import SamplingParams
from experiments.engines import SMALLEST, check_length, load, roomy, same_weights

TOKENS, REQUESTS = 1100, 3


@pytest.fixture(scope="module")
def loaded(tiny_model):
    return load(tiny_model, SMALLEST)


def test_a_model_without_a_tokenizer_is_refused(tiny_model, tmp_path):
    bare = shutil.copytree(tiny_model, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="bare has no tokenizer"):
        load(bare, SMALLEST)


def test_a_prompt_needs_room_for_one_more_token(loaded):
    check_length(loaded, 4095)
    with pytest.raises(ValueError, match="4096 tokens are needed; the model has 4096"):
        check_length(loaded, 4096)


@pytest.mark.parametrize("num_seqs", [1, 8])
def test_nothing_is_evicted_where_there_is_room(loaded, num_seqs):
    llm = same_weights(loaded, roomy(REQUESTS, TOKENS, num_seqs), TOKENS)
    assert llm.worker.model is loaded.worker.model and llm.tokenizer is loaded.tokenizer
    assert llm.stats().queries == 2, "warmed up"
    prompts = [[token] * (TOKENS - 1) for token in range(1, REQUESTS + 1)]
    llm.generate(prompts, SamplingParams(max_tokens=1))
    stats = llm.stats()
    assert stats.state_evictions == 0 and not stats.saves_skipped.get("no_slot")
    for prompt in prompts:
        [again] = llm.generate([prompt], SamplingParams(max_tokens=1))
        assert again.boundary == (TOKENS - 2) // 64 * 64


def test_other_settings_are_those_that_were_asked_for(loaded):
    config = replace(roomy(1, 64, 1), enable_prefix_caching=False)
    assert same_weights(loaded, config, 64).config == config
