"""Who goes first, by literal ids."""

import pytest

from cache.admission import admitted
from cache.eviction import FlopAware, Kind, Lru, LruCapPerPath, prefill_flops
from cache.policy_names import parse_policy
from cache.reuse_hazard import AGE_EDGES, ReuseHazard, age_bucket
from cache.saved_states import SavedStates
from cache.value_index import ValueIndex


def path(*names):
    return [name.encode() for name in names]


def evicted(policy):
    return [policy.evict() for _ in range(len(policy))]


def save(policy, id_, keys, kind=Kind.TIP, *, stride=64):
    policy.saved(id_, len(keys) * stride, keys, kind)
    policy.add(id_)


@pytest.mark.parametrize("policy", [Lru(), LruCapPerPath(2), FlopAware(0.5), ValueIndex()])
def test_ids_of_which_nothing_is_known_go_in_the_order_of_their_release(policy):
    for id_ in (3, 1, 2, 5):
        policy.add(id_)
    policy.discard(1)
    policy.add(1)
    policy.forget(2)
    assert 3 in policy and 2 not in policy and set(policy) == {1, 3, 5}
    policy.check()
    assert evicted(policy) == [3, 5, 1]


@pytest.mark.parametrize("policy", [Lru(), LruCapPerPath(2), FlopAware(0.5), ValueIndex()])
def test_clear_forgets_every_id(policy):
    save(policy, 1, path("a"))
    policy.clear()
    assert len(policy) == 0 and 1 not in policy
    save(policy, 1, path("a"))
    policy.check()
    assert evicted(policy) == [1]


def test_more_states_on_a_path_than_the_cap_go_before_older_ones_of_others():
    policy = LruCapPerPath(2)
    save(policy, 1, path("x"))
    save(policy, 2, path("a"))
    save(policy, 3, path("a", "b"))
    save(policy, 4, path("a", "b", "c"))
    policy.check()
    assert evicted(policy) == [2, 1, 3, 4]


def test_a_path_within_the_cap_is_plain_lru():
    policy = LruCapPerPath(2)
    for id_, keys in ((1, path("a")), (2, path("x")), (3, path("a", "b"))):
        save(policy, id_, keys)
    assert evicted(policy) == [1, 2, 3]
    with pytest.raises(ValueError, match="cap must be at least 1, got 0"):
        LruCapPerPath(0)


def test_work_saved_outweighs_recency_by_alpha():
    def filled(alpha):
        policy = FlopAware(alpha, lambda start, end: float(end - start))
        save(policy, 1, path(*"abcdefgh"))
        save(policy, 2, path("x"))
        save(policy, 3, path("y"))
        return policy

    assert evicted(filled(0.0)) == [1, 2, 3]
    assert evicted(filled(2.0)) == [2, 3, 1]
    with pytest.raises(ValueError, match="alpha must be a finite number >= 0, got -1"):
        FlopAware(-1.0)


def test_the_prefill_cost_is_that_of_the_9b_model():
    assert prefill_flops(0, 1) == 13.98e9 + 65_536
    assert prefill_flops(64, 128) == 13.98e9 * 64 + 65_536 * (128**2 - 64**2)
    assert prefill_flops(0, 100) + prefill_flops(100, 300) == prefill_flops(0, 300)


def test_policies_are_made_by_name():
    assert type(parse_policy("lru")) is Lru
    assert parse_policy("lru_cap_per_path(3)").cap == 3
    assert parse_policy("flop_aware(0.25)").alpha == 0.25
    assert type(parse_policy("value")) is ValueIndex
    for text in ("", "LRU", "lru_cap_per_path", "flop_aware(x)", "value "):
        with pytest.raises(ValueError, match=r"must be lru, .* got"):
            parse_policy(text)


# ---- what is saved on which path


def test_a_removed_state_leaves_its_children_to_its_parent():
    states = SavedStates()
    states.insert(1, 64, path("a"))
    states.insert(2, 128, path("a", "b"))
    states.insert(3, 192, path("a", "b", "c"))
    assert states.path(3) == [3, 2, 1] and states.parent_boundary(3) == 128
    states.remove(2)
    states.check()
    assert states.path(3) == [3, 1] and states.parent_boundary(3) == 64
    states.remove(1)
    assert states.parent_boundary(3) == 0 and states.remove(1) is None


def test_a_state_between_two_others_is_found_by_relinking():
    states = SavedStates()
    states.insert(1, 64, path("a"))
    states.insert(3, 192, path("a", "b", "c"))
    states.insert(2, 128, path("a", "b"))
    assert states[3].parent == 1
    states.relink(3, path("a", "b", "c", "d"))
    states.check()
    assert states[3].parent == 2 and states[1].children == {2}


# ---- hazards


def test_ages_fall_into_two_buckets_an_octave():
    assert [age_bucket(age) for age in (0, 1, 2, 3, 4, 6, 8)] == [0, 1, 3, 4, 5, 6, 7]
    for age in range(1, 5000):
        assert AGE_EDGES[age_bucket(age)] <= age * (1 + 1e-12) < AGE_EDGES[age_bucket(age) + 1] * 2


