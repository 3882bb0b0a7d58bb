"""Chooses the next token of one request from its logits row.

One row at a time: the values of a row then do not depend on what else is in the batch.
"""

import secrets

import torch

from engine.sequence import Sequence


def sample(seq: Sequence, logits: torch.Tensor) -> int:
    """Next token for logits [vocab] float32. Draws from the request's own generator, and records
    log-probabilities and logits where the request asked for them."""
    params = seq.sampling
    if params.return_logits:
        seq.logits.append(logits.clone())
    token_id = int(logits.argmax()) if params.temperature == 0.0 else _draw(seq, logits)
    if params.logprobs is not None:
        seq.logprobs.append(_top_logprobs(logits, token_id, params.logprobs))
    return token_id


def _draw(seq: Sequence, logits: torch.Tensor) -> int:
    params = seq.sampling
    if seq.generator is None:
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        seq.generator = torch.Generator().manual_seed(seed)
    scaled = (logits.double() / params.temperature).float()
    if params.top_k and params.top_k < len(scaled):
        kept = scaled.topk(params.top_k).indices
        scaled = torch.full_like(scaled, -torch.inf).scatter_(0, kept, scaled[kept])
    probs = scaled.softmax(-1)
    if params.top_p < 1.0:
        probs, order = probs.sort(descending=True, stable=True)
        mass_before = probs.cumsum(-1) - probs
        probs[mass_before >= params.top_p] = 0.0  # the likeliest token always stays
        return int(order[torch.multinomial(probs, 1, generator=seq.generator)])
    return int(torch.multinomial(probs, 1, generator=seq.generator))


def _top_logprobs(logits: torch.Tensor, token_id: int, count: int) -> dict[int, float]:
    """{token: log-probability}: the chosen token first, then the `count` likeliest."""
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(min(count, len(logprobs)))
    report = {token_id: float(logprobs[token_id])}
    for value, index in zip(top.values.tolist(), top.indices.tolist(), strict=True):
        report.setdefault(index, value)
    return report
