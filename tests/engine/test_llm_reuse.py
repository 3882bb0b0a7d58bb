"""What is reused, where it resumes, and the reason where nothing is."""

import pytest

from cache.placement import USUAL, parse_placement
from tests.engine.real_model import (
    Arrival,
    assert_cold_bits,
    at_ends,
    drive,
    fork,
    make_engine,
    tokens,
)

POOLS = {"num_slots": 40, "num_blocks": 200, "placement": at_ends()}


def run(llm, prompt, max_tokens=1, **options):
    """One request to its end, checked against a cold run."""
    [output] = drive(llm, [Arrival(tuple(prompt), max_tokens, **options)])
    assert_cold_bits("float32", output)
    return output


def assert_miss(llm, prompt, reason, **options):
    before = llm.stats()
    output = run(llm, prompt, **options)
    assert output.miss_reason == reason
    assert (output.num_cached_tokens, output.boundary) == (0, 0)
    after = llm.stats()
    assert after.misses.get(reason, 0) == before.misses.get(reason, 0) + 1
    assert sum(after.misses.values()) == sum(before.misses.values()) + 1
    assert (after.queries, after.hits) == (before.queries + 1, before.hits)


# ---- every miss has its reason


def test_a_miss_with_caching_off_says_disabled():
    llm = make_engine(enable_prefix_caching=False, **POOLS)
    for _ in range(2):
        assert_miss(llm, tokens(0, 200), "disabled")
    assert llm.stats().slots_checkpoint == llm.stats().blocks_cached == 0


def test_the_smallest_prompt_that_can_hit_is_reported_and_true():
    for stride in (64, 128):
        llm = make_engine(chunk_stride=stride, **POOLS)
        smallest = llm.stats().smallest_prompt_that_can_hit
        assert smallest == stride + 1
        for length in (1, stride - 1, stride):
            for _ in range(2):
                assert_miss(llm, tokens(length, length), "below_stride")
        assert_miss(llm, tokens(5, smallest), "no_checkpoint")
        assert run(llm, tokens(5, smallest)).boundary == stride


def test_a_miss_on_an_unknown_prefix_says_no_checkpoint():
    llm = make_engine(**POOLS)
    assert_miss(llm, tokens(0, 200), "no_checkpoint")
    assert_miss(llm, tokens(1, 200), "no_checkpoint")


def test_a_miss_where_only_another_salt_has_states_says_namespace():
    llm = make_engine(**POOLS)
    run(llm, tokens(0, 200))
    assert_miss(llm, tokens(0, 200), "namespace", salt="theirs")
    assert_miss(llm, tokens(1, 200), "no_checkpoint", salt="theirs")


def test_a_miss_on_a_state_that_was_evicted_says_evicted():
    llm = make_engine(**POOLS | {"max_num_seqs": 1, "num_slots": 3})
    assert_miss(llm, tokens(0, 200), "no_checkpoint")
    assert run(llm, tokens(0, 200)).boundary == 192
    assert_miss(llm, tokens(1, 200), "no_checkpoint")
    assert_miss(llm, tokens(2, 200), "no_checkpoint")
    assert llm.stats().state_evictions > 0
    assert_miss(llm, tokens(0, 200), "evicted")
    assert run(llm, tokens(0, 200)).boundary == 192


def test_a_miss_where_the_kv_is_shorter_than_every_state_says_so():
    """Tail blocks are evicted first: what is left ends before the only checkpoint."""
    llm = make_engine(**POOLS | {"num_blocks": 9, "max_num_seqs": 2})
    run(llm, tokens(0, 400))
    assert llm.stats().slots_checkpoint == 1
    run(llm, tokens(1, 200))
    assert_miss(llm, tokens(0, 400), "kv_shorter")
    assert run(llm, tokens(0, 400)).boundary == 384


def test_a_hit_resumes_at_the_deepest_state_within_reach_of_the_kv():
    llm = make_engine(num_slots=40, num_blocks=9, max_num_seqs=2, placement=at_ends(128))
    run(llm, tokens(0, 400))
    assert llm.stats().slots_checkpoint == 3
    run(llm, tokens(1, 200))
    assert run(llm, tokens(0, 400)).boundary == 256


def test_a_miss_where_the_state_leaves_no_slot_to_run_on_says_no_slot():
    llm = make_engine(max_num_seqs=1, num_slots=2, num_blocks=50, checkpoint_every=64)
    run(llm, tokens(0, 64))
    assert llm.stats().slots_checkpoint == 1
    assert_miss(llm, tokens(0, 70), "no_slot")


# ---- who may share


def test_salts_isolate_and_equal_salts_share():
    llm = make_engine(**POOLS)
    for salt in ("", "a", "b"):
        assert run(llm, tokens(0, 200), salt=salt).boundary == 0
    for salt in ("", "a", "b"):
        assert run(llm, tokens(0, 200), salt=salt).boundary == 192
    assert llm.stats().hits == 3


def test_generate_takes_a_salt_and_adapters_isolate():
    llm = make_engine(**POOLS)
    prompt = list(tokens(0, 100))
    boundaries = [llm.generate([prompt], cache_salt=s)[0].boundary for s in ("x", "y", "x")]
    assert boundaries == [0, 0, 64]
    for adapter, boundary in (("p", 0), ("q", 0), ("p", 64)):
        llm.add_request(prompt, cache_salt="x", adapter_id=adapter)
        while llm.has_unfinished():
            [output] = llm.step()
        assert output.boundary == boundary


