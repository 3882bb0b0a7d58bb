"""Who goes first, by literal ids."""

from math import inf

import pytest

from cache import value_index
from cache.admission import admitted
from cache.block_pool import BlockPool
from cache.eviction import Kind, Lru, LruCapPerPath, prefill_flops
from cache.flop_aware import FlopAware
from cache.placement import combined
from cache.policy_names import parse_policy
from cache.reuse_hazard import AGE_EDGES, ReuseHazard, age_bucket
from cache.saved_states import SavedStates
from cache.value_index import ValueIndex
from tests.cache.builders import checkpoints, composite, linear_leaf, linear_step, sequence, served


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
    policy.check()
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


def test_surplus_states_of_a_path_go_in_the_order_of_their_release():
    policy = LruCapPerPath(2)
    save(policy, 9, path("x"))
    for count, id_ in enumerate((3, 1, 2), start=1):
        policy.saved(id_, 64 * count, path(*"abc"[:count]), Kind.TIP)
    for id_ in (2, 1, 3):
        policy.add(id_)
    policy.saved(4, 256, path(*"abcd"), Kind.TIP)
    assert list(policy) == [2, 1, 9, 3]


def test_a_state_that_has_gone_is_on_no_path():
    policy = LruCapPerPath(2)
    for count, id_ in enumerate((1, 2, 3), start=1):
        save(policy, id_, path("x") if id_ == 3 else path(*"abc"[:count]))
        if id_ == 2:
            policy.forget(1)
    save(policy, 4, path("a", "b", "c"))
    policy.check()
    assert evicted(policy) == [2, 3, 4]
    save(policy, 4, path("a"))
    assert evicted(policy) == [4]


@pytest.mark.parametrize("policy", [LruCapPerPath(2), FlopAware(0.5), ValueIndex()])
def test_an_id_that_is_unpublished_in_use_is_forgotten_and_can_be_saved_again(policy):
    pool = BlockPool(3, policy=policy)
    slot = pool.allocate()
    for _ in range(2):
        pool.publish(slot)
        policy.saved(slot, 64, path("a"), Kind.TIP)
        pool.unpublish(slot)
    pool.publish(slot)
    policy.saved(slot, 128, path("b", "c"), Kind.TIP)
    pool.release(slot)
    pool.check()
    assert list(policy) == [slot]


@pytest.mark.parametrize("policy", [Lru(), LruCapPerPath(2), FlopAware(0.5), ValueIndex()])
def test_a_pool_that_is_reset_has_nothing_to_evict(policy):
    pool = BlockPool(4, policy=policy)
    for count in (1, 2):
        slot = pool.allocate()
        pool.publish(slot)
        policy.saved(slot, 64 * count, path(*"ab"[:count]), Kind.TIP)
        pool.release(slot)
    pool.reset()
    pool.check()
    assert (pool.num_evictable, pool.num_free) == (0, 3)


def test_a_path_within_the_cap_is_plain_lru():
    policy = LruCapPerPath(2)
    for id_, keys in ((1, path("a")), (2, path("x")), (3, path("a", "b"))):
        save(policy, id_, keys)
    assert evicted(policy) == [1, 2, 3]
    with pytest.raises(ValueError, match="cap must be at least 1, got 0"):
        LruCapPerPath(0)


def test_the_prefill_cost_is_that_of_the_9b_model():
    assert prefill_flops(0, 1) == 13.98e9 + 65_536
    assert prefill_flops(64, 128) == 13.98e9 * 64 + 65_536 * (128**2 - 64**2)
    assert prefill_flops(0, 100) + prefill_flops(100, 300) == prefill_flops(0, 300)


def test_policies_are_made_by_name():
    assert type(parse_policy("lru")) is Lru
    assert parse_policy("lru_cap_per_path(3)").cap == 3
    assert parse_policy("flop_aware(0.25)").alpha == 0.25
    assert type(parse_policy("value")) is ValueIndex
    for text in ("", "LRU", "lru_cap_per_path", "flop_aware(x)", "flop_aware(1)x", "value "):
        with pytest.raises(ValueError, match=r"must be lru, .* or value"):
            parse_policy(text)


