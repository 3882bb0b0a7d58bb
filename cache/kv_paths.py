"""Which K/V blocks does a saved state need? A tree of segments between states and forks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Segment:
    """blocks: K/V blocks after those of `parent`, the first one first.

    states: those that stand at its end. children: by their first block.
    """

    blocks: list[int]
    parent: "_Segment | None"
    states: set[int] = field(default_factory=set)
    children: dict[int, "_Segment"] = field(default_factory=dict)


class KVPaths:
    """id of a state -> the K/V blocks [0, boundary) that it can't be restored without.

    A block that lies in the tree is needed by a state at its depth or deeper; all others are dead.
    grown: the states that free more since the last `remove`, and because of it.

    Invariants, checked by `check()`:
    1. no block lies in two segments, and none is empty but the root.
    2. a segment other than the root ends in a state or a fork; a leaf ends in a state.
    3. parents and children name each other, a child by its first block.
    4. each state is found at the segment that it stands at the end of.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.grown: list[int] = []
        self._root = _Segment([], None)
        self._end_of: dict[int, _Segment] = {}

    def __len__(self) -> int:
        return len(self._end_of)

    def __contains__(self, state: object) -> bool:
        return state in self._end_of

    def insert(self, state: int, above: int | None, blocks: Sequence[int]) -> list[int]:
        """Add a state whose path goes on from that of `above` (None: from token 0) with `blocks`.

        Returns the blocks that were dead until now. O(len(blocks)).
        """
        assert state not in self._end_of, f"state {state} inserted twice"
        assert blocks, f"state {state} stands where {above} does"
        at = self._root if above is None else self._end_of[above]
        done = 0
        while done < len(blocks) and blocks[done] in at.children:
            child = at.children[blocks[done]]
            common = _num_equal(child.blocks, blocks, done)
            at = child if common == len(child.blocks) else self._split(child, common)
            done += common
        new = list(blocks[done:])
        if new:
            at.children[new[0]] = at = _Segment(new, at)
        at.states.add(state)
        self._end_of[state] = at
        return new

    def remove(self, state: int) -> list[int]:
        """Take a state out. Returns the blocks that are dead from now on, the deepest first."""
        at = self._end_of.pop(state)
        at.states.remove(state)
        dead: list[int] = []
        if at.parent is not None and not at.states and not at.children:
            dead += reversed(at.blocks)
            del at.parent.children[at.blocks[0]]
            at = at.parent  # it has a state, or is a fork with one child at least
        if at.parent is not None and not at.states and len(at.children) == 1:
            self._join_with_child(at)
        self.grown = [] if at.children else sorted(at.states)
        return dead

    def num_freed_by(self, state: int) -> int:
        """Blocks that only this state needs. O(1)."""
        at = self._end_of[state]
        alone = len(at.states) == 1 and not at.children
        return len(at.blocks) if alone else 0

    def needing(self, block: int) -> list[int]:
        """The states that need a block, in no order. O(blocks in the tree)."""
        first = next(at for at in self._segments() if block in at.blocks)
        found: list[int] = []
        below = [first]
        while below:
            at = below.pop()
            found += at.states
            below += at.children.values()
        return found

    def blocks(self) -> Iterator[int]:
        """Every block that is needed."""
        for at in self._segments():
            yield from at.blocks

    def _segments(self) -> Iterator[_Segment]:
        left = [self._root]
        while left:
            at = left.pop()
            yield at
            left += at.children.values()

    def _split(self, lower: _Segment, length: int) -> _Segment:
        """Cut a segment after `length` blocks; returns the upper part, which has no state."""
        assert lower.parent is not None
        upper = _Segment(lower.blocks[:length], lower.parent)
        lower.blocks = lower.blocks[length:]
        upper.parent.children[upper.blocks[0]] = upper  # type: ignore[union-attr]
        upper.children[lower.blocks[0]] = lower
        lower.parent = upper
        return upper

    def _join_with_child(self, at: _Segment) -> None:
        [child] = at.children.values()
        at.blocks += child.blocks
        at.states, at.children = child.states, child.children
        for grandchild in at.children.values():
            grandchild.parent = at
        for state in at.states:
            self._end_of[state] = at

    def check(self) -> None:
        blocks = list(self.blocks())
        assert len(set(blocks)) == len(blocks), "a block lies in two segments"
        states = 0
        for at in self._segments():
            states += len(at.states)
            for first, child in at.children.items():
                assert child.parent is at and child.blocks[0] == first
            if at is not self._root:
                assert at.states or len(at.children) > 1, "neither a state nor a fork"
            assert all(self._end_of[state] is at for state in at.states)
        assert states == len(self._end_of), "a state is lost"


def _num_equal(these: Sequence[int], those: Sequence[int], offset: int) -> int:
    """How many of `these` are those from `offset` on, up to the first that is not."""
    most = min(len(these), len(those) - offset)
    return next((i for i in range(most) if these[i] != those[offset + i]), most)
