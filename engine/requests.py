"""What a caller may ask for: every check of a request, made before anything is queued."""

from collections.abc import Sequence as Seq

from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer

Prompt = str | Seq[int]


def token_ids_of(
    prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int, *, max_tokens: int | None = None
) -> list[int]:
    """The ids of a prompt. ValueError for no tokens, no tokenizer, or an id off the vocabulary.

    max_tokens: also for what is longer than that for sure, before it is tokenised or checked.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("the model has no tokenizer.json: give token ids, not text")
        if max_tokens is not None:
            _check_bytes(len(prompt.encode()), max_tokens, tokenizer.max_bytes_per_token)
        token_ids = tokenizer.encode(prompt)
    else:
        token_ids = _as_list(prompt, "a prompt is text or a list of token ids")
        if max_tokens is not None and len(token_ids) > max_tokens:
            raise ValueError(f"the prompt has {len(token_ids)} tokens; at most {max_tokens} fit")
    if not token_ids:
        raise ValueError("the prompt is empty: at least one token is needed")
    for position, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ValueError(
                f"token {token_id!r} at position {position} is not an id in [0, {vocab_size})"
            )
    return token_ids


def _check_bytes(num_bytes: int, max_tokens: int, max_bytes_per_token: float) -> None:
    limit = max_tokens * max_bytes_per_token
    if num_bytes > limit:
        raise ValueError(
            f"the prompt has {num_bytes} bytes; at most {limit:.0f} can fit in {max_tokens} tokens"
        )


def check_text(name: str, value: object) -> None:
    """ValueError unless value is a string that UTF-8 can hold."""
    surrogates = isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value)
    if not isinstance(value, str) or surrogates:
        raise ValueError(f"{name}={value!r}: must be a string that UTF-8 can hold")


def grid_boundaries(save_points: Seq[int], chunk_stride: int) -> set[int]:
    """The grid boundaries at or below these token counts; ValueError for what is no count."""
    boundaries = set()
    for point in _as_list(save_points, "save_points are a list of token counts"):
        if type(point) is not int or point < 0:
            raise ValueError(f"save_points: {point!r} is no token count")
        boundaries.add(point // chunk_stride * chunk_stride)
    return boundaries


def _as_list(value: object, expected: str) -> list:
    """A list, tuple, range, array or tensor as a list; ValueError for what has no order."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Seq) or isinstance(value, str | bytes | bytearray):
        raise ValueError(f"{expected}, got {type(value).__name__}")
    return list(value)


def as_batch(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    batch = _as_list(prompts, "prompts are text, a list of token ids, or a list of these")
    return [batch] if batch and isinstance(batch[0], int) else batch


def as_sampling_params(params: object) -> SamplingParams:
    """The defaults for None; ValueError for anything else that is no SamplingParams."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
    return params
