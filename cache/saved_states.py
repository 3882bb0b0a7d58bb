"""Which saved states lie on one path? A forest: the parent of a state is the next shallower one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cache.hashing import PrefixHash


@dataclass
class SavedState:
    """boundary: tokens it stands for. key: of its prefix, the last of `depth` keys.

    parent: the id of the next shallower state of the same prefix that is still there.
    """

    boundary: int
    key: PrefixHash
    depth: int
    parent: int | None = None
    children: set[int] = field(default_factory=set)


class SavedStates:
    """id -> state, while it is published.

    The parent is looked for when a state is inserted. A state that comes between two others is not
    known to the deeper one before `relink`; until then that one's parent is shallower than it need
    be.

    Invariants, checked by `check()`:
    1. a parent is shallower than its children, which name it and are named by it.
    2. each state is found by its key; of several with one key the last one inserted is.
    """

    def __init__(self) -> None:
        self._states: dict[int, SavedState] = {}
        self._by_key: dict[PrefixHash, int] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, id_: object) -> bool:
        return id_ in self._states

    def __getitem__(self, id_: int) -> SavedState:
        return self._states[id_]

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def clear(self) -> None:
        self._states.clear()
        self._by_key.clear()

    def insert(self, id_: int, boundary: int, keys: Sequence[PrefixHash]) -> SavedState:
        """A state of the prefix whose strides have `keys`. O(strides to the next shallower)."""
        assert id_ not in self._states, f"state {id_} inserted twice"
        state = self._states[id_] = SavedState(boundary, keys[-1], len(keys))
        self._by_key[state.key] = id_
        self._attach(id_, self._parent_of(state, keys))
        return state

    def relink(self, id_: int, keys: Sequence[PrefixHash]) -> None:
        """Look for the parent again: `keys` begin with those of the state's own prefix."""
        state = self._states[id_]
        parent = self._parent_of(state, keys)
        if parent != state.parent:
            self._detach(id_)
            self._attach(id_, parent)

    def remove(self, id_: int) -> SavedState | None:
        """Its children go to its parent. None if it is not there."""
        state = self._states.get(id_)
        if state is None:
            return None
        for child in sorted(state.children):
            self._detach(child)
            self._attach(child, state.parent)
        self._detach(id_)
        del self._states[id_]
        if self._by_key.get(state.key) == id_:
            del self._by_key[state.key]
        return state

    def parent_boundary(self, id_: int) -> int:
        """Where a prompt with this prefix would resume without this state."""
        parent = self._states[id_].parent
        return 0 if parent is None else self._states[parent].boundary

    def path(self, id_: int) -> list[int]:
        """The state and those above it, the deepest first."""
        found: list[int] = []
        above: int | None = id_
        while above is not None:
            found.append(above)
            above = self._states[above].parent
        return found

    def _parent_of(self, state: SavedState, keys: Sequence[PrefixHash]) -> int | None:
        assert keys[state.depth - 1] == state.key, "keys of another prefix"
        for index in range(state.depth - 2, -1, -1):
            if keys[index] in self._by_key:
                return self._by_key[keys[index]]
        return None

    def _attach(self, id_: int, parent: int | None) -> None:
        self._states[id_].parent = parent
        if parent is not None:
            self._states[parent].children.add(id_)

    def _detach(self, id_: int) -> None:
        parent = self._states[id_].parent
        self._states[id_].parent = None
        if parent is not None:
            self._states[parent].children.discard(id_)

    def check(self) -> None:
        for id_, state in self._states.items():
            if state.parent is not None:
                parent = self._states[state.parent]
                assert parent.boundary < state.boundary and id_ in parent.children
            assert all(self._states[child].parent == id_ for child in state.children)
        for key, id_ in self._by_key.items():
            assert self._states[id_].key == key, f"state {id_} is found by another key"
