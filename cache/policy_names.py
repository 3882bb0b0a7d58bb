"""Eviction policies by name, as settings and results write them."""

import re
from collections.abc import Callable

from cache.eviction import EvictionPolicy, FlopAware, Lru, LruCapPerPath
from cache.value_index import ValueIndex

_PLAIN: dict[str, Callable[[], EvictionPolicy]] = {"lru": Lru, "value": ValueIndex}


def parse_policy(text: str) -> EvictionPolicy:
    """A new policy: "lru", "lru_cap_per_path(N)", "flop_aware(ALPHA)" or "value"; ValueError."""
    if text in _PLAIN:
        return _PLAIN[text]()
    if found := re.fullmatch(r"lru_cap_per_path\((\d+)\)", text):
        return LruCapPerPath(int(found[1]))
    if found := re.fullmatch(r"flop_aware\((\d+(?:\.\d+)?)\)", text):
        return FlopAware(float(found[1]))
    raise ValueError(
        f"must be lru, lru_cap_per_path(N), flop_aware(ALPHA) or value; got {text!r}",
    )