@pytest.mark.parametrize("name", ["flop_aware(9)", "value"])
def test_policies_weigh_work_by_the_cost_that_they_are_given(name):
    def order(*flops):
        policy = parse_policy(name, *flops)
        save(policy, 1, path("a", "b"), Kind.TIP)
        save(policy, 2, path(*"wxyz"), Kind.BRANCH)  # nothing is learnt: both kinds rank alike
        return evicted(policy)

    assert order() == [1, 2]
    assert order(lambda start, end: 1e6 / (end - start)) == [2, 1]


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


def test_of_two_states_of_one_prefix_the_other_is_found_when_one_goes():
    states = SavedStates()
    states.insert(1, 64, path("a"))
    states.insert(2, 64, path("a"))
    states.remove(1)
    states.insert(3, 128, path("a", "b"))
    states.check()
    assert states[3].parent == 2
    states.clear()
    assert states.insert(4, 128, path("a", "b")).parent is None


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


def test_ages_that_were_lived_through_unused_rank_low():
    hazard, young = ReuseHazard(), age_bucket(30)
    for _ in range(100):
        hazard.observe(1000, used=False)
    assert hazard.ranks([])[young] < ReuseHazard().ranks([])[young] / 5


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


def test_of_unlike_kinds_that_rank_alike_the_one_that_saves_least_work_goes_first():
    policy = ValueIndex()
    save(policy, 1, path("a", "b"))
    save(policy, 2, path("x"), Kind.BRANCH)
    assert evicted(policy) == [2, 1]


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


def ask(policy, keys=(), mounted=None, *, times=1):
    for _ in range(times):
        policy.request(list(keys), mounted)


def test_a_used_state_is_young_again_be_it_the_wanted_one_or_the_one_resumed_from():
    for wanted in (path("a", "b"), path("a", "b", "c")):
        policy = ValueIndex()
        save(policy, 1, path("a", "b"), Kind.BRANCH)
        policy.passed_over(path("a", "b", "c"), Kind.BRANCH)
        ask(policy, times=64)
        ask(policy, wanted, 1)
        save(policy, 2, path("x"), Kind.BRANCH)
        assert evicted(policy) == [2, 1]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Kind.COMB, [3, 1]), (Kind.TIP, [3, 1]), (Kind.BRANCH, [1, 3])],
    ids=["comb", "superseded", "branch"],
)
def test_a_state_on_the_way_is_as_young_as_its_path_but_a_branch_is_not(kind, expected):
    policy = ValueIndex()
    save(policy, 1, path("a"), kind)
    save(policy, 2, path("a", "b", "c"))
    ask(policy, times=64)
    save(policy, 3, path("x"), policy._live[1].kind)
    ask(policy, path("a", "b", "c"), 2)
    policy.discard(2)
    policy.check()
    assert evicted(policy) == expected


def test_what_a_prompt_goes_through_is_observed_once_as_not_used():
    policy = ValueIndex()
    save(policy, 1, path("a"), Kind.COMB)
    save(policy, 2, path("a", "b"))
    comb, tip = (policy._ranks.hazards[kind] for kind in (Kind.COMB, Kind.TIP))
    ask(policy, path("a", "b"), 2)
    assert (sum(comb._uses), sum(tip._uses)) == (0, 1)
    assert sum(comb._exposure) == sum(tip._exposure) == 1


def test_a_state_that_comes_between_counts_once_a_prompt_passes_it():
    policy = ValueIndex()
    save(policy, 1, path("a", "b", "c"), Kind.BRANCH)
    save(policy, 2, path("a", "b"), Kind.BRANCH)
    ask(policy, path("a", "b", "c"), 1)
    save(policy, 3, path("x", "y"), Kind.BRANCH)
    policy.discard(2)
    assert evicted(policy) == [1, 3]


def uses(policy):
    return {kind: sum(policy._ranks.hazards[kind]._uses) for kind in (Kind.TIP, Kind.END)}


