"""Recency and prefill work, by literal ids and against the definition."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.eviction import Kind
from cache.flop_aware import FlopAware
from cache.saved_states import SavedStates


def path(names):
    return [names[: i + 1].encode() for i in range(len(names))]


def tokens(start, end):
    return float(end - start)


def save(policy, id_, names, *, stride=64):
    policy.saved(id_, len(names) * stride, path(names), Kind.TIP)
    policy.add(id_)


def evicted(policy):
    order = []
    while policy:
        policy.check()
        order.append(policy.evict())
    return order


def test_work_saved_outweighs_recency_by_alpha():
    def filled(alpha):
        policy = FlopAware(alpha, tokens)
        save(policy, 1, "abcdefgh")
        save(policy, 2, "x")
        save(policy, 3, "y")
        return policy

    assert evicted(filled(0.0)) == [1, 2, 3]
    assert evicted(filled(2.0)) == [2, 3, 1]
    with pytest.raises(ValueError, match="alpha must be a finite number >= 0, got -1"):
        FlopAware(-1.0)


def test_recency_is_a_share_of_the_oldest_and_work_one_of_the_mean():
    policy = FlopAware(1.0, tokens)
    for id_, names in enumerate(("abcd", "vw", "xyz"), start=1):
        save(policy, id_, names)
    # 0 + 4/3, 1/2 + 2/3 and 1 + 3/3; then 0 + 8/7 and 1 + 6/7
    assert evicted(policy) == [2, 1, 3]


def test_work_counts_from_the_next_shallower_state():
    policy = FlopAware(50.0, tokens)
    save(policy, 1, "ab")
    save(policy, 2, "abcdef")
    save(policy, 3, "abcdefg")
    save(policy, 4, "xyz")
    assert policy.evict() == 3  # it saves one stride; the others 2, 4 and 3
    assert policy.evict() == 1
    policy.check()
    save(policy, 5, "mnopq")
    assert policy.evict() == 4  # 3 strides against 5 and 6: without 1 all six are saved by 2
    assert policy.evict() == 5


def test_a_state_that_is_in_use_is_weighed_when_it_is_released():
    policy = FlopAware(5.0, tokens)
    save(policy, 1, "ab")
    save(policy, 2, "abc")
    save(policy, 3, "xy")
    policy.discard(2)
    policy.forget(1)
    policy.check()
    policy.add(2)
    assert evicted(policy) == [3, 2]


def test_what_an_id_stood_for_before_does_not_count():
    policy = FlopAware(9.0)
    save(policy, 1, "ab")
    policy.forget(1)
    policy.add(1)
    save(policy, 2, "x")
    assert evicted(policy) == [1, 2]


ALPHAS = [0.0, 0.1, 0.7, 3.0]
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["save", "save", "use", "forget", "evict"]), st.integers(0, 10**6)),
    max_size=60,
)
PATHS = ["a", "ab", "abc", "abcdef", "x", "xyz", "xyzuvw", "p", "pqrstu", "pqx", "pqxy"]


def power_of_two(start, end):
    """Of as many strides as are computed: equal work or another size class."""
    return 2.0 ** ((end - start) // 64)


@settings(max_examples=200)
@given(st.sampled_from(ALPHAS), ACTIONS)
def test_the_lowest_score_of_all_goes(alpha, actions):
    policy, states = FlopAware(alpha, power_of_two), SavedStates()
    released: dict[int, int] = {}
    clock = 0
    in_use: list[int] = []

    def release(id_):
        nonlocal clock
        clock += 1
        policy.add(id_)
        released[id_] = clock

    def score(id_):
        oldest = min(released.values())
        work = {
            each: power_of_two(states.parent_boundary(each), states[each].boundary)
            for each in released
        }
        mean = sum(work.values()) / len(work)
        recency = (released[id_] - oldest) / max(1, clock - oldest)
        return recency + alpha * work[id_] / mean, released[id_]

    for id_, (action, number) in enumerate(actions):
        if action == "save":
            names = path(PATHS[number % len(PATHS)])
            policy.saved(id_, 64 * len(names), names, Kind.TIP)
            states.insert(id_, 64 * len(names), names)
            in_use.append(id_)
            if number % 2:
                release(in_use.pop(0))
        elif action == "use" and released:
            used = sorted(released)[number % len(released)]
            policy.discard(used)
            del released[used]
            in_use.append(used)
        elif action == "forget" and (released or in_use):
            known = [*sorted(released), *in_use]
            gone = known[number % len(known)]
            policy.forget(gone)
            states.remove(gone)
            released.pop(gone, None)
            in_use = [each for each in in_use if each != gone]
        elif action == "evict" and released:
            expected = min(released, key=score)
            assert policy.evict() == expected
            states.remove(expected)
            del released[expected]
        policy.check()
        assert sorted(policy) == sorted(released)
