"""States and K/V in one memory whose pages change their use: the bits are those of two pools."""

import random

import pytest
import torch

from engine import LLM, EngineConfig
from tests.engine.real_model import (
    GREEDY,
    Arrival,
    assert_cold_bits,
    assert_same_bits,
    at_ends,
    directory,
    drive,
    fork,
    make_engine,
    tokens,
)

SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 256, "placement": at_ends(128)}


def shared(kind="float32", pages=16, **config):
    """An engine with so many pages."""
    probe = make_engine(kind, memory="shared", **SMALL | config)
    page_bytes = probe.worker.state_pool.arena.stride(0)
    assert probe.manager.linear.memory.num_pages > pages
    budget = {"memory_budget_bytes": pages * page_bytes}
    llm = make_engine(kind, memory="shared", **SMALL | config | budget)
    assert llm.manager.linear.memory.num_pages == pages
    return llm


def watched(llm):
    """{page: what it has been used for}, filled in as pages are handed out."""
    memory = llm.manager.linear.memory
    uses = {}
    owned = memory._owned

    def note(page, pool):
        uses.setdefault(page, set()).add(type(pool).__name__)
        return owned(page, pool)

    memory._owned = note
    return uses


def traffic(seed, count=14):
    """Turns of a few conversations and forks of one text, two at a time."""
    draw = random.Random(seed)
    arrivals = []
    for index in range(count):
        family, length = draw.randrange(4), draw.choice([65, 129, 200, 257, 330])
        prompt = tokens(family, length)
        if draw.random() < 0.4:
            prompt = fork(draw.choice([64, 128, 192]), draw.choice([1, 40, 70]), branch=index)
        arrivals.append(Arrival(prompt, max_tokens=draw.randrange(1, 5), step=2 * index))
    return arrivals


@pytest.mark.parametrize("eviction", ["lru", "value"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_under_pressure_every_bit_is_that_of_a_cold_run_while_pages_change_their_use(
    kind, eviction
):
    llm = shared(kind, eviction=eviction)
    uses = watched(llm)
    arrivals = traffic(seed=len(kind))
    outputs = drive(llm, arrivals)
    llm.manager.linear.memory.check()
    for output in outputs:
        assert_cold_bits(kind, output)
    assert sum(len(kinds) == 2 for kinds in uses.values()) >= 5, "few pages changed their use"
    stats = llm.stats()
    assert stats.hits > 0 and stats.state_evictions > 0


def test_split_and_shared_memory_give_the_same_tokens_and_logits_cold_and_warm():
    engines = [make_engine(memory=memory, **SMALL) for memory in ("split", "shared")]
    prompt = tokens(0, 300)
    for _ in range(2):
        [split], [one] = (llm.generate([list(prompt)], GREEDY) for llm in engines)
        assert_same_bits(split, one)
        assert split.boundary == one.boundary
    assert one.boundary == 256


def test_restoring_by_copy_reads_the_slots_of_pages():
    llm = shared(restore="copy")
    for output in drive(llm, traffic(seed=3, count=8)):
        assert_cold_bits("float32", output)
    assert llm.stats().hits > 0


def test_drafts_and_their_scratch_slots_lie_in_pages_too():
    config = {"num_speculative_tokens": 2, "max_num_batched_tokens": 256}
    llm = shared("drafts", pages=24, **config)
    assert llm.stats().slots_scratch == 6
    for output in drive(llm, traffic(seed=4, count=8)):
        assert_cold_bits("drafts", output)
    assert llm.stats().tokens_drafted > 0


def test_states_and_k_v_are_views_of_one_memory():
    llm = shared()
    memory, worker = llm.manager.linear.memory, llm.worker
    pool, kv = worker.state_pool, worker.kv_cache
    assert pool.arena.untyped_storage().data_ptr() == kv.untyped_storage().data_ptr()
    page, per_page = 3, memory.blocks_per_page
    kv.zero_()
    pool.arena[page] = 1
    touched = {b for b in range(kv.shape[2]) if kv[:, :, b].view(torch.uint8).any()}
    assert touched == set(range(page * per_page, (page + 1) * per_page))
    kv[:, :, (page + 1) * per_page :] = 5.0
    assert torch.equal(pool.arena[page], torch.ones_like(pool.arena[page]))


@pytest.mark.parametrize("kind", ["attention"])
def test_without_recurrent_layers_there_is_nothing_to_share(kind):
    llm = make_engine(kind, memory="shared")
    assert llm.manager.linear is None and llm.manager.kv.pool.num_free > 0
    [output] = llm.generate([list(tokens(0, 80))], GREEDY)
    assert_cold_bits(kind, output)


def test_without_prefix_caching_memory_is_split():
    llm = make_engine(memory="shared", enable_prefix_caching=False)
    assert llm.manager.linear.memory is None


def test_a_request_that_could_never_run_is_refused_and_the_largest_one_runs():
    llm = shared(pages=12)
    there = llm.manager.kv.pool.capacity
    with pytest.raises(ValueError, match=f"the pool has {there}"):
        llm.add_request(tokens(0, 64 * there + 1), GREEDY)
    [output] = llm.generate([list(tokens(0, 64 * there - 2))], GREEDY)
    assert_cold_bits("float32", output)


def test_too_small_a_budget_and_sizes_beside_it_are_refused():
    with pytest.raises(ValueError, match="holds no stride of K/V beside"):
        LLM(directory(), memory="shared", memory_budget_bytes=1 << 16)
    with pytest.raises(ValueError, match="sized by memory_budget_bytes alone, got num_slots=40"):
        EngineConfig(memory="shared", num_slots=40)
    with pytest.raises(ValueError, match=r"memory_budget_bytes alone.*num_blocks=40"):
        EngineConfig(memory="shared", num_blocks=40)
    with pytest.raises(ValueError, match=r"memory='both': must be one of \('split', 'shared'\)"):
        EngineConfig(memory="both")
