"""Warm equals cold, bit for bit, under random traffic, pools and settings."""

from functools import reduce

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from tests.engine.real_model import (
    GREEDY,
    Arrival,
    assert_cold_bits,
    assert_same_bits,
    drive,
    fork,
    make_engine,
    tokens,
)

DRAWN = SamplingParams(
    temperature=0.8, top_p=0.9, top_k=50, seed=5, ignore_eos=True, return_logits=True
)
MAX_TOKENS = 4
LONGEST = 330


@st.composite
def prompts(draw):
    """A few families of texts with common prefixes; lengths on and around the grid."""
    family = draw(st.integers(0, 1))
    near = st.builds(lambda k, off: max(0, 64 * k + off), st.integers(0, 4), st.integers(-2, 3))
    shared = draw(st.one_of(near, st.integers(0, 260)))
    unique = draw(st.sampled_from([0, 1, 2, 3, 4, 17, 63, 64, 65, 70]))
    prompt = fork(shared, unique, branch=draw(st.integers(1, 3)), family=family)
    return prompt or tokens(family, 1)


@st.composite
def arrivals(draw, max_size=9):
    step = 0
    requests = []
    for _ in range(draw(st.integers(2, max_size))):
        step += draw(st.sampled_from([0, 0, 1, 2, 6]))
        abort_after = draw(st.sampled_from([None] * 5 + [0, 1, 3]))
        requests.append(
            Arrival(
                draw(prompts()),
                draw(st.integers(1, MAX_TOKENS)),
                step,
                draw(st.sampled_from(["", "", "", "other"])),
                None if abort_after is None else step + abort_after,
                draw(st.sampled_from([GREEDY, GREEDY, DRAWN])),
            )
        )
    return requests


@st.composite
def engine_settings(draw):
    stride = draw(st.sampled_from([64, 64, 128]))
    block_size = draw(st.sampled_from([16, 32, 64]))
    max_num_seqs = draw(st.sampled_from([1, 2, 4, 9]))
    least_blocks = -(-(LONGEST + MAX_TOKENS) // block_size) + 1
    return {
        "chunk_stride": stride,
        "checkpoint_every": stride * draw(st.sampled_from([1, 2, 8])),
        "block_size": block_size,
        "max_num_batched_tokens": draw(
            st.one_of(st.sampled_from([128, 192, 2048]), st.integers(stride, 700))
        ),
        "max_num_seqs": max_num_seqs,
        "num_slots": max_num_seqs + 1 + draw(st.sampled_from([0, 1, 2, 5, 20])),
        "num_blocks": least_blocks + draw(st.sampled_from([0, 3, 10, 200])),
        "restore": draw(st.sampled_from(["copy", "redirect"])),
        "overlap": draw(st.booleans()),
    }


def check_traffic(kind, requests, config):
    """Run it, invariants checked at each step; every answer is that of a cold run alone."""
    llm = make_engine(kind, **config)
    outputs = drive(llm, requests)
    stats = llm.stats()
    for output, request in zip(outputs, requests, strict=True):
        assert_cold_bits(kind, output, request.sampling)
        if output.finish_reason != "abort":
            assert len(output.token_ids) == request.max_tokens
        assert output.num_cached_tokens <= output.boundary < len(request.prompt)
        assert (output.num_cached_tokens > 0) == (output.boundary > 0)
        if output.finish_reason != "abort":
            assert (output.miss_reason is None) == (output.num_cached_tokens > 0)
    assert sum(output.finish_reason != "abort" for output in outputs) <= stats.queries
    assert stats.queries <= len(requests)
    assert stats.cold_starts == 0
    event(f"hits: {stats.hits > 0}")
    event(f"preemptions: {stats.preemptions > 0}")
    event(f"state evictions: {stats.state_evictions > 0}")
    event(f"saves skipped for want of a slot: {'no_slot' in stats.saves_skipped}")


@pytest.mark.parametrize(
    ("kind", "examples"), [("float32", 40), ("bfloat16", 15), ("attention", 15), ("recurrent", 10)]
)
def test_any_traffic_through_any_settings_gives_the_bits_of_cold_runs_alone(kind, examples):
    @settings(max_examples=examples)
    @given(arrivals(), engine_settings())
    def check(requests, config):
        check_traffic(kind, requests, config)

    check()


@settings(max_examples=12)
@given(arrivals(6), engine_settings())
def test_copy_and_redirect_agree_in_bits_and_bookkeeping(requests, config):
    runs = []
    for restore in ("copy", "redirect"):
        llm = make_engine(**config | {"restore": restore})
        runs.append((drive(llm, requests), llm.stats()))
    (outputs, stats), (others, other_stats) = runs
    assert stats == other_stats
    for output, other in zip(outputs, others, strict=True):
        assert_same_bits(output, other)
        assert output.boundary == other.boundary
        assert output.num_cached_tokens == other.num_cached_tokens
        assert output.miss_reason == other.miss_reason


@settings(max_examples=8)
@given(st.lists(st.tuples(prompts(), st.integers(0, 8)), min_size=6, max_size=31), st.data())
def test_a_request_gives_the_same_bits_alone_and_among_up_to_31_others(others, data):
    """trap 34: output depends on what else is in the batch."""
    config = {"max_num_seqs": 32, "num_slots": 50, "num_blocks": 400}
    config["max_num_batched_tokens"] = data.draw(st.integers(64, 2048))
    ours = Arrival(data.draw(prompts()), MAX_TOKENS, data.draw(st.integers(0, 4)))
    crowd = [Arrival(prompt, 1 + i % 3, step) for i, (prompt, step) in enumerate(others)]
    together = drive(make_engine(**config), [ours, *crowd])
    assert_cold_bits("float32", together[0])


@settings(max_examples=8)
@given(
    st.lists(st.tuples(prompts(), st.integers(20, 60)), min_size=3, max_size=5),
    st.sampled_from(["copy", "redirect"]),
    st.sampled_from([GREEDY, DRAWN]),
)
def test_long_answers_in_few_blocks_are_those_of_undisturbed_runs(requests, restore, sampling):
    undisturbed = {"block_size": 16, "num_slots": 20, "num_blocks": 400, "max_num_seqs": 5}
    longest = max(len(prompt) + count for prompt, count in requests)
    tight = undisturbed | {"num_blocks": longest // 16 + 4, "num_slots": 7, "restore": restore}
    plan = [Arrival(prompt, count, sampling=sampling) for prompt, count in requests]
    expected = drive(make_engine(**undisturbed), plan)
    llm = make_engine(**tight)
    for output, reference in zip(drive(llm, plan), expected, strict=True):
        assert_same_bits(output, reference)
    event(f"preemptions: {llm.stats().preemptions > 0}")


def test_the_plans_above_reach_hits_preemptions_evictions_and_skipped_saves():
    """One plan that is known to meet all of them, so that the properties can't pass idly."""
    config = {"block_size": 16, "num_blocks": 26, "max_num_seqs": 4, "num_slots": 6}
    llm = make_engine(checkpoint_every=64, max_num_batched_tokens=100, **config)
    plan = [Arrival(fork(64 * (i % 4), 33 + 5 * i, branch=i % 3), 30, i) for i in range(10)]
    for output in drive(llm, plan):
        assert_cold_bits("float32", output)
    stats = llm.stats()
    seen = [stats.hits, stats.preemptions, stats.state_evictions, stats.saves_skipped["no_slot"]]
    assert reduce(min, seen) > 0, stats
