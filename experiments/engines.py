"""Which engines are compared? The same weights under other settings, warmed up, with room."""

from dataclasses import asdict
from pathlib import Path

from cache.placement import CHECKPOINT_EVERY
from engine import LLM, EngineConfig
from experiments.cold_and_warm import WARM_UP_TOKENS, warm_up

SMALLEST = EngineConfig(num_slots=4, num_blocks=8, max_num_seqs=1)  # for weights and tokenizer


def load(directory: Path, config: EngineConfig) -> LLM:
    """An engine that reads text. Raises ValueError if the model has no tokenizer."""
    llm = LLM(directory, **asdict(config))
    if llm.tokenizer is None:
        raise ValueError(f"{directory} has no tokenizer")
    return llm


def same_weights(loaded: LLM, config: EngineConfig, prompt_tokens: int) -> LLM:
    """Another engine on the weights of a loaded one, warmed up for prompts of that length."""
    llm = LLM.from_model(loaded.worker.model, config, loaded.tokenizer)
    warm_up(llm, prompt_tokens)
    return llm


def check_length(llm: LLM, num_tokens: int) -> None:
    """Raises ValueError if the model ends before that many tokens and one more."""
    if num_tokens >= llm.max_model_len:
        raise ValueError(f"{num_tokens} tokens are needed; the model has {llm.max_model_len}")


def roomy(num_requests: int, most_tokens: int, num_seqs: int) -> EngineConfig:
    """Pools in which nothing of that many requests and the warm-up is evicted."""
    longest = max(most_tokens, WARM_UP_TOKENS)
    requests = num_requests + 2
    return EngineConfig(
        max_num_seqs=num_seqs,
        num_slots=3 + num_seqs + requests * (longest // CHECKPOINT_EVERY + 3),
        num_blocks=1 + requests * (longest // 64 + 2),
    )
