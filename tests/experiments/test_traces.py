"""Traces are read as they are written, and a bad line is named."""

import gzip
import json

import pytest

from experiments.traces import (
    CLAUDE_FILE,
    DAY_S,
    MOONCAKE_FILE,
    claude_sessions,
    mooncake_requests,
)


def call(t, tokens, runs, out=5):
    return {"t": t, "in": tokens, "out": out, "h": runs}


def claude(tmp_path, *sessions):
    lines = [json.dumps({"bs": 64} | session) for session in sessions]
    with gzip.open(tmp_path / CLAUDE_FILE, "wt") as file:
        file.write("\n".join(lines) + "\n")
    return tmp_path


def mooncake(tmp_path, *lines):
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (tmp_path / MOONCAKE_FILE).write_text("\n".join(text) + "\n")
    return tmp_path


def chat(timestamp, tokens, ids, out=5):
    return {
        "timestamp": timestamp,
        "input_length": tokens,
        "output_length": out,
        "hash_ids": ids,
    }


def test_a_session_is_its_calls_and_those_of_its_sub_agents_in_the_order_of_time(tmp_path):
    sub = {"sub": [call(1.0, 64, [[9, 1]]), call(7.0, 0, [])], "t": 4.0}
    requests = [call(0.0, 200, [[1, 2], [5, 1]], out=7), sub, call(10.0, 128, [[1, 2]])]
    found = claude_sessions(claude(tmp_path, {"id": "a", "r": requests}))
    start = found[0].time_s
    assert 0 <= start < DAY_S
    assert [round(each.time_s - start, 6) for each in found] == [0.0, 5.0, 10.0, 11.0]
    assert [each.input_tokens for each in found] == [200, 64, 128, 0]
    assert [each.output_tokens for each in found] == [7, 5, 5, 5]
    assert [each.block_ids(64) for each in found] == [[1, 2, 5], [9], [1, 2], []]


def test_the_same_id_in_two_sessions_is_two_ids(tmp_path):
    sessions = [{"id": name, "r": [call(0.0, 64, [[1, 1]])]} for name in "ab"]
    found = claude_sessions(claude(tmp_path, *sessions))
    assert len({each.block_ids(64)[0] for each in found}) == 2
    assert len({each.time_s for each in found}) == 2


def test_a_start_is_drawn_from_seed_and_session_whatever_else_is_read(tmp_path):
    sessions = [{"id": name, "r": [call(0.0, 64, [[1, 1]])]} for name in "abc"]
    folder = claude(tmp_path, *sessions)
    (alone,) = claude_sessions(folder, sessions=1)
    assert alone in claude_sessions(folder)
    assert [alone] == claude_sessions(folder, sessions=1, seed=0)
    assert [alone] != claude_sessions(folder, sessions=1, seed=1)


def test_chat_requests_come_by_time_and_share_ids(tmp_path):
    lines = [chat(2500, 1024, [0, 1]), chat(500, 600, [0, 4], out=9)]
    first, second = mooncake_requests(mooncake(tmp_path, *lines))
    assert (first.time_s, first.input_tokens, first.output_tokens) == (0.5, 600, 9)
    assert second.time_s == 2.5
    assert first.block_ids(512) == [0], "the last block is partial"
    assert second.block_ids(512) == [0, 1]
    assert first.block_ids(64) == [0, 1, 2, 3, 4, 5, 6, 7, 32]
    assert second.block_ids(64) == list(range(16))
    assert len(mooncake_requests(tmp_path, requests=1)) == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "line 2: Expecting"),
        ("[]", "line 2: list indices"),
        (chat(0, 512, [0, 1]), "line 2: 2 hash ids for 512 tokens; expected 1"),
        (chat(0, -1, []), "line 2: input_length is -1; expected tokens >= 0"),
        (chat(-1, 0, []), "line 2: timestamp is -1; expected >= 0"),
        (chat(0, 512, ["0"]), "line 2: hash_ids must be integers"),
        ({"timestamp": 0, "input_length": 0, "hash_ids": []}, "line 2: no 'output_length'"),
    ],
)
def test_a_malformed_chat_request_names_file_and_line(tmp_path, bad, message):
    folder = mooncake(tmp_path, chat(0, 0, []), bad)
    with pytest.raises(ValueError, match=message) as caught:
        mooncake_requests(folder)
    assert str(folder / MOONCAKE_FILE) in str(caught.value)
    assert len(mooncake_requests(folder, requests=1)) == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"bs": 32, "r": []}, "line 2: bs is 32; expected 64"),
        ({"r": [call(0.0, 128, [[1, 1]])]}, "line 2: 1 hash ids for 128 tokens; expected 2"),
        ({"r": [call(0.0, 64, [[1, 2], [1, -1]])]}, "line 2: hash runs are"),
        ({"r": [{"sub": [call(0.0, 0, [])]}]}, "line 2: no 't'"),
        ({"r": [call(0.0, 64, [[1]])]}, "line 2: not enough values"),
    ],
)
def test_a_malformed_session_names_file_and_line(tmp_path, bad, message):
    folder = claude(tmp_path, {"id": "a", "r": []}, {"id": "b"} | bad)
    with pytest.raises(ValueError, match=message) as caught:
        claude_sessions(folder)
    assert str(folder / CLAUDE_FILE) in str(caught.value)


def test_a_file_that_is_not_compressed_is_named(tmp_path):
    (tmp_path / CLAUDE_FILE).write_text("{}\n")
    with pytest.raises(ValueError, match=CLAUDE_FILE):
        claude_sessions(tmp_path)
