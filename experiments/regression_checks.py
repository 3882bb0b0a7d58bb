"""Is what the clients saw as it must be? Equal answers, hits where they belong, honest books."""

from collections.abc import Mapping, Sequence

from engine.tokenizer import Tokenizer
from experiments.regression_clients import Answer, Phase
from experiments.regression_expected import Placement
from experiments.regression_server import ServerProcess, eventually, held
from experiments.regression_workloads import Workload, prompt_text


def difference(reference: Answer, answer: Answer) -> str | None:
    """The first thing in which an answer is not the reference's; None if it is equal."""
    pairs = zip(reference.tokens, answer.tokens, strict=False)
    for i, (wanted, token) in enumerate(pairs):
        if token != wanted:
            return f"token {i} is {token!r}, not {wanted!r}"
    if len(answer.tokens) != len(reference.tokens):
        return f"{len(answer.tokens)} tokens, not {len(reference.tokens)}"
    if answer.text != reference.text:
        return f"the text is {answer.text!r}, not {reference.text!r}"
    if answer.finish_reason != reference.finish_reason:
        return f"it ended by {answer.finish_reason}, not {reference.finish_reason}"
    if answer.logprobs != reference.logprobs:
        return "the tokens are the same, but not their log-probabilities"
    return None


def differences(reference: Phase, phase: Phase) -> dict[str, str]:
    """{request: how its answer is not the reference's}; a missing answer is a difference too."""
    found = {}
    for name, wanted in reference.answers.items():
        answer = phase.answers.get(name)
        differs = "no answer" if answer is None else difference(wanted, answer)
        if differs is not None:
            found[name] = differs
    return found


def prompts_of(tokenizer: Tokenizer, workload: Workload, phase: Phase) -> dict[str, list[int]]:
    """{request: token ids of its prompt}, with the answers of this phase in it."""
    return {
        request.name: tokenizer.encode(prompt_text(workload, request, phase.texts))
        for request in (*workload.priming, *workload.timed)
    }


def expected_boundaries(workload: Workload, prompts: Mapping[str, list[int]]) -> dict[str, int]:
    """{request: where it must resume} when they come one by one, in the order of one client.

    The next turn of a chat goes on from the whole prompt: the template adds an answer and more.
    """
    placement = Placement()
    return {
        name: placement.serve(ids, point=len(ids) if workload.chat else 0)
        for name, ids in prompts.items()
    }


def wrong_boundaries(
    phase: Phase,
    prompts: Mapping[str, list[int]],
    expected: Mapping[str, int],
    *,
    may_be_later: bool,
) -> list[str]:
    """Every answer whose prompt was read or reused otherwise than it must."""
    found = []
    for name, answer in phase.answers.items():
        num_tokens, wanted = len(prompts[name]), expected[name]
        if answer.prompt_tokens != num_tokens:
            found.append(f"{name}: a prompt of {answer.prompt_tokens} tokens, not {num_tokens}")
        if answer.cached_tokens != answer.boundary:
            found.append(
                f"{name}: {answer.cached_tokens} cached tokens, but resumed from {answer.boundary}"
            )
        later = may_be_later and wanted < answer.boundary < num_tokens
        if answer.boundary != wanted and not later:
            least = "at least " if may_be_later else ""
            found.append(
                f"{name}: resumed from {answer.boundary}, not {least}{wanted} "
                f"(reason: {answer.limit_reason})"
            )
    return found


def book_errors(server: ServerProcess, cached_tokens: Sequence[int]) -> list[str]:
    """What is held when nothing runs, and every counter that is not what the clients counted.

    cached_tokens: of each answer that they got from this server.
    """
    eventually(lambda: not held(server.stats()))
    stats, metrics = server.stats(), server.metrics()
    found = [f"{name} is {value} after the last answer" for name, value in held(stats).items()]
    counted = {
        "queries": len(cached_tokens),
        "hits": sum(tokens > 0 for tokens in cached_tokens),
        "tokens_reused": sum(cached_tokens),
    }
    for name, wanted in counted.items():
        said = {"/stats": stats[name], "/metrics": metrics[f"warmstate_{name}_total"]}
        found += [
            f"{where} says {name} {value:.0f}, the clients counted {wanted}"
            for where, value in said.items()
            if value != wanted
        ]
    ended = sum(v for k, v in metrics.items() if k.startswith("warmstate_requests_total"))
    if ended != len(cached_tokens):
        found.append(f"/metrics counts {ended:.0f} ended answers, not {len(cached_tokens)}")
    if stats["state_evictions"]:
        found.append(f"{stats['state_evictions']} states were evicted: the pools are too small")
    return found
