"""Concurrent clients: a closed loop, the same outputs as a serial run, and hits where they must."""

import json
from types import SimpleNamespace

import pytest

from cache.linear_state_prefix_cache import LinearStatePrefixCache
from engine.builtin import BUILTIN_MODEL_DIR
from engine.tokenizer import Tokenizer
from experiments.clients import Request, Served, make_workload, serve_clients
from experiments.concurrency import draw, failures, main, percentile, summary
from tests.experiments.fake_engine import OneAtATime, request_output

DOCUMENT, SUFFIX, NEW = 128, 64, 3


def run(model, tmp_path, *more):
    """Exit status, the results file, and the path of the picture."""
    path = tmp_path / "out.json"
    options = ["--model", model, "--clients", 3, 1, "--requests-per-client", 4, "--json", path]
    options += ["--document-tokens", DOCUMENT, "--suffix-tokens", SUFFIX, "--max-tokens", NEW]
    status = main([str(option) for option in [*options, *more]])
    return status, json.loads(path.read_text()), path.with_suffix(".png")


@pytest.mark.parametrize("running", [2, 32])
def test_every_request_has_the_serial_output_and_shared_ones_hit(
    tiny_model, tmp_path, capsys, running
):
    status, content, picture = run(tiny_model, tmp_path, "--max-num-seqs", running)
    assert status == 0 and content["passed"] and content["failures"] == []
    rows = content["rows"]
    expected = [(1, False), (1, True), (3, False), (3, True)]
    assert [(row["clients"], row["caching"]) for row in rows] == expected
    for row in rows:
        assert row["bits_equal"] is True and row["requests"] == 4 * row["clients"]
        # Of four requests of a client one brings its own document.
        hit = 3 / 4 * DOCUMENT / (DOCUMENT + SUFFIX) if row["caching"] else 0
        assert row["token_hit_rate"] == pytest.approx(hit)
        assert row["requests_per_s"] == pytest.approx(row["requests"] / row["seconds"])
        assert row["new_tokens_per_s"] == pytest.approx(NEW * row["requests_per_s"])
        for name in ("ttft", "ttft_shared", "ttft_own", "latency"):
            assert 0 < row[f"{name}_p50_ms"] <= row[f"{name}_p95_ms"]
        assert row["ttft_p95_ms"] < row["latency_p95_ms"]
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.endswith(" ".join(content["conclusion"].split()))
    again = tmp_path / "again.png"
    draw(content, again)
    assert again.read_bytes() == picture.read_bytes()


def test_a_state_that_is_off_by_one_part_in_a_thousand_fails_the_run(
    tiny_model, tmp_path, perturb_restores, capsys
):
    perturb_restores(lambda op, num_ops, copy: num_ops > 1)  # only where requests run together
    status, content, picture = run(tiny_model, tmp_path)
    assert status == 1 and content["conclusion"] is None and not picture.exists()
    assert [row["bits_equal"] for row in content["rows"]] == [True, True, True, False]
    assert all(f.startswith("3 clients, caching on, client ") for f in content["failures"])
    assert "logits of new token 0 differ" in capsys.readouterr().err


