"""Chooses the next token of each request from its logits row.

Pure: the choice depends on the row, the request's settings and its seed and length, never on the
batch, on what was drawn before, or on how often a step was tried.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice

import torch
import xxhash

from engine.sequence import Sequence


@dataclass(frozen=True)
class Choice:
    """A new token, and what the request asked to be told with it."""

    token_id: int
    logprobs: dict[int, float] | None
    logits: torch.Tensor | None


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """[2, rows] int64 of logits [rows, vocab]: whether each row is finite, and its best token.

    All that greedy requests need, so that one small tensor goes to the host.
    """
    finite = logits.amax(-1).isfinite()  # the maximum of NaN is NaN; single entries may be -inf
    return torch.stack([finite.long(), logits.argmax(-1)])


def sample(
    seqs: Seq[Sequence],
    drafts: Seq[Seq[int]],
    logits: Seq[torch.Tensor | None],
    best: Seq[Seq[int]],
) -> list[list[Choice] | None]:
    """The next tokens of each sequence; None where its logits hold NaN or infinity.

    logits: rows [vocab] float32 on the host: after the last known token of each, and after each
    guess; None for those that don't want them (`Sequence.wants_logits`). best: `likeliest` of all.
    A guess that is the very token chosen there is accepted, and the row after it chooses the next:
    what is chosen, greedy or drawn, is what would be without guesses. Draws are made on the host,
    so that seeded ones are the same on every device.
    """
    if not seqs:
        return []
    rows = zip(logits, *best, strict=True)
    return [
        _accepted(seq, guesses, list(islice(rows, 1 + len(guesses))))
        for seq, guesses in zip(seqs, drafts, strict=True)
    ]


def _accepted(
    seq: Sequence, guesses: Seq[int], rows: Seq[tuple[torch.Tensor | None, int, int]]
) -> list[Choice] | None:
    choices: list[Choice] = []
    for guess, (row, is_finite, token_id) in zip([*guesses, None], rows, strict=True):
        if not is_finite:
            return None
        choices.append(_choose(seq, len(choices), row, token_id))
        if choices[-1].token_id != guess:
            break
    return choices


def _choose(seq: Sequence, ahead: int, logits: torch.Tensor | None, likeliest: int) -> Choice:
    """ahead: how many tokens are chosen already that seq does not have yet."""
    params = seq.sampling
    if logits is None:
        return Choice(likeliest, None, None)
    token_id = likeliest if params.temperature == 0.0 else _draw(seq, ahead, logits)
    logprobs = None
    if params.logprobs is not None:
        logprobs = _top_logprobs(logits, token_id, params.logprobs)
    return Choice(token_id, logprobs, logits.clone() if params.return_logits else None)


def _draw(seq: Sequence, ahead: int, logits: torch.Tensor) -> int:
    params = seq.sampling
    key = seq.seed.to_bytes(8, "little") + (seq.num_generated + ahead).to_bytes(8, "little")
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(key) >> 1)
    scaled = ((logits - logits.max()).double() / params.temperature).float()
    if params.top_k and params.top_k < len(scaled):
        kept = scaled.topk(params.top_k).indices
        scaled = torch.full_like(scaled, -torch.inf).scatter_(0, kept, scaled[kept])
    probs = scaled.softmax(-1)
    if params.top_p < 1.0:
        probs, order = probs.sort(descending=True, stable=True)
        dropped = probs.cumsum(-1) - probs >= params.top_p  # the mass before each
        dropped[0] = False  # the likeliest stays, also where top_p is below what float32 can hold
        probs[dropped] = 0.0
        return int(order[torch.multinomial(probs, 1, generator=generator)])
    return int(torch.multinomial(probs, 1, generator=generator))


def _top_logprobs(logits: torch.Tensor, token_id: int, count: int) -> dict[int, float]:
    """{token: log-probability}: the chosen token first, then the `count` likeliest."""
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(min(count, len(logprobs)))
    report = {token_id: float(logprobs[token_id])}
    for value, index in zip(top.values.tolist(), top.indices.tolist(), strict=True):
        report.setdefault(index, value)
    return report
