"""Eviction policies by name, as settings and results write them."""

import re

from cache.eviction import EvictionPolicy, Flops, Lru, LruCapPerPath, prefill_flops
from cache.flop_aware import FlopAware
from cache.shared_memory import SharedMemory
from cache.sized_value_index import SizedValueIndex
from cache.value_index import ValueIndex


def parse_policy(
    text: str,
    flops: Flops = prefill_flops,
    memory: SharedMemory | None = None,
    *,
    tokens_per_page: float = 1.0,
) -> EvictionPolicy:
    """A new policy: "lru", "lru_cap_per_path(N)", "flop_aware(ALPHA)" or "value"; ValueError.

    flops: what a prefill costs, for those that weigh it. memory: what its states lie in, if K/V
    lies there too, `tokens_per_page` in a page: then "value" is value a page.
    """
    if text == "lru":
        return Lru()
    if text == "value" and memory is not None:
        return SizedValueIndex(memory, tokens_per_page, flops)
    if text == "value":
        return ValueIndex(flops)
    if found := re.fullmatch(r"lru_cap_per_path\((\d+)\)", text):
        return LruCapPerPath(int(found[1]))
    if found := re.fullmatch(r"flop_aware\((\d+(?:\.\d+)?)\)", text):
        return FlopAware(float(found[1]), flops)
    raise ValueError("must be lru, lru_cap_per_path(N), flop_aware(ALPHA) or value")