def test_a_salt_that_looks_like_an_adapter_is_not_one():
    llm = make_engine(**POOLS)
    prompt = list(tokens(0, 100))
    for salt, adapter in (("ab", ""), ("", "ab"), ("a", "b"), ("b", "a")):
        llm.add_request(prompt, cache_salt=salt, adapter_id=adapter)
        while llm.has_unfinished():
            [output] = llm.step()
        assert output.boundary == 0


# ---- where states are saved


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("shared", [1, 63, 64, 65, 127, 128, 200, 256, 300, 449, 513])
def test_the_third_request_with_a_prefix_hits_and_the_second_where_a_state_lies_in_it(
    shared, block_size
):
    llm = make_engine(placement=at_ends(256), block_size=block_size, num_slots=80, num_blocks=800)
    deepest = shared // 64 * 64
    for unique in (1, 63, 64, 130):
        total = shared + unique
        saved = {*range(256, total + 1, 256), (total - 1) // 64 * 64}
        in_prefix = [boundary for boundary in saved if boundary <= shared]
        expected = [0, max(in_prefix, default=0), deepest]
        seen = [
            run(llm, fork(shared, unique, branch=branch), salt=str(unique)).boundary
            for branch in range(3)
        ]
        assert seen == expected, f"{shared} shared and {unique} unique tokens"


def test_an_exact_repeat_hits_within_a_stride_of_its_end():
    llm = make_engine(**POOLS)
    for length in (65, 100, 128, 129, 300, 512, 513, 600):
        assert run(llm, tokens(length, length)).boundary == 0
        assert run(llm, tokens(length, length)).boundary == (length - 1) // 64 * 64


def test_a_longer_prompt_resumes_where_the_shorter_one_ended():
    llm = make_engine(**POOLS)
    boundaries = [run(llm, tokens(0, n)).boundary for n in (100, 200, 300, 700)]
    assert boundaries == [0, 64, 192, 256]


def test_states_are_saved_as_often_as_asked_and_at_the_end_of_the_prompt():
    for every, count in ((64, 10), (128, 5), (512, 2), (1024, 1)):
        llm = make_engine(**POOLS | {"placement": at_ends(every), "max_num_batched_tokens": 2048})
        run(llm, tokens(0, 700))
        assert llm.stats().saves == llm.stats().slots_checkpoint == count


def test_where_a_prefill_is_cut_does_not_change_what_is_saved():
    for budget in (64, 128, 200, 512, 2048):
        llm = make_engine(**POOLS | {"placement": at_ends(128), "max_num_batched_tokens": budget})
        run(llm, tokens(0, 700), max_tokens=3)
        found = [run(llm, fork(n, 9, branch=n)).boundary for n in (130, 300, 400, 700)]
        assert found == [128, 256, 384, 640], budget


def test_by_default_states_are_at_prompt_ends_64_tokens_above_them_and_on_a_wide_comb():
    llm = make_engine(num_slots=40, num_blocks=200)
    assert llm.manager.linear.placement == parse_placement(USUAL, 64)
    prompt = tokens(0, 700)
    run(llm, prompt)
    assert llm.stats().saves == 2
    assert run(llm, prompt).boundary == 640
    assert run(llm, prompt[:630] + tokens(1, 90)).boundary == 576
    narrow = make_engine(checkpoint_every=128, num_slots=40, num_blocks=200)
    run(narrow, prompt)
    assert narrow.stats().saves == 5 + 1  # the end is on the comb


@pytest.mark.parametrize("shared", [128, 191, 192, 200, 300, 449, 513])
def test_by_default_the_third_prompt_with_a_text_resumes_within_127_tokens_of_its_end(shared):
    llm = make_engine(num_slots=40, num_blocks=200)
    found = [run(llm, fork(shared, 200, branch=branch)).boundary for branch in range(3)]
    assert found[0] == 0 and 0 < found[2] <= shared <= found[2] + 127


@pytest.mark.parametrize("restore", ["copy", "redirect"])
def test_a_lagging_request_jumps_to_what_another_computed_meanwhile(restore):
    """Both start in one step; then the second finds the first one's state ahead of its own."""
    llm = make_engine(restore=restore, max_num_batched_tokens=400, **POOLS)
    plan = [Arrival(fork(260, 40, branch=1)), Arrival(fork(260, 200, branch=2))]
    first, second = drive(llm, plan)
    assert (first.boundary, first.num_cached_tokens) == (0, 0)
    assert (second.boundary, second.num_cached_tokens) == (256, 256 - 64)
    assert second.miss_reason is None
    assert_cold_bits("float32", first)
    assert_cold_bits("float32", second)
    stats = llm.stats()
    assert (stats.queries, stats.hits, stats.tokens_reused) == (2, 1, 192)


def test_counters_add_up_over_mixed_traffic():
    llm = make_engine(max_num_seqs=3, num_slots=7, num_blocks=20, checkpoint_every=128)
    plan = [
        Arrival(fork(64 * (i % 4), 5 + 20 * i, branch=i % 3), 3, i, salt="ab"[i % 2])
        for i in range(12)
    ]
    outputs = drive(llm, plan)
    stats = llm.stats()
    hits = [output for output in outputs if output.num_cached_tokens]
    assert (stats.queries, stats.hits) == (12, len(hits))
    assert stats.tokens_reused == sum(output.num_cached_tokens for output in hits)
    reasons = [output.miss_reason for output in outputs if not output.num_cached_tokens]
    assert stats.misses == {reason: reasons.count(reason) for reason in set(reasons)}
    assert 0 < stats.hits < 12
