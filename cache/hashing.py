"""Chained prefix hashes: XXH3-128 over (parent, tokens, multimodal items), one chain a domain.

The key of chunk i stands for the whole prefix up to its end, its namespace and its domain. The K/V
blocks and the linear states each have a domain of their own (`HashDomain`), whose name and step
enter the root of the chain: a key stored under one domain is never found under the other.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from typing import NewType

import xxhash

PrefixHash = NewType("PrefixHash", bytes)
"""16 bytes; identifies one prefix inside one domain and namespace."""

TOKEN_TYPECODE = "I"
"""Tokens are kept as unsigned 32-bit arrays, so that a chunk hashes without a conversion."""


@dataclass(frozen=True)
class Namespace:
    """Who may share prefixes with whom: equal namespaces do, others never see each other."""

    model_fingerprint: str = ""
    adapter_id: str = ""
    cache_salt: str = ""


@dataclass(frozen=True)
class MultimodalItem:
    """Image, audio or video whose placeholder tokens are [start, start + length) of the prompt."""

    content_hash: bytes
    start: int
    length: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < 1 or not self.content_hash:
            raise ValueError(
                f"multimodal item needs start >= 0, length >= 1 and a content hash, got {self}"
            )


def _digest(seed: int, *parts: bytes) -> bytes:
    h = xxhash.xxh3_128(seed=seed)
    for part in parts:
        h.update(len(part).to_bytes(8, "little"))  # length first: ("ab", "c") is not ("a", "bc")
        h.update(part)
    return h.digest()


class Provenance(Enum):
    """How a state or K/V came to be: both are exact mathematics, only PREFILL repeats a prefill's
    bits. DECODE: a decode step wrote it, or a prefill that went on from something decoded."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def accepted(self) -> tuple["Provenance", ...]:
        """What serves where this is asked for, the better first."""
        both = (Provenance.PREFILL, Provenance.DECODE)
        return both[:1] if self is Provenance.PREFILL else both


def tail_key(key: PrefixHash, index: int) -> PrefixHash:
    """Where the K/V block `index`, counted after the last whole stride, of a whole prompt is."""
    return PrefixHash(_digest(0, key, b"tail block", index.to_bytes(8, "little")))


def filed_under(key: PrefixHash, provenance: Provenance) -> PrefixHash:
    """Where content of this prefix and provenance is filed: the two never hide each other."""
    return key if provenance is Provenance.PREFILL else PrefixHash(_digest(0, key, b"decode"))


@dataclass(frozen=True)
class HashDomain:
    """One chain: `name` ("kv" or "linear"), `step` tokens a key, `seed` of the process group."""

    name: str
    step: int
    seed: int = 0

    def root(self, namespace: Namespace) -> PrefixHash:
        """Parent of the first key."""
        return PrefixHash(
            _digest(
                self.seed,
                self.name.encode(),
                self.step.to_bytes(8, "little"),
                namespace.model_fingerprint.encode(),
                namespace.adapter_id.encode(),
                namespace.cache_salt.encode(),
            )
        )

    def extend(
        self,
        chain: list[PrefixHash],
        root: PrefixHash,
        token_ids: array,
        num_tokens: int,
        items: Seq[MultimodalItem] = (),
    ) -> None:
        """Append to `chain` the keys of all whole steps of token_ids[:num_tokens] it lacks."""
        assert token_ids.typecode == TOKEN_TYPECODE, f"tokens of type {token_ids.typecode!r}"
        for index in range(len(chain), num_tokens // self.step):
            start = index * self.step
            end = start + self.step
            parent = chain[-1] if chain else root
            extra = _overlapping(items, start, end)
            chunk = token_ids[start:end].tobytes()
            chain.append(PrefixHash(_digest(self.seed, parent, chunk, *extra)))

    def whole(
        self,
        chain: Seq[PrefixHash],
        root: PrefixHash,
        token_ids: array,
        num_tokens: int,
        items: Seq[MultimodalItem] = (),
    ) -> PrefixHash:
        """The key of token_ids[:num_tokens] as a whole prompt; `chain` has all its whole steps.

        Never that of a prefix: what is kept of a prompt that ended here is found by it alone.
        """
        num_steps = num_tokens // self.step
        start = num_steps * self.step
        parent = chain[num_steps - 1] if num_steps else root
        length, rest = num_tokens.to_bytes(8, "little"), token_ids[start:num_tokens].tobytes()
        extra = _overlapping(items, start, num_tokens)
        return PrefixHash(_digest(self.seed, b"whole prompt", parent, length, rest, *extra))


def _overlapping(items: Seq[MultimodalItem], start: int, end: int) -> list[bytes]:
    """What the items that touch [start, end) add to its key."""
    return [
        item.content_hash + (item.start - start).to_bytes(8, "little", signed=True)
        for item in items
        if item.start < end and start < item.start + item.length
    ]
