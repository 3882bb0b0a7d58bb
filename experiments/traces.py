"""What did real clients send? Reads two public request traces into one kind of request.

claude_code_sessions.jsonl.gz: coding-agent sessions, prefix ids of blocks of 64 tokens, local to a
session. They say nothing of when a session began: its start is drawn, seeded by its id, uniform
over 24 hours. mooncake_conversation_trace.jsonl: one hour of chat requests, prefix ids of blocks of
512 tokens, shared by all requests.
"""

import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from experiments.results_io import ROOT

DEFAULT_TRACES = ROOT / "build" / "traces"
CLAUDE_FILE, MOONCAKE_FILE = "claude_code_sessions.jsonl.gz", "mooncake_conversation_trace.jsonl"
CLAUDE_BLOCK, MOONCAKE_BLOCK = 64, 512
DAY_S = 24 * 3600.0
_IDS_OF_A_SESSION = 1 << 32

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: `runs` are its prefix ids, (first, count) each, one id for `hash_block` tokens.

    Ids are global here: equal ids mean equal tokens up to the end of the block.
    """

    session: str
    time_s: float
    input_tokens: int
    output_tokens: int
    hash_block: int
    runs: Runs

    def block_ids(self, block_size: int) -> list[int]:
        """Ids of the whole blocks of `block_size` tokens; it divides `hash_block`, or the other way
        round.

        Smaller blocks than the trace's own are numbered within theirs: prompts that part inside a
        block of the trace share nothing of it. Larger ones have the id of the last part of them.
        """
        parts = max(1, self.hash_block // block_size)
        whole = max(1, block_size // self.hash_block)
        matched = parts * block_size == self.hash_block * whole
        assert matched, (block_size, self.hash_block)
        spans = (range(first * parts, (first + count) * parts) for first, count in self.runs)
        ids = [id_ for span in spans for id_ in span]
        return ids[whole - 1 :: whole][: self.input_tokens // block_size]


def claude_sessions(folder: Path, *, sessions: int | None = None, seed: int = 0) -> list[Request]:
    """Requests of the first `sessions` sessions (None: all) in the order of their times."""
    path = folder / CLAUDE_FILE
    requests: list[Request] = []
    for index, parsed in enumerate(_parsed(path, _claude_session, sessions)):
        session, calls = parsed
        start = random.Random(f"{seed}/{session}").uniform(0.0, DAY_S)
        base = index * _IDS_OF_A_SESSION
        for time_s, num_in, num_out, runs in calls:
            shifted = tuple((base + first, count) for first, count in runs)
            request = Request(session, start + time_s, num_in, num_out, CLAUDE_BLOCK, shifted)
            requests.append(request)
    return sorted(requests, key=lambda request: request.time_s)


def mooncake_requests(folder: Path, *, requests: int | None = None) -> list[Request]:
    """The first `requests` requests (None: all) in the order of their times."""
    found = _parsed(folder / MOONCAKE_FILE, _mooncake_request, requests)
    return sorted(found, key=lambda request: request.time_s)


# ---- files


def _parsed(path: Path, parse: Callable[[Any], Any], limit: int | None) -> Iterator[Any]:
    """What `parse` makes of each line; ValueError names the file and the line it can't read."""
    for number, line in enumerate(islice(_lines(path), limit), start=1):
        try:
            yield parse(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{path}: line {number}: {what}") from error


def _lines(path: Path) -> Iterator[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            yield from file
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error


# ---- lines

Call = tuple[float, int, int, Runs]


def _claude_session(line: dict[str, Any]) -> tuple[str, list[Call]]:
    """(id, calls) of a session, those of its sub-agents among them."""
    _expect(line["bs"] == CLAUDE_BLOCK, f"bs is {line['bs']}; expected {CLAUDE_BLOCK}")
    calls: list[Call] = []
    for element in line["r"]:
        inner, offset = [element], 0.0
        if "sub" in element:
            inner, offset = element["sub"], _number(element, "t")
        calls += [_claude_call(each, offset) for each in inner]
    return str(line["id"]), calls


def _claude_call(call: dict[str, Any], offset: float) -> Call:
    num_in = _tokens(call, "in")
    runs = tuple((int(first), int(count)) for first, count in call["h"])
    _expect(all(first >= 0 and count > 0 for first, count in runs), f"hash runs are {runs}")
    _expect(all(a + n < _IDS_OF_A_SESSION for a, n in runs), f"hash runs are {runs}")
    _expect_ids(sum(count for _, count in runs), num_in // CLAUDE_BLOCK, num_in)
    return offset + _number(call, "t"), num_in, _tokens(call, "out"), runs


def _mooncake_request(line: dict[str, Any]) -> Request:
    num_in = _tokens(line, "input_length")
    ids = line["hash_ids"]
    _expect(all(type(id_) is int and id_ >= 0 for id_ in ids), "hash_ids must be integers >= 0")
    _expect_ids(len(ids), -(-num_in // MOONCAKE_BLOCK), num_in)
    return Request(
        session="",
        time_s=_number(line, "timestamp") / 1000,
        input_tokens=num_in,
        output_tokens=_tokens(line, "output_length"),
        hash_block=MOONCAKE_BLOCK,
        runs=tuple(_runs(ids)),
    )


def _runs(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Consecutive ids as (first, count)."""
    runs: list[tuple[int, int]] = []
    for id_ in ids:
        if runs and id_ == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((id_, 1))
    return runs


def _tokens(line: dict[str, Any], name: str) -> int:
    value = line[name]
    _expect(type(value) is int and value >= 0, f"{name} is {value!r}; expected tokens >= 0")
    return value


def _number(line: dict[str, Any], name: str) -> float:
    value = line[name]
    _expect(type(value) in (int, float) and value >= 0, f"{name} is {value!r}; expected >= 0")
    return float(value)


def _expect_ids(found: int, expected: int, num_in: int) -> None:
    _expect(found == expected, f"{found} hash ids for {num_in} tokens; expected {expected}")


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
