"""Conversations: each turn's boundary and its reason are those that can be counted by hand."""

import json

import pytest

from engine import LLM
from engine.builtin import BUILTIN_MODEL_DIR
from experiments.conversations import Turn, conversation_turns, latest_boundaries
from experiments.multi_turn import Probe, draw, main, why_not_later
from experiments.multi_turn_report import FIRST_TURN, KV_GONE, LATEST, NO_STATE, aggregated


def test_latest_is_the_last_boundary_below_the_end_of_the_prompt_before():
    sizes = [(1, 128), (2, 129), (1, 130), (2, 200), (1, 256)]
    turns = [Turn(talk, 0, [0] * size, "") for talk, size in sizes]
    assert latest_boundaries(turns, 64) == [0, 0, 64, 128, 128]


@pytest.mark.parametrize(
    ("turn", "found", "why"),
    [
        (1, Probe(0, 0), FIRST_TURN),
        (2, Probe(192, 192), LATEST),
        (2, Probe(256, 256), LATEST),
        (2, Probe(256, 192), LATEST),
        (2, Probe(192, 128), NO_STATE),
        (2, Probe(192, 0), NO_STATE),
        (2, Probe(128, 128), KV_GONE),
    ],
)
def test_why_a_turn_did_not_resume_later(turn, found, why):
    assert why_not_later(turn, 192, found) == why


def test_every_prompt_goes_on_from_the_one_before_with_its_answer():
    llm = LLM(BUILTIN_MODEL_DIR, enable_prefix_caching=False)
    served = conversation_turns(llm, conversations=2, turns=3, sentences=8)
    assert sorted((t.conversation, t.turn) for t in served) == [
        (talk, turn) for talk in (1, 2) for turn in (1, 2, 3)
    ]
    for talk in (1, 2):
        first, second, third = [t for t in served if t.conversation == talk]
        assert (first.turn, second.turn, third.turn) == (1, 2, 3)
        assert second.prompt[: len(first.prompt)] == first.prompt
        said = llm.tokenizer.decode(second.prompt[len(first.prompt) :])
        assert said.startswith(f" {first.answer}<|im_end|><|im_start|>user:")
        assert said.endswith("?<|im_end|><|im_start|>assistant:")
        assert third.prompt[: len(second.prompt)] == second.prompt


def run(tmp_path, *more):
    path = tmp_path / "new" / "x.json"
    sizes = ["--conversations", 3, "--turns", 3, "--sentences", 24, "--max-tokens", 2]
    status = main([str(o) for o in [*sizes, "--slots", 5, 40, "--json", path, *more]])
    return status, path


def test_a_large_pool_resumes_at_the_latest_boundary_and_the_smallest_never(tmp_path, capsys):
    status, path = run(tmp_path)
    assert status == 0
    content = json.loads(path.read_text())
    rows = content["rows"]
    assert len(rows) == 2 * 9
    for row in rows:
        assert row["recomputed_tokens"] == row["prompt_tokens"] - row["boundary"]
        assert row["ttft_ms"] > 0 and row["ttft_cold_ms"] > 0
        if row["turn"] == 1:
            assert row["why_not_later"] == FIRST_TURN and row["boundary"] == 0
            assert row["miss_reason"] == "no_checkpoint"
        elif row["num_slots"] == 40:
            assert row["why_not_later"] == LATEST and row["miss_reason"] is None
            assert row["boundary"] == row["latest"] >= 64
        else:  # of 5 slots one is padding, and 4 sequences have a right to a live one each
            assert row["why_not_later"] == NO_STATE and row["boundary"] == 0
            assert row["kv_reach"] >= row["latest"] and row["miss_reason"] == "no_checkpoint"
    assert content["by_turn"] == aggregated(rows)
    assert " ".join(content["conclusion"].split()) in " ".join(capsys.readouterr().out.split())
    assert content["conclusion"].startswith("With 40 slots 100 % of the later turns resume")
    picture = path.with_suffix(".png")
    drawn = picture.read_bytes()
    draw(content, picture)
    assert picture.read_bytes() == drawn and drawn.startswith(b"\x89PNG")


def test_without_room_for_blocks_it_is_the_kv_that_is_gone(tmp_path):
    status, path = run(tmp_path, "--num-blocks", 6)
    assert status == 0
    rows = json.loads(path.read_text())["rows"]
    assert KV_GONE in {row["why_not_later"] for row in rows if row["num_slots"] == 40}


def test_a_state_that_is_off_by_one_part_in_a_thousand_fails_the_run(
    tmp_path, perturb_restores, capsys
):
    perturb_restores()
    status, path = run(tmp_path)
    assert status == 1 and not path.exists()
    assert "turn 2: logits of new token 0 differ" in capsys.readouterr().err


def test_another_model_is_served_and_named(tiny_model, tmp_path):
    status, path = run(tmp_path, "--model", tiny_model, "--conversations", 2, "--turns", 2)
    content = json.loads(path.read_text())
    assert status == 0 and content["options"]["model"] == "tiny"
    assert content["answered"] == 0, "random weights know nothing"
    assert {row["why_not_later"] for row in content["rows"]} == {FIRST_TURN, LATEST, NO_STATE}


def test_prompts_beyond_the_model_are_refused(tiny_model, tmp_path, capsys):
    status, path = run(tmp_path, "--model", tiny_model, "--sentences", 200)
    assert status == 2 and not path.exists()
    assert "tokens are needed; the model has 4096" in capsys.readouterr().err


def test_one_turn_is_no_conversation(tmp_path, refusal):
    line = refusal(main, ["--turns", 1, "--json", tmp_path / "x.json"])
    assert line == "multi_turn: error: --turns 1: a conversation has at least 2"
