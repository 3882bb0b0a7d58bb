"""Warm equals cold, bit for bit: the named edges; test_exactness_traffic.py has the random ones."""

from dataclasses import replace

import pytest
import torch

from engine import SamplingParams
from tests.engine.real_model import (
    GREEDY,
    Arrival,
    assert_cold_bits,
    assert_idle,
    assert_same_bits,
    at_ends,
    cold,
    drive,
    fork,
    make_engine,
    tokens,
)

KINDS = ["float32", "bfloat16", "attention", "recurrent"]
POOLS = {"num_slots": 40, "num_blocks": 200, "block_size": 32, "placement": at_ends()}
DRAWN = SamplingParams(
    temperature=0.8, top_p=0.9, top_k=50, seed=5, ignore_eos=True, return_logits=True
)


def run(llm, prompt, max_tokens=3, **options):
    [output] = drive(llm, [Arrival(prompt, max_tokens, **options)])
    return output


@pytest.mark.parametrize("restore", ["copy", "redirect"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", [1, 2, 3, 4, 63, 64, 65])
def test_any_number_of_tokens_after_a_hit_gives_the_bits_of_a_cold_run(kind, restore, suffix):
    """traps 7 and 8: window and state of one token, as wide as they were."""
    llm = make_engine(kind, restore=restore, **POOLS | {"placement": at_ends(64)})
    run(llm, fork(128, 80, branch=1))
    output = run(llm, fork(128, suffix, branch=2))
    assert output.boundary == output.num_cached_tokens == 128
    assert_cold_bits(kind, output)


@pytest.mark.parametrize("stride", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exact_repeat_computes_its_last_token_even_where_it_ends_on_the_grid(kind, stride):
    llm = make_engine(kind, chunk_stride=stride, **POOLS | {"placement": at_ends(stride)})
    for strides in (2, 3):
        for extra, boundary in ((0, (strides - 1) * stride), (1, strides * stride)):
            prompt = tokens(strides * 10 + extra, strides * stride + extra)
            assert run(llm, prompt).boundary == 0
            output = run(llm, prompt)
            assert output.boundary == boundary
            assert_cold_bits(kind, output)


@pytest.mark.parametrize("restore", ["copy", "redirect"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_checkpoint_serves_many_requests_of_one_step(kind, restore):
    llm = make_engine(kind, restore=restore, **POOLS)
    run(llm, fork(192, 1))
    outputs = drive(llm, [Arrival(fork(192, 5 + i, branch=i)) for i in range(6)])
    for output in outputs:
        assert output.boundary == 192
        assert_cold_bits(kind, output)


@pytest.mark.parametrize("budget", [64, 65, 127, 128, 191, 300, 512, 640, 1000, 2048])
def test_every_token_budget_gives_the_same_bits(budget):
    prompts = [tokens(0, 700), fork(320, 77), tokens(1, 129), tokens(2, 3), fork(640, 40)]
    llm = make_engine(max_num_batched_tokens=budget, **POOLS | {"placement": at_ends(128)})
    for _ in range(2):
        outputs = drive(llm, [Arrival(p, 2, step=i) for i, p in enumerate(prompts)])
        for output in outputs:
            assert_cold_bits("float32", output)
    assert [output.boundary for output in outputs] == [640, 384, 128, 0, 640]


@pytest.mark.parametrize("restore", ["copy", "redirect"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_among_31_others_gives_the_bits_it_gives_alone(kind, restore):
    """trap 34: output depends on what else is in the batch."""
    llm = make_engine(
        kind, restore=restore, max_num_seqs=32, max_num_batched_tokens=320, num_slots=48,
        num_blocks=200,
    )  # fmt: skip
    others = [
        Arrival(fork(64 * (i % 3), 1 + 7 * i, branch=i), 2 + i % 4, i // 5) for i in range(31)
    ]
    outputs = drive(llm, [Arrival(fork(128, 60, branch=50), 8, step=2), *others])
    assert llm.stats().preemptions == 0
    assert_cold_bits(kind, outputs[0])
    for output in outputs[1:] if kind == "float32" else outputs[1:8]:
        assert_cold_bits(kind, output)


def crowd(restore, kind="float32", num_blocks=20, **options):
    """Six requests whose answers need more K/V than there is; and which of them were preempted."""
    llm = make_engine(
        kind, restore=restore, block_size=16, num_slots=10, num_blocks=num_blocks, max_num_seqs=6
    )
    prompts = [fork(64, 1 + 3 * i, branch=i) for i in range(6)]
    return llm, drive(llm, [Arrival(p, 40, step=i // 3, **options) for i, p in enumerate(prompts)])


@pytest.mark.parametrize("restore", ["copy", "redirect"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_request_goes_on_with_the_bits_it_had(kind, restore):
    llm, outputs = crowd(restore, kind)
    stats = llm.stats()
    assert stats.preemptions > 0
    hits = [output.num_cached_tokens for output in outputs if output.num_cached_tokens]
    assert (len(hits), sum(hits)) == (stats.hits, stats.tokens_reused), "own work is no hit"
    for output in outputs:
        assert len(output.token_ids) == 40
        assert_cold_bits(kind, output)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_request_preempted_in_the_middle_of_its_prefill_goes_on_with_the_same_bits(
    enabled, monkeypatch
):
    llm = make_engine(
        block_size=16, num_slots=4, num_blocks=31, max_num_seqs=3, max_num_batched_tokens=64,
        enable_prefix_caching=enabled,
    )  # fmt: skip
    preempted = []
    preempt = llm.scheduler._preempt

    def record(seq):
        preempted.append((seq.request_id, seq.num_computed_tokens))
        preempt(seq)

    monkeypatch.setattr(llm.scheduler, "_preempt", record)
    outputs = drive(llm, [Arrival(tokens(3, 220), 80), Arrival(tokens(4, 250), 2, step=5)])
    assert preempted == [("1", 192)]
    assert outputs[1].miss_reason == ("no_checkpoint" if enabled else "disabled")
    assert outputs[1].num_cached_tokens == llm.stats().hits == 0, "its own work is no hit"
    for output in outputs:
        assert_cold_bits("float32", output)


@pytest.mark.parametrize("restore", ["copy", "redirect"])
def test_seeded_draws_are_the_same_cold_warm_among_others_and_preempted(restore):
    _, outputs = crowd(restore, num_blocks=200, sampling=DRAWN)
    llm, preempted = crowd(restore, sampling=DRAWN)
    assert llm.stats().preemptions > 0
    assert len({tuple(output.token_ids) for output in outputs}) == 6
    for output, other in zip(outputs, preempted, strict=True):
        assert_same_bits(other, output)
        assert_cold_bits("float32", output, DRAWN)
        again = run(llm, tuple(output.prompt_token_ids), 40, sampling=DRAWN)
        assert again.boundary == 64 or len(output.prompt_token_ids) == 64
        assert_same_bits(again, output)


@pytest.mark.parametrize("kind", KINDS)
def test_copy_and_redirect_give_the_same_bits_and_the_same_cache(kind):
    def traffic(restore):
        llm = make_engine(
            kind, restore=restore, max_num_batched_tokens=128, num_slots=9, max_num_seqs=4,
            num_blocks=40, checkpoint_every=128,
        )  # fmt: skip
        prompts = [fork(64 * (i % 5), 40 + 9 * i, branch=i % 4) for i in range(12)]
        return llm, drive(llm, [Arrival(p, 3, step=i) for i, p in enumerate(prompts)])

    (copies, outputs), (redirects, others) = traffic("copy"), traffic("redirect")
    assert copies.stats() == redirects.stats()
    assert copies.stats().hits > 0
    for output, other in zip(outputs, others, strict=True):
        assert_same_bits(output, other)
        assert output.boundary == other.boundary


@pytest.mark.parametrize("kind", KINDS)
def test_caching_off_gives_the_bits_of_caching_on(kind):
    prompts = [fork(192, 30, branch=i) for i in range(4)]
    for enabled in (True, False):
        llm = make_engine(kind, enable_prefix_caching=enabled, **POOLS)
        outputs = [run(llm, prompt) for prompt in prompts]
        assert [output.boundary for output in outputs[2:]] == [192 * enabled] * 2
        for output in outputs:
            assert_cold_bits(kind, output)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_the_next_turn_of_a_conversation_gives_the_bits_of_a_cold_run(kind):
    """Turn n + 1 is turn n, its answer and a question; answers cross the grid while decoding.

    trap 30: the answer is prefilled again; each turn resumes at the last boundary of a prompt.
    """
    llm = make_engine(kind, **POOLS)
    prompt = tokens(7, 100)
    boundaries = []
    for turn in range(3):
        output = run(llm, prompt, 70)
        assert_cold_bits(kind, output)
        boundaries.append(output.boundary)
        prompt += tuple(output.token_ids) + tokens(20 + turn, 11)
    assert boundaries == [0, 64, 128]


def test_requests_with_one_prefix_in_one_step_do_not_harm_each_other():
    llm = make_engine(max_num_batched_tokens=2048, **POOLS | {"placement": at_ends(64)})
    outputs = drive(llm, [Arrival(fork(192, 9, branch=i % 2)) for i in range(4)])
    assert [output.boundary for output in outputs] == [0] * 4
    for output in outputs:
        assert_cold_bits("float32", output)


@pytest.mark.parametrize("spoil", ["states", "windows"])
def test_a_spoiled_checkpoint_would_be_seen(spoil):
    """The comparison has teeth: one checkpoint off by one part in a million changes bits."""
    llm = make_engine(**POOLS)
    run(llm, fork(128, 9))
    getattr(llm.worker.state_pool, spoil).mul_(1 + 1e-6)
    output = run(llm, fork(128, 9))
    assert output.boundary == 128
    reference = cold("float32", output.prompt_token_ids, replace(GREEDY, max_tokens=3))
    assert not torch.equal(output.logits[0], reference.logits[0])
    assert_idle(llm)