def test_who_resumes_at_an_end_uses_the_tip_above_it_as_well():
    policy = ValueIndex()
    save(policy, 1, path("a"))
    save(policy, 2, path("a", "b"), Kind.END)
    policy.request(path("a", "b"), 2)
    assert uses(policy) == {Kind.TIP: 1, Kind.END: 1}
    policy.request(path("a", "x"), 1)
    assert uses(policy) == {Kind.TIP: 2, Kind.END: 1}
    policy.request(path("a", "b", "c"), None)
    assert uses(policy) == {Kind.TIP: 3, Kind.END: 2}


def test_ends_go_before_all_others_and_among_themselves_by_worth():
    policy = ValueIndex()
    save(policy, 1, path("a"))
    save(policy, 2, path("a", "b"), Kind.END)
    save(policy, 3, path("p", "q"), Kind.COMB)
    save(policy, 4, path("p", "q", "r", "s"), Kind.END)
    assert policy.worth(640, 0, Kind.END) < policy.worth(64, 0, Kind.TIP)
    assert evicted(policy)[:2] == [2, 4]


def test_more_short_prompts_than_half_the_slots_still_hit_when_they_come_again():
    """Ends that are worth as much as tips would push them out: the pool cycles, nothing hits."""
    manager = composite(
        num_blocks=400, num_slots=34, placement=combined(None, ends=(0, 4)), policy=ValueIndex()
    )
    for _ in range(3):
        hits = []
        for prompt in ([n, *range(9)] for n in range(100, 120)):
            hits.append(manager.match(sequence(prompt)).boundary)
            served(manager, prompt)
    assert min(hits) >= 4


@pytest.mark.parametrize("policy", [ValueIndex(), FlopAware(1.0)])
def test_uses_without_end_leave_no_more_behind_than_there_are_states(policy):
    save(policy, 1, path("a", "b"))
    save(policy, 2, path("x", "y"))
    for _ in range(6000):
        policy.discard(2)
        policy.add(2)
    policy.check()
    assert sum(map(len, policy._heaps.values())) < 3000
    assert evicted(policy) == [1, 2]


def test_the_end_of_a_shorter_prompt_is_not_used_by_who_resumes_below_it():
    policy = ValueIndex()
    save(policy, 1, path("a", "b"), Kind.END)
    save(policy, 2, path("a", "b", "c"))
    policy.request(path("a", "b", "c"), 2)
    assert uses(policy) == {Kind.TIP: 1, Kind.END: 0}


def test_the_end_of_a_prompt_is_the_tip_of_the_next_one_that_adds_little():
    manager = composite(
        num_blocks=400, num_slots=34, placement=combined(None, ends=(0, 4)), policy=ValueIndex()
    )
    policy = manager.linear.pool.policy
    for length in (14, 18, 22):
        served(manager, range(length))
    kinds = {policy._states[id_].boundary: seen.kind for id_, seen in policy._live.items()}
    assert kinds == {8: Kind.SUPERSEDED, 12: Kind.SUPERSEDED, 16: Kind.TIP, 20: Kind.END}
    served(manager, range(40))  # resumes from 20, and has its tip far below
    kinds = {policy._states[id_].boundary: seen.kind for id_, seen in policy._live.items()}
    assert kinds[16] is Kind.SUPERSEDED and kinds[20] is Kind.END
    policy.check()


def test_what_is_no_end_stays_what_it_is_when_it_would_be_saved_again():
    policy = ValueIndex()
    save(policy, 1, path("a"), Kind.BRANCH)
    save(policy, 2, path("a", "b"), Kind.END)
    policy.again(1, path("a"), Kind.TIP)
    policy.again(2, path("a", "b"), Kind.END)
    policy.again(9, path("x"), Kind.TIP)
    assert [policy._live[id_].kind for id_ in (1, 2)] == [Kind.BRANCH, Kind.END]


def test_an_end_is_young_again_when_it_is_used():
    policy = ValueIndex()
    save(policy, 1, path("a"))
    for id_, name in ((2, "b"), (3, "c")):
        save(policy, id_, path("a", name), Kind.END)
    for _ in range(3):
        policy.request(path("x"), None)
    policy.request(path("a", "b"), None)
    policy.request(path("x"), None)
    assert evicted(policy)[0] == 3