def test_before_anything_is_seen_the_rank_falls_with_age():
    ranks = ReuseHazard().ranks([])
    assert ranks[1:20] == sorted(ranks[1:20], reverse=True)


def test_what_is_used_at_an_age_ranks_high_until_then_and_low_after():
    hazard = ReuseHazard()
    for _ in range(100):
        hazard.observe(10, used=True)
        hazard.observe(1000, used=False)
    ranks = hazard.ranks([])
    assert ranks[age_bucket(9)] > ranks[age_bucket(1)] > 10 * ranks[age_bucket(20)]


def test_states_that_are_still_waiting_count_as_not_used_so_far():
    hazard = ReuseHazard()
    hazard.observe(10, used=True)
    assert hazard.ranks([500] * 50)[3] < hazard.ranks([])[3] / 5


# ---- the value index


def test_of_equal_kind_and_age_the_one_that_saves_least_work_goes_first():
    policy = ValueIndex()
    save(policy, 1, path("a", "b", "c"))
    save(policy, 2, path("x"))
    save(policy, 3, path("y", "z"))
    policy.check()
    assert evicted(policy) == [2, 3, 1]


def test_a_state_is_worth_only_what_the_one_above_it_does_not_give():
    policy = ValueIndex()
    save(policy, 1, path("a", "b", "c"), Kind.BRANCH)
    save(policy, 2, path("a", "b", "c", "d"), Kind.BRANCH)
    save(policy, 3, path("x", "y"), Kind.BRANCH)
    assert evicted(policy) == [2, 3, 1]


def test_a_state_gains_when_the_one_above_it_has_gone():
    policy = ValueIndex()
    save(policy, 1, path("a", "b", "c"), Kind.BRANCH)
    save(policy, 2, path("a", "b", "c", "d"), Kind.BRANCH)
    save(policy, 3, path("x", "y"), Kind.BRANCH)
    policy.forget(1)
    policy.check()
    assert evicted(policy) == [3, 2]


def test_a_tip_that_a_prompt_went_on_from_is_superseded_and_a_second_one_makes_it_a_branch():
    policy = ValueIndex()
    save(policy, 1, path("a"))
    policy.request(path("a"), 1)
    save(policy, 2, path("a", "b"))
    assert policy._live[1].kind is Kind.SUPERSEDED and policy._live[2].kind is Kind.TIP
    policy.request(path("a"), 1)
    assert policy._live[1].kind is Kind.BRANCH
    policy.check()


def test_an_older_state_goes_before_a_younger_one_that_saves_a_little_less():
    policy = ValueIndex()
    save(policy, 1, path("a", "b"))
    for _ in range(64):
        policy.request([], None)
    save(policy, 2, path("x"))
    assert evicted(policy) == [1, 2]


def test_an_evicted_state_is_still_observed_and_comes_back_as_what_it_was():
    policy = ValueIndex()
    save(policy, 1, path("a"), Kind.BRANCH)
    assert policy.evict() == 1
    policy.request(path("a"), None)
    save(policy, 2, path("a"), Kind.COMB)
    assert policy._live[2].kind is Kind.BRANCH
    policy.check()


# ---- admission


class Priced(Lru):
    """A state costs its distance to the one above; the old ones cost 10, 20, 30, ..."""

    selective = True

    def worth(self, boundary, above, kind):
        return boundary - above

    def least_worth(self):
        return 10.0 * (1 + min(self))


def admit(points, policy, *, room=9, free=0):
    slots = iter(range(100, 100 + free))
    taken = []

    def allocate():
        taken.append(next(slots, None) or policy.evict())
        return taken[-1]

    found = admitted(
        dict.fromkeys(points, Kind.COMB),
        base=0,
        policy=policy,
        room=room,
        num_free=free,
        allocate=allocate,
    )
    assert sorted(found.values()) == sorted(taken)
    return found


def priced(count):
    policy = Priced()
    for id_ in range(count):
        policy.add(id_)
    return policy


@pytest.mark.parametrize(
    ("points", "old", "room", "free", "expected"),
    [
        ([5, 30], 5, 9, 0, {30: 0}),
        ([15, 40], 5, 9, 0, {40: 0}),
        ([25, 60], 5, 9, 0, {60: 0, 25: 1}),
        ([4, 8, 12], 5, 9, 0, {}),
        ([4, 8, 12], 5, 9, 2, {12: 100, 8: 101}),
        ([4, 8], 5, 9, 2, {8: 100, 4: 101}),
        ([30, 60], 1, 1, 0, {60: 0}),
        ([30, 60], 0, 0, 0, {}),
    ],
)
def test_new_and_old_states_compete_until_all_fit(points, old, room, free, expected):
    assert admit(points, priced(old), room=room, free=free) == expected


def test_without_selection_the_deepest_ones_get_what_room_there_is():
    policy = Lru()
    for id_ in (1, 2):
        policy.add(id_)
    assert admit([4, 8, 12], policy, room=2) == {12: 1, 8: 2}
