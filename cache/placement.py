"""Which boundaries of a prompt become checkpoints?"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cache.eviction import Kind

MARGIN = 64  # tokens at the end of a prompt that the next turn often replaces
CHECKPOINT_EVERY = 8192  # tokens
USUAL = f"prompt_end({MARGIN})+prompt_end+branch+comb({CHECKPOINT_EVERY})"
"""What an engine saves that is told nothing else; `experiments.policies` says what it is worth."""


@dataclass(frozen=True)
class Prompt:
    """What a placement knows of a prompt. All in tokens.

    stride: of the grid. branch: where it leaves a path that another prompt took, as far as its K/V
    is cached; 0: nowhere. resumed: the boundary of the state it went on from; 0: none.
    """

    num_tokens: int
    stride: int
    branch: int = 0
    resumed: int = 0

    def last_boundary(self, before: int = 0) -> int:
        """The last grid boundary below the final token and not above the `before` last ones.

        Of a prompt too short for that, the last one below its final token.
        """
        final = max(0, self.num_tokens - 1)
        return self._down(max(0, final - before)) or self._down(final)

    def _down(self, num_tokens: int) -> int:
        return num_tokens // self.stride * self.stride


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
    """At the last grid boundary below the final token: the same prompt again costs one stride.

    before: so many tokens above it, at least. The next turn often replaces the last few tokens (a
    template's cue to answer, a reminder): a state that holds them is of no use to it. kind: END
    where another one is saved above it.
    """

    before: int = 0
    kind: Kind = Kind.TIP

    def boundaries(self, start: int, end: int, prompt: Prompt) -> dict[int, Kind]:
        last = prompt.last_boundary(self.before)
        return {last: self.kind} if start < last <= end else {}


@dataclass(frozen=True)
class Branch:
    """Where prompts part: the next one with this prefix finds a state there.

    apart: unless the prompt resumes no more than so many tokens above. Every turn does that whose
    predecessor saved its state before its end.
    """

    apart: int = 0

    def boundaries(self, start: int, end: int, prompt: Prompt) -> dict[int, Kind]:
        gains = prompt.branch - prompt.resumed > self.apart
        return {prompt.branch: Kind.BRANCH} if gains and start < prompt.branch <= end else {}


@dataclass(frozen=True)
class Combined:
    """At all boundaries of its parts; of a boundary that several name the last one says why.

    whole_prompt: also what an identical prompt needs (`cache.whole_prompt`), at no grid boundary.
    """

    parts: tuple[Placement, ...]
    whole_prompt: bool = False

    def boundaries(self, start: int, end: int, prompt: Prompt) -> dict[int, Kind]:
        found: dict[int, Kind] = {}
        for part in self.parts:
            found |= part.boundaries(start, end, prompt)
        return found


def combined(every: int | None, *, branch: bool = True, ends: Sequence[int] = (0,)) -> Combined:
    """The usual ones together. every: tokens; None: none on the way.

    ends: tokens above prompt ends. The farthest of them is the tip.
    """
    parts: list[Placement] = [] if every is None else [Every(every)]
    farthest = max(ends, default=0)
    parts += [Branch(farthest)] if branch else []
    parts += [PromptEnd(n, Kind.TIP if n == farthest else Kind.END) for n in sorted(ends)]
    return Combined(tuple(parts))


def usual(every: int) -> Combined:
    """`USUAL` with another comb."""
    return combined(every, ends=(0, MARGIN))


def parse_placement(text: str, chunk_stride: int) -> Combined:
    """A placement of its name, as "prompt_end(64)+branch+comb(8192)"; ValueError for another text.

    every(N) and comb(N) are the same, and prompt_end is prompt_end(0).
    """
    names = [name.strip() for name in text.split("+")]
    numbers: dict[str, list[int]] = {
        "branch": [],
        "prompt_end": [],
        "whole_prompt": [],
        "comb": [],
    }
    for name in names:
        word, number = _read(name, chunk_stride)
        if number in numbers[word]:
            raise ValueError(_rule(chunk_stride))
        numbers[word].append(number)
    rest = combined(None, branch=bool(numbers["branch"]), ends=numbers["prompt_end"])
    parts = (*(Every(number) for number in numbers["comb"]), *rest.parts)
    return Combined(parts, whole_prompt=bool(numbers["whole_prompt"]))


def _read(name: str, chunk_stride: int) -> tuple[str, int]:
    """The word and the number of one part."""
    if name in ("branch", "prompt_end", "whole_prompt"):
        return name, 0
    found = re.fullmatch(r"(every|comb|prompt_end)\((\d+)\)", name)
    if found is None:
        raise ValueError(_rule(chunk_stride))
    number = int(found[2])
    if found[1] == "prompt_end":
        return "prompt_end", number
    if number < 1 or number % chunk_stride:
        raise ValueError(_rule(chunk_stride))
    return "comb", number


def _rule(chunk_stride: int) -> str:
    return (
        "must be prompt_end, prompt_end(TOKENS), branch, whole_prompt, every(N) and comb(N), no "
        f"part twice, with '+' between them, N a multiple of chunk_stride={chunk_stride}"
    )
