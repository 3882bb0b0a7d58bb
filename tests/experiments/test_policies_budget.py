"""Replays with K/V and states in one budget: what is compared has equal bytes, and what is said."""

import pytest

from experiments.policies_budget import (
    GRID,
    kv_share_at_end,
    mark_best,
    outcome,
    shared_memory,
    split_memory,
)
from experiments.policies_model import prompts_of
from experiments.policies_report import budget_conclusion, budget_pairs
from experiments.traces import Request

BLOCK_BYTES = GRID * 32 * 1024


def prompts(*lengths, family=0):
    """Prompts that each go on from the one before; lengths in blocks."""
    requests = [
        Request("s", 0.0, GRID * length + 1, 1, GRID, ((family, length),)) for length in lengths
    ]
    return prompts_of(requests, GRID)


@pytest.mark.parametrize("kv_share", [0.65, 0.95])
def test_a_split_and_a_shared_memory_have_the_same_bytes_but_for_what_pages_lose(kv_share):
    split, shared = split_memory(50, kv_share), shared_memory(50)
    blocks, slots = split.kv.pool.capacity, split.linear.pool.capacity
    assert 50e9 - 51.5e6 <= blocks * BLOCK_BYTES + slots * 51.5e6 <= 50e9
    assert blocks * BLOCK_BYTES == pytest.approx(50e9 * kv_share, rel=0.001)
    pages = shared.linear.memory.num_pages - 1
    assert pages * 51.5e6 <= 50e9 < (pages + 1) * 51.5e6
    assert 3 * BLOCK_BYTES <= 51.5e6


def test_with_room_both_reuse_what_can_be_reused_and_the_split_moves_to_what_is_used():
    found = [outcome(prompts(2, 4, 6), m) for m in (split_memory(50, 0.9), shared_memory(50))]
    assert [each.work / each.least_work for each in found] == [1.0, 1.0]
    manager = shared_memory(50)
    outcome(prompts(90), manager)
    assert kv_share_at_end(manager) == pytest.approx(30 / 970, abs=0.002)
    manager.check([])
    manager.linear.memory.check()


def test_a_prompt_that_does_not_fit_gives_no_outcome():
    assert outcome(prompts(40), split_memory(1, 0.65)) is None
    assert outcome(prompts(40), split_memory(1, 0.9)) is not None
    assert outcome(prompts(90), shared_memory(1)) is None


def test_a_large_block_has_the_id_of_its_last_part():
    request = Request("s", 0.0, 64 * 17 + 3, 1, 64, ((100, 9), (300, 8)))
    assert request.block_ids(512) == [107, 306]
    assert request.block_ids(64) == [*range(100, 109), *range(300, 308)]
    assert Request("s", 0.0, 511, 1, 64, ((0, 7),)).block_ids(512) == []


def rows(shared_work):
    common = {"trace": "chat", "budget_gb": 50, "kv_share": 0.5}
    works = [("split", 1.2), ("split", 1.1), ("shared", shared_work)]
    found = [common | {"memory": memory, "work": work} for memory, work in works]
    for row in found:
        row["trace"] = "mooncake"
    mark_best(found)
    return found


def test_the_best_split_is_marked_and_the_shared_memory_is_compared_with_it():
    [(best, shared)] = budget_pairs(rows(1.15))
    assert (best["work"], shared["work"]) == (1.1, 1.15)
    assert [row.get("best_split") for row in rows(1.15)] == [False, True, None]
    assert "1.05 to 1.05 times" in budget_conclusion(rows(1.15))
    assert budget_conclusion(rows(1.15)).endswith("(most: chat, 50 GB): within 5 %.")
    assert budget_conclusion(rows(1.16)).endswith("NOT within 5 %.")
    assert "fits no budget" in budget_conclusion([])
