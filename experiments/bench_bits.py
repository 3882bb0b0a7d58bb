"""Are the answers that the benchmark times the right ones? Compares them with an uncached engine's.

Times of a wrong answer mean nothing, so the benchmark asks here first and stops if a bit differs.
"""

from collections.abc import Callable

from engine import LLM, SamplingParams
from experiments.cold_and_warm import first_difference

DECODED = 33


def differences(
    on: LLM, off: LLM, tokens: Callable[[int], list[int]], *, prefix: int, suffix: int
) -> list[str]:
    """One line for each request whose logits with caching on are not those with caching off.

    The first token's logits of a prompt that shares `prefix` tokens with earlier ones, and of the
    same prompt again; every row of a prompt that is decoded on. A request that had to hit and did
    not is a line too. `tokens(n)` draws n ids.
    """
    shared = tokens(prefix)
    for _ in range(2):  # the second leaves a state where they part
        on.generate([shared + tokens(suffix)], _greedy(1))
    prompt = shared + tokens(suffix)
    last_boundary = (len(prompt) - 1) // on.config.chunk_stride * on.config.chunk_stride
    requests = (
        ("shared prefix", prompt, 1, prefix),
        ("identical prompt", prompt, 1, last_boundary),
        ("decode", tokens(512), DECODED, 0),
    )
    found = []
    for name, ids, max_tokens, least in requests:
        [expected] = off.generate([ids], _greedy(max_tokens))
        [output] = on.generate([ids], _greedy(max_tokens))
        if (difference := first_difference(expected, output)) is not None:
            found.append(f"{name}: {difference}")
        if output.num_cached_tokens < least:
            found.append(f"{name}: reused {output.num_cached_tokens} tokens, not {least}")
    return found


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, return_logits=True)
