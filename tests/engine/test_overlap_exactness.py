"""Each step is prepared while the one before it runs: a real model's bits stay the same."""

import pytest

from engine import SamplingParams
from tests.engine.real_model import Arrival, drive, fork, make_engine
from tests.engine.test_overlap import STREAMS, greedy, use


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_real_model_gives_the_same_tokens_with_and_without(stream, drafts):
    """Greedy requests, whose next step takes the token from where it was chosen, and drawn ones."""
    drawn = SamplingParams(temperature=0.9, top_p=0.9, seed=4, ignore_eos=True, logprobs=2)
    requests = [
        Arrival(fork(64 * (i % 3) + i, 9 + i, branch=i), 2 + 3 * i, step=i, sampling=sampling)
        for i, sampling in enumerate([greedy(1, ignore_eos=True)] * 3 + [drawn] * 2)
    ]
    outputs = []
    for overlap in (False, True):
        llm = make_engine(
            "drafts", overlap=overlap, num_speculative_tokens=drafts, max_num_batched_tokens=128
        )
        if overlap and not drafts:
            use(llm, stream)
        outputs.append(drive(llm, requests))
    for without, with_overlap in zip(*outputs, strict=True):
        assert with_overlap.token_ids == without.token_ids
        assert with_overlap.logprobs == without.logprobs
