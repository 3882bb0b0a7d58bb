"""The regression: where a request must resume, ratios, what counts as wrong, and a real server."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine.builtin import BUILTIN_MODEL_DIR
from engine.tokenizer import Tokenizer
from experiments import regression, regression_clients
from experiments.regression import main, report
from experiments.regression_checks import (
    book_errors,
    difference,
    differences,
    expected_boundaries,
    wrong_boundaries,
)
from experiments.regression_clients import Answer, Phase
from experiments.regression_expected import Placement
from experiments.regression_graphs import replay_errors
from experiments.regression_guidellm import GuideFailed, read_report
from experiments.regression_passes import OneServer, Run
from experiments.regression_report import CONCURRENT, MODES, SERIAL, WORKLOADS
from experiments.regression_rows import percentile, phase_row, turn_rows, with_ratios
from experiments.regression_server import ServerProcess
from experiments.regression_workloads import (
    OWN,
    SHARED,
    TALKS,
    Request,
    Sizes,
    Workload,
    history,
    make_workloads,
    prompt_text,
)

TINY = Sizes(
    document_tokens=264, questions=2, talks=2, turns=2, heads=1, tails=2, tail_tokens=70,
    own_documents=2,
)  # fmt: skip
GOOD = Answer(" a b", (" a", " b"), (-0.5, -0.25), "stop", 200, 128, 128, None, 10.0)


# ---- where a request must resume


def upto(n, last=0):
    """A prompt of n tokens; its end can be made its own."""
    return [*range(n - 1), last]


def test_the_same_prompt_again_resumes_at_its_last_stride():
    placement = Placement()
    assert [placement.serve(upto(200)) for _ in range(2)] == [0, 192]


def test_a_prompt_that_ends_on_the_grid_resumes_a_stride_before_its_end():
    placement = Placement()
    assert [placement.serve(upto(192)) for _ in range(2)] == [0, 128]


def test_a_turn_that_replaces_the_last_tokens_of_the_one_before_resumes_above_them():
    placement = Placement()
    placement.serve(upto(256))
    assert placement.serve([*range(180), *range(1000, 1200)]) == 128
    assert placement.serve([*range(200), *range(2000, 2200)]) == 192  # they are still there


def test_what_goes_on_from_a_prompt_on_the_grid_resumes_at_its_end_only_if_that_was_named():
    for point, resumed in ((0, 128), (192, 192), (191, 128)):
        placement = Placement()
        placement.serve(upto(192), point=point)
        assert placement.serve([*upto(192), *range(50)]) == resumed


def test_the_third_prompt_with_a_prefix_finds_the_place_where_the_second_branched_off():
    head = list(range(300))
    prompts = [head + [1000 + i] * 100 for i in range(4)]
    placement = Placement()
    assert [placement.serve(prompt) for prompt in prompts] == [0, 0, 256, 256]


def test_on_a_long_prefix_the_second_prompt_finds_every_512th_token():
    head = list(range(1200))
    placement = Placement(checkpoint_every=512)
    prompts = [head + [5000 + i] * 200 for i in range(3)]
    assert [placement.serve(prompt) for prompt in prompts] == [0, 1024, 1152]
    assert placement.serve(head[:600] + [9] * 200) == 512
    assert placement.serve(head[:600] + [8] * 200) == 512  # parts 64 tokens below: near enough


def test_up_to_64_tokens_never_resume():
    placement = Placement()
    assert [placement.serve(upto(64)) for _ in range(3)] == [0, 0, 0]
    assert [placement.serve(upto(65, last=1)) for _ in range(2)] == [0, 64]


def test_a_chat_is_expected_to_go_on_from_its_whole_prompt():
    first, second = Request("1", "x"), Request("2", "y", after="1")
    for chat, resumed in ((True, 128), (False, 64)):
        workload = Workload("w", chat, (first,), ((second,),))
        prompts = {"1": upto(128), "2": [*upto(128), *range(20)]}
        assert expected_boundaries(workload, prompts) == {"1": 0, "2": resumed}


# ---- workloads


def test_a_turn_sends_the_whole_history_with_the_answers_that_came():
    requests = Request("1", "x?"), Request("2", "y?", after="1"), Request("3", "z?", after="2")
    talk = Workload(TALKS, True, requests[:1], (requests[1:],))
    answers = {"1": " A.", "2": " B."}
    assert history(talk, requests[2], answers) == ["x?", " A.", "y?", " B.", "z?"]
    user, end, said = "<|im_start|>user: ", "<|im_end|>", "<|im_start|>assistant:"
    assert prompt_text(talk, requests[1], answers) == (
        f"{user}x?{end}{said} A.{end}{user}y?{end}{said}"
    )
    assert prompt_text(replace(talk, chat=False), requests[0], answers) == "x?"


def test_a_single_client_takes_the_lanes_in_turn():
    a, b, c = (Request(name, name) for name in "abc")
    assert Workload("w", True, (), ((a, b), (c,))).timed == [a, c, b]


# ---- what counts as wrong


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"ttft_ms": 3.0, "cached_tokens": 0, "boundary": 0}, None),
        ({"tokens": (" a", " c")}, "token 1 is ' c', not ' b'"),
        ({"tokens": (" a",)}, "1 tokens, not 2"),
        ({"text": " a  b"}, "the text is ' a  b', not ' a b'"),
        ({"finish_reason": "length"}, "it ended by length, not stop"),
        ({"logprobs": (-0.5, -0.25000001)}, "the tokens are the same, but not"),
    ],
)
def test_what_makes_an_answer_differ(change, told):
    found = difference(GOOD, replace(GOOD, **change))
    assert found is told is None or found.startswith(told)


def test_a_missing_answer_differs():
    assert differences(Phase({"x": GOOD}), Phase()) == {"x": "no answer"}


@pytest.mark.parametrize(
    ("change", "later", "told"),
    [
        ({}, False, []),
        ({}, True, []),
        ({"cached_tokens": 64}, False, ["64 cached tokens, but resumed from 128"]),
        ({"prompt_tokens": 201}, False, ["a prompt of 201 tokens, not 200"]),
        ({"cached_tokens": 192, "boundary": 192}, True, []),
        ({"cached_tokens": 192, "boundary": 192}, False, ["resumed from 192, not 128"]),
        ({"cached_tokens": 64, "boundary": 64}, True, ["resumed from 64, not at least 128"]),
        ({"cached_tokens": 256, "boundary": 256}, True, ["resumed from 256, not at least 128"]),
    ],
)
def test_which_boundary_is_wrong(change, later, told):
    phase = Phase({"x": replace(GOOD, **change)})
    found = wrong_boundaries(phase, {"x": upto(200)}, {"x": 128}, may_be_later=later)
    assert len(found) == len(told)
    assert all(f.startswith(f"x: {t}") for f, t in zip(found, told, strict=True))


class Books:
    """A server that says what it is told to."""

    def __init__(self, **wrong):
        said = {"queries": 3, "hits": 2, "tokens_reused": 192, "state_evictions": 0}
        empty = ("slots_live", "blocks_in_use")
        empty += tuple(f"requests_{what}" for what in ("waiting", "running", "background"))
        self.said = said | dict.fromkeys(empty, 0) | wrong

    def stats(self):
        return self.said

    def metrics(self):
        counters = {f"warmstate_{name}_total": value for name, value in self.said.items()}
        stopped = 'warmstate_requests_total{outcome="stop"}'
        return counters | {stopped: 2.0, 'warmstate_requests_total{outcome="length"}': 1.0}


def test_books_that_are_right_and_books_that_are_not(monkeypatch):
    monkeypatch.setattr("experiments.regression_checks.eventually", lambda holds: holds())
    tokens = [64, 0, 128]
    assert book_errors(Books(), tokens) == []
    for name in ("queries", "hits", "tokens_reused"):
        where, also = book_errors(Books(**{name: 7}), tokens)
        assert where.startswith(f"/stats says {name} 7, the clients counted ")
        assert also.startswith(f"/metrics says {name} 7, ")
    assert book_errors(Books(slots_live=1), tokens) == ["slots_live is 1 after the last answer"]
    assert len(book_errors(Books(), [*tokens, 0])) == 3
    assert "pools are too small" in book_errors(Books(state_evictions=1), tokens)[0]


# ---- numbers


def test_percentiles_and_ratios_of_made_up_samples():
    assert [percentile([4, 1, 3, 2], p) for p in (50, 95, 100)] == [2, 4, 4]
    lanes = tuple((Request(name, "x"),) for name in "bc")
    workload = Workload("w", True, (Request("a", "x"),), lanes)

    def row(server, *ttfts, seconds):
        answers = {name: replace(GOOD, ttft_ms=t) for name, t in zip("abc", ttfts, strict=True)}
        due = dict.fromkeys("abc", 64)
        labels = {"server": server, "mode": "serial", "clients": 1}
        return phase_row(workload, Phase(answers, seconds), due, ["b"], **labels)

    cold, warm = with_ratios([row("off", 9, 80, 90, seconds=2), row("x", 900, 20, 10, seconds=1)])
    assert (cold["ttft_p50_ms"], cold["ttft_p95_ms"]) == (80, 90), "the priming is not timed"
    assert cold["ttft_p50_ratio"] == cold["ttft_p95_ratio"] == cold["new_tokens_ratio"] == 1
    assert (warm["ttft_p50_ratio"], warm["ttft_p95_ratio"]) == (8.0, 4.5)
    assert (warm["new_tokens_per_s"], warm["new_tokens_ratio"]) == (4.0, 2.0)
    assert (warm["cached_tokens"], warm["expected_cached_tokens"]) == (256, 128)
    assert (warm["outputs"], warm["outputs_that_differ"]) == (3, 1)
    assert with_ratios([warm])[0]["ttft_p50_ratio"] is None, "without caching off there is none"


def test_turns_are_averaged_over_the_conversations():
    lanes = tuple((Request(f"{talk}2", "x", f"{talk}1"),) for talk in "ab")
    workload = Workload(TALKS, True, tuple(Request(f"{talk}1", "x") for talk in "ab"), lanes)
    answers = {"a2": replace(GOOD, limit_reason="unseen"), "b2": replace(GOOD, prompt_tokens=300)}
    [row] = turn_rows(workload, Phase(answers), {"a2": 64, "b2": 128}, ["b2"], exact=False)
    assert (row["turn"], row["conversations"], row["boundary"]) == (2, 2, 128)
    assert (row["expected_boundary"], row["recomputed_tokens"]) == (96, 122)
    assert row["limit_reasons"] == {"unseen": 1}
    assert row["outputs_that_differ"] == 1


def guide_report(successful, errors=()):
    return {
        "benchmarks": [
            {
                "metrics": {
                    "request_totals": {"successful": successful, "errored": len(errors)},
                    "time_to_first_token_ms": {"successful": {"percentiles": {"p50": 7, "p95": 9}}},
                    "output_tokens_per_second": {"successful": {"mean": 80}},
                },
                "requests": {
                    "successful": [{"input_metrics": {"cached_tokens": 64}}] * successful,
                    "errored": [{"info": {"error": error}} for error in errors],
                },
            }
        ]
    }


def test_guidellms_report_is_read_and_an_answer_that_is_missing_fails():
    guided = read_report(guide_report(2), 2)
    assert (guided.ttft_p50_ms, guided.ttft_p95_ms, guided.new_tokens_per_s) == (7, 9, 80)
    assert guided.cached_tokens == [64, 64]
    with pytest.raises(GuideFailed, match="status 400"):
        read_report(guide_report(1, ["status 400"]), 2)


# ---- a whole run


def made_up(run, server, ttft):
    for mode in MODES:
        for name in WORKLOADS:
            labels = {"workload": name, "mode": mode, "server": server, "client": "openai"}
            times = {"ttft_p50_ms": ttft, "ttft_p95_ms": 2 * ttft, "new_tokens_per_s": 9.0}
            counts = {"clients": 1 if mode == SERIAL else 16, "cached_tokens": 64, "outputs": 5}
            counts |= {"expected_cached_tokens": 64, "outputs_that_differ": 0}
            run.rows.append(labels | times | counts)


def turn_of(setting, exact):
    names = "turn prompt_tokens boundary expected_boundary recomputed_tokens ttft_p50_ms"
    row = dict.fromkeys(names.split(), 2.0) | {"conversations": 3, "limit_reasons": {}}
    return row | {"setting": setting, "exact": exact, "outputs_that_differ": int(not exact)}


@pytest.fixture
def fakes(monkeypatch):
    """Servers that are said to have run: without caching in 50 ms, with it in 10."""

    def serve(run, name):
        made_up(run, name, 50.0 if name == "off" else 10.0)

    def converse(run):
        run.turns += [turn_of("exact", True), turn_of("loose", False)]

    def ask_recorded_graphs(run):
        run.recorded += [{"server": name, "outputs": 4} for name in ("off", "graphs")]

    monkeypatch.setattr(regression, "serve", serve)
    monkeypatch.setattr(regression, "ask_recorded_graphs", ask_recorded_graphs)
    monkeypatch.setattr(regression, "on_gpu", lambda: False)
    monkeypatch.setattr(regression, "converse_without_idle_prefill", converse)
    monkeypatch.setattr(regression, "make_workloads", lambda *_: [])


def run_main(tmp_path, *more):
    path = tmp_path / "x.json"
    status = main(["--small", "--json", str(path), *more])
    return status, json.loads(path.read_text()), path.with_suffix(".png")


def test_the_sentence_at_the_end_has_the_ratio_and_the_chart_is_drawn_again(
    fakes, tmp_path, capsys
):
    status, content, picture = run_main(tmp_path, "--no-guidellm")
    assert status == 0 and content["passed"] and content["guidellm"] == "not run"
    assert content["conclusion"].startswith(
        "Yes: at the client the median first token on a shared prefix comes 5.0 times sooner than "
        "without caching with one client and 5.0 times with 16"
    )
    assert "all 203 exact answers" in content["conclusion"]
    assert content["conclusion"].endswith(
        "; a conversation's turn recomputes 2 (exact), 2 (loose) tokens, and of 3 answers not "
        "asked to be exact 1 differ."
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "GuideLLM: not run." in said and said.endswith(content["conclusion"])
    drawn = picture.read_bytes()
    regression.draw(content, picture)
    assert picture.read_bytes() == drawn and drawn.startswith(b"\x89PNG")


@pytest.mark.parametrize("gpu", [False, True])
def test_graphs_are_asked_everything_on_a_gpu_and_recorded_ones_a_little(
    fakes, monkeypatch, tmp_path, gpu
):
    monkeypatch.setattr(regression, "on_gpu", lambda: gpu)
    path = tmp_path / "x.json"
    assert main(["--no-guidellm", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    asked = {row["server"] for row in content["rows"]}
    assert ({"graphs", "graphs, overlap"} <= asked) == gpu
    assert content["graphs"] == ("captured" if gpu else "recorded")
    assert ("(and 4 from recorded graphs)" in content["conclusion"]) != gpu
    options = regression.servers()["overlap"]
    assert ("cuda" in options) == gpu and "--overlap" in options


@pytest.mark.parametrize(("replayed", "eager", "wrong"), [(9, 2, 0), (0, 0, 1), (3, 4, 1)])
def test_a_server_that_hardly_uses_its_graphs_is_a_failure(replayed, eager, wrong):
    assert len(replay_errors({"decodes_replayed": replayed, "decodes_eager": eager})) == wrong


def test_a_server_that_does_not_start_fails_the_run(fakes, monkeypatch, tmp_path, capsys):
    def serve(run, name):
        raise RuntimeError("the server did not start")

    monkeypatch.setattr(regression, "serve", serve)
    status, content, picture = run_main(tmp_path)
    assert status == 1 and content["conclusion"] is None and not picture.exists()
    assert "RuntimeError: the server did not start" in capsys.readouterr().err


def test_the_full_run_fails_without_guidellm(fakes, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(regression, "installed", lambda: False)
    path = tmp_path / "x.json"
    assert main(["--json", str(path)]) == 1
    assert "GuideLLM is not installed" in capsys.readouterr().err
    assert main(["--json", str(path), "--small"]) == 0
    assert json.loads(path.read_text())["guidellm"] == "not run"


@pytest.mark.parametrize("option", ["--requests-scale", "--think-seconds", "--clients"])
def test_nothing_of_something_is_refused(option, refusal):
    assert option in refusal(main, [option, 0])


# ---- a real server


@pytest.fixture(scope="module")
def warm_server():
    """A server, and the cached tokens of every answer it gave; at its end the books must agree."""
    cached_tokens = []
    with ServerProcess(*regression.SERVERS["redirect"]) as server:
        yield server, cached_tokens
        assert book_errors(server, cached_tokens) == []
        assert len(book_errors(server, [*cached_tokens, 0])) == 3
        assert server.stop() == []
        assert server.process.poll() == 0


@pytest.fixture
def one(warm_server):
    tokenizer = Tokenizer.from_directory(BUILTIN_MODEL_DIR)
    options = SimpleNamespace(clients=2, think_seconds=0.05)
    run = Run(options, tokenizer, make_workloads(tokenizer, TINY), guidellm=False)
    one = OneServer(run, "redirect", warm_server[0])
    one.cached_tokens = warm_server[1]
    return one


def test_a_changed_token_fails_the_run(one, monkeypatch, tmp_path, capsys):
    run, one.name = one.run, "copy"
    [own] = [workload for workload in run.workloads if workload.name == OWN]
    one.measure(own, SERIAL)
    assert run.failures == []
    read = regression_clients.read_stream

    async def wrong(stream, start):
        answer = await read(stream, start)
        return replace(answer, tokens=(" Nobody", *answer.tokens[1:]))

    monkeypatch.setattr(regression_clients, "read_stream", wrong)
    one.measure(own, CONCURRENT)
    [first, second] = run.failures
    assert first.startswith("caching copy, concurrent, no-reuse: own 1: token 0 is ' Nobody'")
    run.options.json = tmp_path / "x.json"
    assert report(run, run.options, TINY, 1.0) == 1
    assert first in capsys.readouterr().err
    content = json.loads(run.options.json.read_text())
    assert content["failures"] == [first, second] and not content["passed"]
    assert not run.options.json.with_suffix(".png").exists()


def test_two_requests_of_every_workload_on_a_real_server(one):
    run = one.run
    for mode in (SERIAL, CONCURRENT):
        for workload in run.workloads:
            one.measure(workload, mode)
    one.converse("exact", exact=True)
    one.converse("loose", exact=False)
    assert run.failures == []
    rows = {(row["workload"], row["mode"]): row for row in run.rows}
    assert len(rows) == 8
    for (name, _), row in rows.items():
        assert row["ttft_p50_ms"] > 0 and row["new_tokens_per_s"] > 0
        assert row["outputs_that_differ"] == 0
        assert (row["cached_tokens"] > 0) is (name != OWN)
    serial = rows[SHARED, SERIAL]
    assert serial["cached_tokens"] == serial["expected_cached_tokens"] == 2 * 256
    assert [(row["setting"], row["turn"]) for row in run.turns] == [
        ("exact", 2), ("exact", 3), ("loose", 2), ("loose", 3)
    ]  # fmt: skip
    for row in run.turns:
        assert row["boundary"] >= row["expected_boundary"] > 0