def test_a_tip_is_superseded_across_the_end_below_it():
    policy = ValueIndex()
    save(policy, 1, path("a"))
    save(policy, 2, path("a", "b"), Kind.END)
    assert policy._live[1].kind is Kind.TIP
    save(policy, 3, path("a", "b", "c"))
    kinds = [policy._live[id_].kind for id_ in (1, 2, 3)]
    assert kinds == [Kind.SUPERSEDED, Kind.END, Kind.TIP]


def test_an_end_goes_before_its_tip_and_is_not_observed_any_more():
    policy = ValueIndex()
    save(policy, 1, path("a", "b", "c"))
    save(policy, 2, path("a", "b", "c", "d"), Kind.END)
    policy.request(path("x"), None)
    assert policy.evict() == 2
    policy.request(path("a", "b", "c", "d"), 1)
    assert uses(policy) == {Kind.TIP: 1, Kind.END: 0}
    assert policy._ranks.hazards[Kind.END]._exposure[0] == 1
    policy.passed_over(path("a", "b", "c", "d"), Kind.END)
    policy.request(path("a", "b", "c", "d"), 1)
    assert uses(policy) == {Kind.TIP: 2, Kind.END: 0}
    policy.check()


def test_states_on_the_way_of_a_prompt_supersede_nothing():
    policy = ValueIndex()
    save(policy, 1, path("a"))
    save(policy, 2, path("a", "b"), Kind.COMB)
    assert policy._live[1].kind is Kind.TIP


def test_ranks_follow_what_was_used_and_what_was_not():
    policy = ValueIndex()
    before = policy.worth(64, 0, Kind.BRANCH)
    assert before == policy.worth(64, 0, Kind.TIP)
    for id_ in range(1, 20):
        save(policy, id_, path(f"tip {id_}"))
    save(policy, 20, path("a"), Kind.BRANCH)
    ask(policy, path("a"), 20, times=127)
    assert policy.worth(64, 0, Kind.BRANCH) == before
    ask(policy, path("a"), 20)
    assert policy.worth(64, 0, Kind.BRANCH) > 2 * before
    assert policy.worth(64, 0, Kind.TIP) < before / 2


def test_a_new_state_is_worth_the_work_from_the_one_above_it():
    policy = ValueIndex()
    parts = policy.worth(64, 0, Kind.TIP) + policy.worth(192, 64, Kind.TIP)
    assert parts == pytest.approx(policy.worth(192, 0, Kind.TIP))


def test_the_least_worth_is_that_of_an_unknown_id_or_of_the_one_that_goes_next():
    policy = ValueIndex()
    assert policy.least_worth() == inf
    save(policy, 1, path("a", "b"))
    save(policy, 2, path("x"))
    assert policy.least_worth() == policy.worth(64, 0, Kind.TIP)
    policy.add(7)
    assert policy.least_worth() == -inf
    assert evicted(policy) == [7, 2, 1]


def test_a_state_that_was_passed_over_comes_back_as_what_it_was():
    policy = ValueIndex()
    save(policy, 1, path("a"))
    policy.passed_over(path("a", "b"), Kind.BRANCH)
    assert policy._live[1].kind is Kind.SUPERSEDED
    save(policy, 2, path("a", "b"), Kind.COMB)
    assert policy._live[2].kind is Kind.BRANCH
    policy.check()


def test_the_oldest_evicted_states_are_forgotten_one_by_one(monkeypatch):
    monkeypatch.setattr(value_index, "_NUM_REMEMBERED", 2)
    policy = ValueIndex()
    for id_, name in enumerate("abc", start=1):
        save(policy, id_, path(name), Kind.BRANCH)
    assert evicted(policy) == [1, 2, 3]
    for id_, name in enumerate("abc", start=1):
        policy.saved(id_, 64, path(name), Kind.COMB)
    assert [policy._live[id_].kind for id_ in (1, 2, 3)] == [Kind.COMB, Kind.BRANCH, Kind.BRANCH]


def test_a_forgotten_state_is_not_wanted_any_more():
    policy = ValueIndex()
    save(policy, 1, path("a"))
    policy.forget(1)
    ask(policy, path("a"))
    save(policy, 1, path("x"))
    policy.check()
    assert evicted(policy) == [1]


