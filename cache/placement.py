"""Which boundaries of a prompt become checkpoints?"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from cache.eviction import Kind


@dataclass(frozen=True)
class Prompt:
    """end: the last grid boundary below the final token. branch: where it leaves a path that
    another prompt took, as far as its K/V is cached; 0: nowhere. Both in tokens, on the grid."""

    end: int
    branch: int


class Placement(Protocol):
    def boundaries(self, start: int, end: int, prompt: Prompt) -> dict[int, Kind]:
        """The boundaries in (start, end] to save, and why each is saved."""


@dataclass(frozen=True)
class Every:
    """At every multiple of `step` tokens."""

    step: int

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step must be at least 1, got {self.step}")

    def boundaries(self, start: int, end: int, prompt: Prompt) -> dict[int, Kind]:
        first = (start // self.step + 1) * self.step
        return dict.fromkeys(range(first, end + 1, self.step), Kind.COMB)


@dataclass(frozen=True)
class PromptEnd:
    """At the last grid boundary below the final token: the same prompt again costs one stride."""

    def boundaries(self, start: int, end: int, prompt: Prompt) -> dict[int, Kind]:
        return {prompt.end: Kind.TIP} if start < prompt.end <= end else {}


@dataclass(frozen=True)
class Branch:
    """Where prompts part: the next one with this prefix finds a state there."""

    def boundaries(self, start: int, end: int, prompt: Prompt) -> dict[int, Kind]:
        return {prompt.branch: Kind.BRANCH} if start < prompt.branch <= end else {}


@dataclass(frozen=True)
class Combined:
    """At all boundaries of its parts; of a boundary that several name the last one says why."""

    parts: tuple[Placement, ...]

    def boundaries(self, start: int, end: int, prompt: Prompt) -> dict[int, Kind]:
        found: dict[int, Kind] = {}
        for part in self.parts:
            found |= part.boundaries(start, end, prompt)
        return found


def combined(every: int | None, *, prompt_end: bool = True, branch: bool = True) -> Combined:
    """The usual ones together. every: tokens; None: none on the way."""
    parts: list[Placement] = [] if every is None else [Every(every)]
    parts += [Branch()] if branch else []
    parts += [PromptEnd()] if prompt_end else []
    return Combined(tuple(parts))


_RULE = "must be prompt_end, branch, every(N) and comb(N), N a multiple of chunk_stride, with '+'"


def parse_placement(text: str, chunk_stride: int) -> Combined:
    """A placement of its name, as "prompt_end+branch+comb(8192)"; ValueError for another text.

    every(N) and comb(N) are the same.
    """
    names = [name.strip() for name in text.split("+")]
    steps = [re.fullmatch(r"(?:every|comb)\((\d+)\)", name) for name in names]
    numbers = [int(found[1]) for found in steps if found is not None]
    words = {name for name, found in zip(names, steps, strict=True) if found is None}
    on_grid = all(number >= 1 and number % chunk_stride == 0 for number in numbers)
    if not on_grid or words - {"prompt_end", "branch"} or len(set(names)) != len(names):
        raise ValueError(f"{_RULE}; got {text!r} with chunk_stride={chunk_stride}")
    last = combined(None, prompt_end="prompt_end" in words, branch="branch" in words)
    return Combined((*_every(numbers), *last.parts))


def _every(numbers: Iterable[int]) -> list[Placement]:
    return [Every(number) for number in numbers]
