"""The replay of traces through the real managers, on traces of a few lines."""

import gzip
import json

import pytest

from cache.eviction import Lru, prefill_flops
from cache.kv_block_manager import KVBlockManager
from cache.placement import USUAL, combined
from experiments.belady import Belady, uses_by_key
from experiments.policies import FURTHER_DRAWS, PLACEMENTS, POLICIES, SLOTS, main
from experiments.policies_budget import BUDGETS_GB, KV_SHARES
from experiments.policies_model import UnlimitedKV, managers, prompts_of, replay
from experiments.traces import CLAUDE_FILE, MOONCAKE_FILE, Request

GRID = 64


def request(*runs, tail=1):
    tokens = GRID * sum(count for _, count in runs) + tail
    return Request("s", 0.0, tokens, 1, GRID, tuple(runs))


TURNS = [request((0, 2)), request((0, 4)), request((0, 6)), request((0, 3), (90, 3))]


def resumed(requests, slots=None, policy=None, *, every=None, num_blocks=None):
    """Where each prompt resumed, in blocks, and the outcome."""
    found = []
    manager = managers(
        grid=GRID,
        slots=slots,
        placement=combined(every),
        policy=policy,
        num_blocks=num_blocks,
    )
    outcome = replay(prompts_of(requests, GRID), manager, found.append)
    manager.check([])
    return [boundary // GRID for boundary in found], outcome


def test_a_turn_resumes_at_the_end_of_the_one_before_and_a_fork_above_where_it_parts():
    assert resumed(TURNS)[0] == [0, 2, 4, 2]
    assert resumed([*TURNS, request((0, 3), (80, 1))])[0][-1] == 3
    assert resumed(TURNS, every=GRID)[0] == [0, 2, 4, 3]


def test_work_is_that_of_the_tokens_that_were_not_reused():
    _, outcome = resumed(TURNS)
    parts = [(0, 2), (2, 4), (4, 6), (2, 6)]
    expected = sum(prefill_flops(a * GRID, b * GRID + 1) for a, b in parts)
    assert outcome.work == pytest.approx(expected)
    least = sum(prefill_flops(a * GRID, b * GRID + 1) for a, b in [*parts[:3], (3, 6)])
    assert outcome.least_work == pytest.approx(least)
    assert (outcome.tokens, outcome.reused_tokens) == (18 * GRID + 4, 8 * GRID)
    assert (outcome.checkpoints, outcome.state_evictions) == (5, 0)


def test_one_slot_holds_the_latest_state():
    two = [request((0, 2)), request((100, 2)), request((0, 4)), request((0, 6))]
    assert resumed(two, 1, Lru())[0] == [0, 0, 0, 4]
    assert resumed(two, 2, Lru())[0] == [0, 0, 2, 4]


@pytest.mark.parametrize("slots", [1, 2, 3, 9])
def test_unlimited_kv_is_the_real_leaf_with_enough_blocks(slots):
    requests = [*TURNS, request((200, 3)), *TURNS, request((0, 3), (80, 2)), request((200, 5))]
    assert isinstance(
        managers(grid=GRID, slots=1, placement=combined(None), policy=None).kv, UnlimitedKV
    )
    found = resumed(requests, slots, Lru())
    real = resumed(requests, slots, Lru(), num_blocks=100)
    assert (
        type(managers(grid=GRID, slots=1, placement=combined(None), policy=None, num_blocks=9).kv)
        is KVBlockManager
    )
    assert found == real


def test_belady_keeps_what_is_used_next_where_lru_does_not():
    requests = [request((0, 2)), request((100, 2)), request((200, 2)), request((0, 4))]
    everything, _ = resumed(requests)
    prompts = [prompt.keys for prompt in prompts_of(requests, GRID)]
    uses = uses_by_key(prompts, [GRID * blocks for blocks in everything], GRID)
    assert uses == {1: [3]}
    assert resumed(requests, 1, Lru())[0] == [0, 0, 0, 0]
    assert resumed(requests, 1, Belady(uses))[0] == [0, 0, 0, 2]


# ---- the command


@pytest.fixture
def traces(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    blocks = ([[0, 2]], [[0, 4]], [[0, 3], [9, 3]])  # the last turn replaces the end of the second
    sizes = [sum(count for _, count in runs) for runs in blocks]
    calls = [
        {"t": i, "in": 64 * n + 9, "out": 1, "h": runs}
        for i, (n, runs) in enumerate(zip(sizes, blocks, strict=True))
    ]
    lines = [json.dumps({"id": f"s{i}", "bs": 64, "r": calls}) for i in range(4)]
    with gzip.open(folder / CLAUDE_FILE, "wt") as file:
        file.write("\n".join(lines))
    chat = {"timestamp": 0, "input_length": 1030, "output_length": 1, "hash_ids": [1, 2, 3]}
    (folder / MOONCAKE_FILE).write_text("\n".join([json.dumps(chat)] * 3))
    return folder


def test_a_run_writes_a_row_for_every_trace_placement_policy_and_number_of_slots(
    traces, tmp_path, capsys
):
    out = tmp_path / "policies.json"
    assert main(["--small", "--traces", str(traces), "--json", str(out)]) == 0
    results = json.loads(out.read_text())
    rows = results["rows"]
    by_slots = [row for row in rows if row["budget_gb"] is None]
    first = [row for row in by_slots if row["seed"] == 0]
    assert len(first) == 2 * (2 * (1 + len(SLOTS) * len(POLICIES)) + 1)
    again = [(row["slots"], row["policy"]) for row in by_slots if row not in first]
    assert again == FURTHER_DRAWS and {row["seed"] for row in rows} == {0, 1}
    budgets = [row for row in rows if row["budget_gb"] is not None]
    assert [(row["budget_gb"], row["memory"]) for row in budgets] == 2 * [
        (budget, memory)
        for budget in BUDGETS_GB
        for memory in (*("split" for _ in KV_SHARES), "shared")
    ]
    assert sum(row.get("best_split", False) for row in budgets) == 2 * len(BUDGETS_GB)
    keys = {"trace", "placement", "policy", "slots", "work", "token_hit_rate", "bytes"}
    assert all(keys <= row.keys() and row["work"] >= 1.0 for row in rows)
    turns = [row for row in by_slots if row["trace"] == "claude"]
    at_ends = [row["work"] for row in turns if row["placement"] == PLACEMENTS[0]]
    parts = [(0, 137), (128, 265), (128, 393)]  # the last turn resumes at the end of the first
    least = [(0, 137), (128, 265), (192, 393)]
    expected = sum(prefill_flops(*part) for part in parts) / sum(prefill_flops(*p) for p in least)
    assert at_ends == pytest.approx([expected] * len(at_ends)) and len(at_ends) > 4
    above = [row["work"] for row in turns if row["placement"] == USUAL]
    assert set(above) == {1.0}
    assert out.with_suffix(".png").is_file()
    assert results["conclusion"].split()[0] in capsys.readouterr().out


def test_a_folder_without_traces_is_refused(tmp_path, capsys):
    out = tmp_path / "policies.json"
    assert main(["--traces", str(tmp_path), "--json", str(out)]) == 2
    assert f"policies: error: {tmp_path} has no {CLAUDE_FILE}" in capsys.readouterr().err
    assert not out.exists()
