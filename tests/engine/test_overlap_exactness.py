"""Each step is prepared while the one before it runs: a real model's bits stay the same."""

import threading

import pytest
import torch

from engine import SamplingParams
from tests.engine.real_model import GREEDY, Arrival, drive, fork, make_engine
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


DRAWN = SamplingParams(temperature=0.9, seed=4, ignore_eos=True, logprobs=2, return_logits=True)


def arrivals():
    """Greedy and drawn requests side by side, that keep every row of logits."""
    return [
        Arrival(
            fork(64 * (i % 3) + i, 9 + i, branch=i),
            1 + 3 * i,
            step=2 * i,
            sampling=[GREEDY, DRAWN][i % 2],
        )
        for i in range(6)
    ]


def assert_same(outputs, references):
    for output, reference in zip(outputs, references, strict=True):
        assert output.token_ids == reference.token_ids
        assert output.logprobs == reference.logprobs
        assert torch.equal(torch.stack(output.logits), torch.stack(reference.logits))


@pytest.mark.parametrize("kind", ["attention", "recurrent", "bfloat16"])
@pytest.mark.parametrize("restore", ["copy", "redirect"])
@pytest.mark.parametrize("stream", STREAMS)
def test_every_kind_of_model_gives_the_bits_of_steps_one_by_one(kind, restore, stream):
    outputs = []
    for overlap in (False, True):
        llm = make_engine(
            kind,
            overlap=overlap,
            restore=restore,
            max_num_batched_tokens=128,
            max_num_seqs=3,
            num_slots=None if kind == "attention" else 6,
            num_blocks=12,
        )
        if overlap:
            use(llm, stream)
        outputs.append(drive(llm, arrivals()))
    assert_same(*outputs)


def test_two_engines_in_two_threads_may_share_a_model():
    engines = [make_engine(overlap=True) for _ in range(2)]
    outputs = [[], []]

    def work(i):
        outputs[i] = drive(engines[i], arrivals())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = drive(make_engine(), arrivals())
    for each in outputs:
        assert_same(each, alone)
