"""Traps of tests/TRAPS.md that no other test names."""

import pytest
import torch

from tests.engine.real_model import (
    Arrival,
    assert_cold_bits,
    at_ends,
    cold,
    drive,
    fork,
    make_engine,
    tokens,
)

POOLS = {"num_slots": 40, "num_blocks": 200, "max_num_batched_tokens": 320, "placement": at_ends()}


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_state_is_kept_as_wide_as_it_is_carried_and_a_narrower_one_would_be_seen(kind):
    """trap 8: a bfloat16 checkpoint of a float32 state."""
    llm = make_engine(kind, **POOLS)
    prompt = fork(128, 9)
    drive(llm, [Arrival(prompt)])
    [output] = drive(llm, [Arrival(prompt)])
    assert output.boundary == 128
    assert_cold_bits(kind, output)
    states = llm.worker.state_pool.states
    assert states.dtype == torch.float32
    states.copy_(states.bfloat16())
    [output] = drive(llm, [Arrival(prompt)])
    assert output.boundary == 128
    assert not torch.equal(output.logits[0], cold(kind, prompt).logits[0])


@pytest.mark.parametrize("restore", ["copy", "redirect"])
def test_traffic_without_reuse_runs_the_same_steps_with_caching_as_without(restore):
    """trap 35: caching on, no reuse in the traffic: slower than off."""
    arrivals = [Arrival(tokens(i, 90 + 137 * i), 70, step=3 * i) for i in range(5)]
    steps = []
    for enabled in (True, False):
        llm = make_engine(enable_prefix_caching=enabled, restore=restore, **POOLS)
        steps.append(recorded_steps(llm))
        drive(llm, arrivals)
        assert llm.stats().hits == 0 and (llm.stats().saves > 0) == enabled
    with_caching, without = steps
    assert with_caching == without and len(without) > 70


def recorded_steps(llm):
    """Grows with each step: what every row computes in it."""
    steps, issue = [], llm.worker.issue

    def recording(batch, *before):
        steps.append([(row.seq.request_id, row.start, row.end) for row in batch.rows])
        return issue(batch, *before)

    llm.worker.issue = recording
    return steps
