"""The sweep counts what the cache does: literal numbers for traces small enough to do by hand."""

import json

import pytest

from cache.cached_sequence import CachedSequence
from cache.composite_block_manager import CompositeBlockManager
from cache.hashing import HashDomain
from cache.kv_block_manager import KVBlockManager
from cache.linear_state_block_manager import LinearStateBlockManager
from cache.placement import combined
from experiments.save_policies import INTERVALS, POLICIES, Policy
from experiments.stride_sweep import draw, main, reusable_tokens
from experiments.stride_sweep_report import conclusion
from experiments.trace_replay import CHECKPOINT_BYTES_9B, prompts_of, trace_rows
from experiments.traces import MOONCAKE_FILE, Request


def request(tokens, *runs, session="a"):
    return Request(session, 0.0, tokens, 1, 64, runs)


A = request(650, (1, 10))
B = request(650, (1, 6), (11, 4))  # parts from A after 384 tokens
C = request(650, (1, 6), (15, 4))  # so does this one
FOUR = [A, B, C, A]


@pytest.mark.parametrize(
    ("policy", "reused", "checkpoints"),
    [
        # Ends at 640; B finds nothing and leaves 384 where it parts from A; C finds that.
        (Policy(None, True), 0 + 0 + 384 + 640, 4),
        # No ends: B leaves 384, the second A finds that and leaves 640.
        (Policy(None, False), 0 + 0 + 384 + 384, 2),
        # 128 to 640, then 512 and 640 of B and of C.
        (Policy(128, False), 0 + 384 + 384 + 640, 5 + 2 + 2),
        (Policy(128, True), 0 + 384 + 384 + 640, 5 + 2 + 2),
        # 512 of A, of B and of C, which only A finds again.
        (Policy(512, False, branch=False), 512, 3),
        (Policy(512, True), 0 + 0 + 384 + 640, 2 + 3 + 2),
        (Policy(64, False), 384 + 384 + 640, 10 + 4 + 4),
        (Policy(8192, False, branch=False), 0, 0),
    ],
)
def test_reuse_and_checkpoints_of_four_prompts(policy, reused, checkpoints):
    (row,) = trace_rows("claude", FOUR, [policy])
    assert (row.requests, row.prompt_tokens) == (4, 2600)
    assert row.reusable_tokens == 384 + 384 + 640
    assert (row.reused_tokens, row.checkpoints) == (reused, checkpoints)
    assert row.bytes == checkpoints * CHECKPOINT_BYTES_9B
    assert row.as_dict()["checkpoints_per_request"] == checkpoints / 4


@pytest.mark.parametrize("every", [64, 128, 256, 512, 8192])
def test_the_replay_does_what_both_leaves_of_the_engine_do(every):
    kv = KVBlockManager(200, HashDomain("kv", 64), chunk_stride=64)
    linear = LinearStateBlockManager(
        200, HashDomain("linear", 64), placement=combined(every), max_num_seqs=1
    )
    manager = CompositeBlockManager(kv, linear, enable_prefix_caching=True)
    requests = [
        *FOUR,
        request(500, (1, 7)),
        request(330, (1, 4), (21, 1)),
        B,
        request(640, (1, 10)),
    ]
    reused = 0
    for each in requests:
        ids = [id_ for block in each.block_ids(64) for id_ in [block] * 64]
        seq = CachedSequence([*ids, *[0] * (each.input_tokens - len(ids))])
        match = manager.match(seq)
        reused += match.boundary
        assert manager.allocate(seq, match, each.input_tokens)
        manager.plan_saves(seq, match, each.input_tokens)
        manager.commit(seq, each.input_tokens)
        manager.release(seq)
    (row,) = trace_rows("claude", requests, [Policy(every, True)])
    assert (row.reused_tokens, row.checkpoints) == (reused, linear.num_saves)


def test_sessions_are_added_up_and_share_nothing():
    other = [request(650, (1001, 10), session="b")] * 2
    interleaved = [A, other[0], A, other[1]]
    (row,) = trace_rows("claude", interleaved, [Policy(None, True)])
    assert (row.reused_tokens, row.reusable_tokens, row.checkpoints) == (1280, 1280, 2)