def test_a_cache_that_never_hits_fails_the_run(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(LinearStatePrefixCache, "deepest", lambda *_: None)
    status, content, _ = run(tiny_model, tmp_path)
    assert status == 1
    assert len(content["failures"]) == 3 + 9  # the shared ones of one client and of three
    assert all("reused 0 tokens, not 128" in failure for failure in content["failures"])


# ---- the loop


def output(prompt, *, cached=0, ttft_ms=1.0, token_ids=(7,)):
    reason = None if cached else "no_checkpoint"
    numbers = {"num_cached_tokens": cached, "miss_reason": reason, "ttft_ms": ttft_ms}
    return request_output(prompt, token_ids, **numbers)


def test_a_client_hands_in_its_next_request_when_its_last_has_finished():
    llm = OneAtATime()
    clients = [[Request([i], True) for i in ids] for ids in ([1, 2, 3], [11], [21, 22])]
    served, seconds = serve_clients(llm, clients, None)
    assert llm.held == [[1, 11, 21], [11, 21, 2], [21, 2], [2, 22], [22, 3], [3]]
    prompts = [[done.output.prompt_token_ids[0] for done in each] for each in served]
    assert prompts == [[1, 2, 3], [11], [21, 22]]
    assert seconds > 0 and all(done.latency_ms > 0 for each in served for done in each)


# ---- the requests and what is said about them


def test_shared_documents_are_asked_other_questions_and_own_ones_share_nothing():
    options = SimpleNamespace(
        clients=[2, 6], requests_per_client=8, document_tokens=DOCUMENT, suffix_tokens=SUFFIX
    )
    workload = make_workload(Tokenizer.from_directory(BUILTIN_MODEL_DIR), options)
    assert [len(requests) for requests in workload.clients] == [8] * 6
    assert all(sum(r.shared for r in requests) == 6 for requests in workload.clients)
    prompts = [r.prompt for requests in workload.clients for r in requests] + workload.priming
    assert {len(prompt) for prompt in prompts} == {DOCUMENT + SUFFIX}
    assert len(set(map(tuple, prompts))) == 6 * 8 + 4 * 2
    primed = {tuple(prompt[:DOCUMENT]) for prompt in workload.priming}
    assert len(primed) == 4
    own = []
    for request in (r for requests in workload.clients for r in requests):
        assert (tuple(request.prompt[:DOCUMENT]) in primed) is request.shared
        own += [] if request.shared else [tuple(request.prompt[:64])]
    assert len(set(own)) == len(own) == 12
    assert not {prompt[:64] for prompt in primed} & set(own)


def test_other_tokens_a_lost_hit_and_a_false_hit_are_failures():
    requests = [[Request([1], True), Request([2], False)]]
    good = [[Served(output([1]), 1.0), Served(output([2]), 1.0)]]
    hits = [[Served(output([1], cached=64), 1.0), Served(output([2]), 1.0)]]
    assert failures(good, hits, requests, 64) == []
    assert failures(good, good, requests, 64) == [
        "client 0, request 0: reused 0 tokens, not 64 (miss reason: no_checkpoint)"
    ]
    bad = [[hits[0][0], Served(output([2], cached=64, token_ids=[8]), 1.0)]]
    assert failures(good, bad, requests, 64) == [
        "client 0, request 1: token ids [8], not [7]",
        "client 0, request 1: reused 64 tokens, not 0 (miss reason: None)",
    ]


def test_a_run_is_summed_up():
    requests = [[Request([0] * 10, True), Request([0] * 10, False)], [Request([0] * 20, True)]]
    served = [
        [
            Served(output([0] * 10, cached=5, ttft_ms=1.0), 10.0),
            Served(output([0] * 10, ttft_ms=9.0), 30.0),
        ],
        [Served(output([0] * 20, cached=15, ttft_ms=3.0), 20.0)],
    ]
    row = summary(served, requests, 2.0)
    assert row["requests"] == 3 and row["requests_per_s"] == row["new_tokens_per_s"] == 1.5
    assert row["tokens_per_s"] == (40 + 3) / 2 and row["token_hit_rate"] == 0.5
    assert (row["ttft_p50_ms"], row["ttft_p95_ms"]) == (3.0, 9.0)
    assert (row["ttft_shared_p50_ms"], row["ttft_own_p50_ms"]) == (1.0, 9.0)
    assert (row["latency_p50_ms"], row["latency_p95_ms"]) == (20.0, 30.0)
    alone = summary([served[1]], [requests[1]], 1.0)
    assert alone["ttft_own_p50_ms"] is None


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([5.0], 50, 5.0),
        ([2.0, 1.0], 50, 1.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        (range(1, 101), 95, 95),
        (range(1, 20), 95, 19),
        (range(1, 21), 95, 19),
    ],
)
def test_percentiles_are_measured_values(values, percent, expected):
    assert percentile(list(values), percent) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--clients", "0"], "--clients: '0'; expected an integer of at least 1"),
        (["--document-tokens", "100"], "--document-tokens 100: not a multiple of 64"),
        (["--suffix-tokens", "9"], "--suffix-tokens 9: must be at least 16"),
    ],
)
def test_a_bad_option_is_one_clear_error(refusal, options, message):
    line = refusal(main, options)
    assert line.startswith("concurrency: error: ") and message in line
