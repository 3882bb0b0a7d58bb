"""The integer oracle with decode steps made of tensor ops alone, so that a graph can hold them.

Same numbers: tokens must equal `oracle.expected_output`. int64 holds products modulo 2**61 - 1 when
one factor has at most 20 bits.
"""

import torch

from cache.state_pool import StatePool
from engine.batch import ModelInputs
from tests.oracle import _PRIME, VOCAB, OracleModel, _no_hazard

_BITS = 20


def _times(x: torch.Tensor, factor: int | torch.Tensor) -> torch.Tensor:
    """x * factor modulo the prime; 0 <= x < 2**61, 0 <= factor < 2**20."""
    low = (x & ((1 << 41) - 1)) * factor
    high = (x >> 41) * factor  # times 2**41; 2**61 is 1
    return (low + (high >> _BITS) + ((high & ((1 << _BITS) - 1)) << 41)) % _PRIME


def _sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dim modulo the prime, of up to 2**20 numbers below it."""
    high, low = (x >> 30).sum(-1) % _PRIME, (x & ((1 << 30) - 1)).sum(-1)
    return (_times(_times(high, 1 << 15), 1 << 15) + low) % _PRIME


class TensorOracleModel(OracleModel):
    """Its decode steps read ids in tensors only; all others are the oracle's own."""

    can_capture = True

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0

    def forward(self, inputs: ModelInputs, pool: StatePool, kv_cache: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        each = inputs.decode_cu_seqlens
        one_each = each is None or len(each) == inputs.num_decodes + 1
        if inputs.num_prefill_tokens or not one_each or self.fail_after is not None:
            return super().forward(inputs, pool, kv_cache)
        reads, writes = inputs.decode_slots.read.tolist(), inputs.decode_slots.write.tolist()
        if any(writes):  # no graph's placeholders
            _no_hazard(reads, writes, list(range(len(writes))), [])
        return self._decode(inputs, pool, kv_cache)

    def _decode(self, inputs: ModelInputs, pool: StatePool, kv_cache: torch.Tensor) -> torch.Tensor:
        tokens = inputs.token_ids + 1
        value, count, window = _load(pool, inputs.decode_slots.read.tensor)
        value = (_times(value, 1_000_003) + tokens) % _PRIME
        count = count + 1
        window = torch.cat([window[:, 1:], tokens[:, None]], 1)
        _store(pool, inputs.decode_slots.write.tensor, value, count, window)
        kv_cache.view(-1).index_copy_(0, inputs.kv_indices.tensor, value)
        mixed = (_times(value, 4) + _times(count % _PRIME, 6)) % _PRIME
        weights = torch.arange(5, 8)
        mixed = (mixed + (window * weights).sum(1)) % _PRIME
        mixed = (mixed + self._attended(inputs, kv_cache)) % _PRIME % VOCAB
        logits = torch.zeros(len(mixed), VOCAB).scatter_(1, mixed[:, None], 1.0)
        return logits.index_select(0, inputs.logit_rows)

    def _attended(self, inputs: ModelInputs, kv_cache: torch.Tensor) -> torch.Tensor:
        tables = inputs.decode_block_tables.tensor
        rows = kv_cache.index_select(0, tables.flatten().long()).view(len(tables), -1)
        positions = torch.arange(1, rows.shape[1] + 1)
        seen = positions <= inputs.kv_lens.tensor[:, None]
        return _sum(torch.where(seen, _times(rows % _PRIME, positions), 0))


def _load(pool: StatePool, reads: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As `oracle.load`: value, count and window [N, 3] of each slot, those of no prefix if its two
    layers disagree; -1: the state before the first token."""
    slots, none = reads.clamp(min=0), reads < 0
    words = pool.states.view(torch.int64).index_select(0, slots).flatten(1)
    windows = pool.windows.index_select(0, slots).flatten(1)
    value, count, value2, count2 = words.unbind(1)
    first, second = windows[:, :3], windows[:, 3:]
    whole = (value == value2) & (count == count2) & (first == second).all(1)
    value = torch.where(whole, value, value ^ value2 ^ 1) % _PRIME
    count = torch.where(whole, count, -1)
    window = torch.where(whole[:, None], first.nan_to_num(), 1.0 + torch.arange(3)).long()
    keep = (~none).long()
    return value * keep, count * keep, window * keep[:, None]


def _store(
    pool: StatePool,
    writes: torch.Tensor,
    value: torch.Tensor,
    count: torch.Tensor,
    window: torch.Tensor,
) -> None:
    """Into each slot; slot 0, of padding, is given the bytes that it has."""
    padding = (writes == 0)[:, None]
    states, windows = pool.states.view(torch.int64), pool.windows.view(torch.int32)
    words = torch.stack([value, count, value, count], 1)
    old = states.index_select(0, writes).flatten(1)
    states.index_copy_(0, writes, torch.where(padding, old, words).view(-1, *states.shape[1:]))
    both = torch.cat([window, window], 1).float().view(torch.int32)
    old = windows.index_select(0, writes).flatten(1)
    windows.index_copy_(0, writes, torch.where(padding, old, both).view(-1, *windows.shape[1:]))
