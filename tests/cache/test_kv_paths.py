"""Which K/V dies with which state: trees of a few segments, by hand, and beside a plain model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.kv_paths import KVPaths


def paths(*states):
    """(state, the one above or None, further blocks) each."""
    found = KVPaths()
    for state, above, blocks in states:
        found.insert(state, above, blocks)
        found.check()
    return found


def test_a_state_needs_all_k_v_above_it_and_a_deeper_one_only_adds_its_own():
    tree = KVPaths()
    assert tree.insert(1, None, [10, 11]) == [10, 11]
    assert tree.insert(2, 1, [12, 13]) == [12, 13]
    assert sorted(tree.blocks()) == [10, 11, 12, 13]
    assert [tree.num_freed_by(state) for state in (1, 2)] == [0, 2]
    assert 1 in tree and 3 not in tree and len(tree) == 2


def test_k_v_deeper_than_the_last_state_dies_with_it_the_deepest_first():
    tree = paths((1, None, [10, 11]), (2, 1, [12, 13]))
    assert tree.remove(2) == [13, 12]
    assert tree.remove(1) == [11, 10]
    assert list(tree.blocks()) == []


def test_k_v_above_a_deeper_state_outlives_the_one_between():
    tree = paths((1, None, [10, 11]), (2, 1, [12, 13]), (3, 2, [14]))
    assert tree.remove(2) == []
    tree.check()
    assert tree.num_freed_by(3) == 3
    assert tree.remove(3) == [14, 13, 12]
    assert tree.remove(1) == [11, 10]


def test_what_two_paths_share_dies_with_the_second():
    tree = paths((1, None, [10, 11, 12]), (2, None, [10, 11, 20]))
    assert [tree.num_freed_by(state) for state in (1, 2)] == [1, 1]
    assert tree.remove(1) == [12]
    tree.check()
    assert tree.num_freed_by(2) == 3
    assert tree.remove(2) == [20, 11, 10]


def test_the_last_state_below_a_fork_takes_the_part_above_it_along():
    tree = paths((9, None, [1]), (1, 9, [10, 11]), (2, 9, [10, 20]), (3, 9, [10, 30]))
    assert tree.remove(1) == [11]
    assert tree.remove(3) == [30]
    tree.check()
    assert tree.remove(2) == [20, 10]
    assert list(tree.blocks()) == [1]


def test_a_state_between_others_adds_no_block_and_keeps_what_it_needs():
    tree = paths((1, None, [10, 11, 12]))
    assert tree.insert(2, None, [10]) == []
    tree.check()
    assert tree.remove(1) == [12, 11]
    assert tree.remove(2) == [10]


def test_two_states_at_one_depth_each_keep_its_k_v():
    tree = paths((1, None, [10]))
    assert tree.insert(2, None, [10]) == []
    assert tree.num_freed_by(1) == tree.num_freed_by(2) == 0
    assert tree.remove(1) == []
    assert tree.num_freed_by(2) == 1
    assert tree.remove(2) == [10]


def test_needing_names_the_states_at_and_below_a_block():
    tree = paths((1, None, [10]), (2, 1, [11, 12]), (3, 2, [13]), (4, 1, [11, 20]), (5, None, [9]))
    assert sorted(tree.needing(12)) == [2, 3]
    assert sorted(tree.needing(11)) == [2, 3, 4]
    assert sorted(tree.needing(10)) == [1, 2, 3, 4]


def test_grown_are_the_states_that_now_free_more():
    tree = paths((1, None, [10]), (2, 1, [11]), (3, 2, [12]), (4, 2, [13]))
    tree.remove(2)  # a fork is left: 3 and 4 free what they did
    assert tree.grown == []
    tree.remove(4)
    assert tree.grown == [3] and tree.num_freed_by(3) == 2
    tree.remove(3)
    assert tree.grown == [1] and tree.num_freed_by(1) == 1


@pytest.mark.parametrize(
    ("state", "blocks", "message"), [(1, [5], "inserted twice"), (2, [], "stands where 1 does")]
)
def test_misuse_is_told(state, blocks, message):
    tree = paths((1, None, [10]))
    with pytest.raises(AssertionError, match=message):
        tree.insert(state, 1, blocks)


class PathsBesideADict(RuleBasedStateMachine):
    """A model that knows each state's whole path; block ids are prefixes themselves, numbered."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = KVPaths()
        self.path_of: dict[int, list[int]] = {}
        self.ids: dict[tuple[int, ...], int] = {}
        self.num_states = 0

    def blocks(self, text: list[int]) -> list[int]:
        prefixes = [tuple(text[: end + 1]) for end in range(len(text))]
        return [self.ids.setdefault(prefix, len(self.ids)) for prefix in prefixes]

    def needed(self) -> set[int]:
        return {block for path in self.path_of.values() for block in path}

    @rule(text=st.lists(st.integers(0, 1), min_size=1, max_size=6), data=st.data())
    def insert(self, text: list[int], data: st.DataObject) -> None:
        path = self.blocks(text)
        above = [s for s, p in self.path_of.items() if len(p) < len(path) and p == path[: len(p)]]
        chosen = data.draw(st.sampled_from([None, *sorted(above)]))
        start = 0 if chosen is None else len(self.path_of[chosen])
        before = self.needed()
        self.num_states += 1
        new = self.tree.insert(self.num_states, chosen, path[start:])
        self.path_of[self.num_states] = path
        assert new == [block for block in path if block not in before]

    @precondition(lambda self: self.path_of)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        state = data.draw(st.sampled_from(sorted(self.path_of)))
        path = self.path_of.pop(state)
        left = self.needed()
        assert self.tree.remove(state) == [b for b in reversed(path) if b not in left]

    @precondition(lambda self: self.needed())
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.needed())))
        needing = [state for state, path in self.path_of.items() if block in path]
        assert sorted(self.tree.needing(block)) == sorted(needing)

    @invariant()
    def agrees(self) -> None:
        self.tree.check()
        assert set(self.tree.blocks()) == self.needed()
        for state, path in self.path_of.items():
            others = {b for s, p in self.path_of.items() if s != state for b in p}
            assert self.tree.num_freed_by(state) == len([b for b in path if b not in others])


TestPathsBesideADict = PathsBesideADict.TestCase
TestPathsBesideADict.settings = settings(max_examples=60, stateful_step_count=30)
