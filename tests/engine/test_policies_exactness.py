"""No placement and no eviction policy changes a bit: a pool of a few slots against cold runs."""

import pytest

from engine import SamplingParams
from tests.engine.real_model import (
    Arrival,
    assert_cold_bits,
    drive,
    fork,
    make_engine,
    tokens,
)
from tests.engine.test_config import EVICTION

PLACEMENTS = [None, "prompt_end", "branch", "every(64)", "prompt_end+branch+comb(128)"]


def traffic():
    """Turns of two conversations, prompts that part from them, and others that fill the pool."""
    prompts = []
    for turn in range(4):
        for talk in range(2):
            prompts.append(tokens(talk, 100 + 90 * turn))
        prompts.append(fork(130, 40 + 30 * turn, branch=turn))
        prompts.append(tokens(30 + turn, 200))
    return [*prompts, prompts[-3], prompts[0]]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("eviction", EVICTION)
def test_every_policy_and_placement_gives_the_bits_of_a_cold_run(eviction, placement):
    llm = make_engine(
        eviction=eviction, placement=placement, checkpoint_every=128, num_slots=7, num_blocks=60,
        max_num_seqs=2, block_size=32,
    )  # fmt: skip
    prompts = traffic()
    outputs = drive(llm, [Arrival(p, 3, step=4 * i) for i, p in enumerate(prompts)])
    for output in outputs:
        assert_cold_bits("float32", output)
    stats = llm.stats()
    assert stats.hits > 0 and stats.saves > 0
    skipped = stats.saves_skipped.get("not_worth", 0)
    assert stats.state_evictions > 0, f"the pool was never full ({skipped} states passed over)"


def loose(llm, prompt, max_tokens):
    """A request that takes and leaves what decode steps wrote; its tokens."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    llm.add_request(prompt, params, request_id="loose", exact=False)
    while llm.has_unfinished():
        [output] = llm.step() or [None]
        llm.scheduler.check()
    return output.token_ids


@pytest.mark.parametrize("eviction", EVICTION)
def test_requests_that_take_decoded_states_leave_those_of_exact_ones_alone(eviction):
    """Two states may have one prefix, one of each kind; they evict and are evicted like others."""
    llm = make_engine(eviction=eviction, num_slots=6, num_blocks=60, max_num_seqs=2, block_size=32)
    for turn in range(6):
        talk = tokens(turn % 3, 100 + 40 * turn)
        said = (*talk, *loose(llm, talk, 70))
        loose(llm, (*said, *tokens(50 + turn, 9)), 3)
        exact = [Arrival((*whole, *tokens(60 + turn, 5)), 3) for whole in (talk, said, said)]
        for output in drive(llm, exact):
            assert_cold_bits("float32", output)
    assert llm.stats().state_evictions > 0