@pytest.mark.parametrize(
    ("tokens", "reach"), [(0, 0), (64, 0), (65, 64), (127, 64), (128, 64), (129, 128)]
)
def test_a_prompt_is_served_at_most_to_before_its_final_token(tokens, reach):
    prompts, num_blocks = prompts_of([request(tokens, (1, tokens // 64))] * 2)
    assert [prompt.reach for prompt in prompts] == [0, reach]
    assert num_blocks == tokens // 64


def test_reusable_tokens_of_prompts_of_a_model():
    ids = list(range(200))
    assert reusable_tokens([ids]) == 0
    assert reusable_tokens([ids, ids]) == 192
    assert reusable_tokens([ids, [*ids[:130], 7]]) == 128
    assert reusable_tokens([ids[:128], ids[:128]]) == 64, "not its final token"


def test_policies_are_both_kinds_at_every_interval_and_two_to_compare_with():
    assert INTERVALS == (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    assert len(set(POLICIES)) == len(POLICIES) == 18


def run(tmp_path, *more):
    path = tmp_path / "new" / "x.json"
    sizes = ["--documents", 1, "--questions", 2, "--sentences", 40, "--max-tokens", 2]
    status = main([str(o) for o in [*sizes, "--traces", tmp_path, "--json", path, *more]])
    return status, path


def test_without_traces_the_model_runs_and_the_rest_is_named(tmp_path, capsys):
    status, path = run(tmp_path)
    content = json.loads(path.read_text())
    assert status == 0 and set(content["not_run"]) == {"claude", "mooncake"}
    assert str(tmp_path) not in path.read_text()
    rows = [row for row in content["rows"] if row["part"] == "engine"]
    settings = [(row["every"], row["prompt_end"]) for row in rows]
    assert settings == [(every, end) for end in (True, False) for every in INTERVALS]
    dense = rows[0]
    assert dense["reused_tokens"] == dense["reusable_tokens"] > 0 and dense["requests"] == 4
    assert all(row["ttft_new_ms"] > 0 and row["ttft_repeat_ms"] > 0 for row in rows)
    assert all(row["checkpoints"] > 0 and row["bytes"] > 0 for row in rows)
    assert "Not run: the chat trace." in capsys.readouterr().out
    picture = path.with_suffix(".png")
    drawn = picture.read_bytes()
    draw(content, picture)
    assert picture.read_bytes() == drawn and drawn.startswith(b"\x89PNG")


def test_a_trace_that_is_there_is_replayed(tmp_path, capsys):
    line = {"timestamp": 0, "input_length": 1030, "output_length": 1, "hash_ids": [0, 1, 2]}
    (tmp_path / MOONCAKE_FILE).write_text(f"{json.dumps(line)}\n" * 3)
    status, path = run(tmp_path, "--requests", 2)
    content = json.loads(path.read_text())
    assert status == 0 and set(content["not_run"]) == {"claude"}
    rows = [row for row in content["rows"] if row["part"] == "mooncake"]
    assert len(rows) == len(POLICIES) and {row["requests"] for row in rows} == {2}
    assert {row["reusable_tokens"] for row in rows} == {1024}
    assert content["conclusion"] == conclusion(content["rows"])
    assert "chat: no interval (100.0 % with 0.50 checkpoints a request)" in content["conclusion"]


def test_a_bad_trace_is_refused_before_the_work(tmp_path, capsys):
    (tmp_path / MOONCAKE_FILE).write_text("{}\n")
    status, path = run(tmp_path)
    assert status == 2 and not path.exists()
    assert "line 1" in capsys.readouterr().err


def test_a_spoilt_state_fails_the_run(tmp_path, perturb_restores, capsys):
    perturb_restores(factor=float("nan"))
    status, path = run(tmp_path)
    assert status == 1 and not path.exists()
    assert "checkpoint_every 64, request 2: tokens" in capsys.readouterr().err


def test_another_model_is_served_and_named(tiny_model, tmp_path):
    status, path = run(tmp_path, "--model", tiny_model, "--sentences", 20)
    content = json.loads(path.read_text())
    assert status == 0 and content["options"]["model"] == "tiny"
    dense = content["rows"][1]
    assert dense["every"] == 64
    assert dense["reused_tokens"] == dense["reusable_tokens"] > 0


def test_prompts_beyond_the_model_are_refused(tiny_model, tmp_path, capsys):
    status, path = run(tmp_path, "--model", tiny_model, "--sentences", 200)
    assert status == 2 and not path.exists()
    assert "tokens are needed; the model has 4096" in capsys.readouterr().err