# ---- admission


class Priced(Lru):
    """A state costs its distance to the one above; the old ones cost 10, 20, 30, ..."""

    selective = True

    def worth(self, boundary, above, kind):
        return boundary - above

    def least_worth(self):
        return 10.0 * (1 + min(self))


def admit(points, policy, *, base=0, room=9, free=0):
    slots = iter(range(100, 100 + free))
    taken = []

    def allocate():
        taken.append(next(slots, None) or policy.evict())
        return taken[-1]

    found = admitted(
        dict.fromkeys(points, Kind.COMB),
        base=base,
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
        ([30, 60], 1, 1, 3, {60: 100}),
        ([10], 5, 9, 0, {}),
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


def test_a_new_state_is_worth_its_distance_to_the_one_that_is_there():
    assert admit([25, 29], priced(5), base=20) == {}
    assert admit([25, 31], priced(5), base=20) == {31: 0}


# ---- what the leaf tells its policy


class Told(Lru):
    """Notes all that it is told; a new state is worth its distance to the one above it."""

    def __init__(self, *, price=None):
        super().__init__()
        self.selective = price is not None
        self.price = price
        self.requests, self.states, self.refused = [], [], []

    def worth(self, boundary, above, kind):
        return boundary - above

    def least_worth(self):
        return self.price

    def request(self, keys, mounted):
        self.requests.append((len(keys), mounted))

    def saved(self, id_, boundary, keys, kind):
        self.states.append((id_, boundary, len(keys), kind.name))

    def passed_over(self, keys, kind):
        self.refused.append((len(keys), kind.name))


def test_a_policy_is_told_of_each_request_once_with_what_it_could_use():
    policy = Told()
    manager = composite(policy=policy)
    served(manager, range(14), 4, 8)
    assert policy.requests == [(0, None)]
    served(manager, range(14), 13)
    served(manager, [*range(6), 99])
    served(manager, range(12))
    [slot_8] = [id_ for id_, boundary, *_ in policy.states if boundary == 8]
    [slot_12] = [id_ for id_, boundary, *_ in policy.states if boundary == 12]
    [slot_4] = [id_ for id_, boundary, *_ in policy.states if boundary == 4]
    assert policy.requests[1:] == [(3, slot_12), (1, slot_4), (2, slot_8)]


def test_a_policy_is_told_of_each_state_and_why_it_was_saved():
    policy = Told()
    manager = composite(policy=policy)
    served(manager, range(14))
    assert sorted(each[1:] for each in policy.states) == [
        (4, 1, "COMB"),
        (8, 2, "COMB"),
        (12, 3, "TIP"),
    ]
    manager = composite(policy=(policy := Told()), every=16)
    served(manager, range(14))
    served(manager, [*range(9), 50, 51, 52, 53])
    assert sorted(each[1:] for each in policy.states) == [
        (8, 2, "BRANCH"),
        (12, 3, "TIP"),
        (12, 3, "TIP"),
    ]


def test_a_selective_policy_refuses_states_that_are_close_to_others_and_hears_which():
    policy = Told(price=6)
    linear = linear_leaf(6, max_num_seqs=1, policy=policy)
    first, second = sequence(range(100, 117)), sequence(range(21))
    linear_step(linear, first, 17)
    linear.release(first)
    assert policy.refused == [] and linear.pool.num_free == 1
    linear_step(linear, second, 8)
    linear_step(linear, second, 21)
    assert sorted(checkpoints(linear, second)) == [8, 16]
    assert policy.refused == [(1, "COMB"), (3, "COMB"), (5, "TIP")]
    assert linear.saves_skipped == {"not_worth": 3}


@pytest.mark.parametrize(("price", "skipped"), [(None, {"no_slot": 3}), (0, {"no_slot": 3})])
def test_states_without_room_are_counted_apart_from_those_that_were_not_worth_it(price, skipped):
    linear = linear_leaf(3, max_num_seqs=2, policy=Told(price=price))
    linear_step(linear, sequence(range(13)), 13)
    assert linear.saves_skipped == skipped
