"""The warm-start experiment: what it reports is true, and a broken cache makes it fail."""

import json
import shutil
from itertools import islice

import pytest
import torch

from cache.linear_state_prefix_cache import LinearStatePrefixCache
from engine.config import EngineConfig
from engine.tokenizer import Tokenizer
from experiments.cold_and_warm import (
    Measured,
    Served,
    failures,
    first_difference,
    least_boundary,
    serve,
)
from experiments.results_io import write_json
from experiments.shared_prompts import numbered_sections, shared_prompts
from experiments.warm_start import main
from tests.experiments.fake_engine import OneAtATime, request_output

PREFIX, SUFFIX, EVERY = 330, 100, 128  # forks at 320; prompts end at 430, their grid at 384


def run(model, tmp_path, *more):
    """Exit status, the results file, and the path of the picture."""
    path = tmp_path / "new folder" / "out.json"
    sizes = ["--prefix-tokens", PREFIX, "--suffix-tokens", SUFFIX, "--checkpoint-every", EVERY]
    options = ["--model", model, "--questions", 3, "--max-tokens", 3, "--json", path, *sizes, *more]
    status = main([str(option) for option in options])
    return status, json.loads(path.read_text()), path.with_suffix(".png")


@pytest.mark.parametrize("restore", ["redirect", "copy"])
def test_every_request_hits_its_deepest_boundary_with_equal_bits(
    tiny_model, tmp_path, monkeypatch, capsys, restore
):
    monkeypatch.chdir(tmp_path)
    status, content, picture = run(tiny_model, tmp_path, "--restore", restore)
    assert status == 0 and content["passed"] and content["failures"] == []
    assert content["config"]["restore"] == restore
    rows = content["requests"]
    assert [(row["mode"], row["question"]) for row in rows] == [
        (mode, question) for mode in ("serial", "concurrent") for question in (1, 2, 3)
    ]
    for row in rows:
        assert row["prompt_tokens"] == PREFIX + SUFFIX
        assert row["num_cached_tokens"] == row["boundary"] == 384
        assert row["bits_equal"] is True
        assert row["ratio"] == row["ttft_cold_ms"] / row["ttft_warm_ms"]
        assert min(row["ttft_cold_ms"], row["ttft_fill_ms"], row["ttft_warm_ms"]) > 0
    # The questions part at 330; 320 is also the last boundary 64 tokens above the first one's end.
    assert [row["fill_num_cached_tokens"] for row in rows[:3]] == [0, 320, 320]
    serial = content["stats"]["serial"]
    assert (serial["queries"], serial["hits"]) == (6, 5)
    assert serial["tokens_reused"] == 2 * 320 + 3 * 384
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "serial: 5 hits of 6 queries" in printed
    assert " ".join(content["conclusion"].split()) in " ".join(printed.split())


def test_a_state_that_is_off_by_one_part_in_a_thousand_fails_the_run(
    tiny_model, tmp_path, perturb_restores, capsys
):
    run(tiny_model, tmp_path)
    perturb_restores(lambda op, num_ops, copy: op.boundary == 384)
    status, content, picture = run(tiny_model, tmp_path)
    assert status == 1 and not content["passed"] and content["conclusion"] is None
    assert not any(row["bits_equal"] for row in content["requests"])
    assert not picture.exists(), "the picture of the good run before is still there"
    captured = capsys.readouterr()
    assert "question 1, serial, warm: logits of new token 0 differ" in captured.err


def test_a_cache_that_never_hits_fails_the_run(tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(LinearStatePrefixCache, "deepest", lambda *_: None)
    status, content, _ = run(tiny_model, tmp_path)
    assert status == 1 and all(row["bits_equal"] for row in content["requests"])
    named = [line.split(":")[0] for line in content["failures"]]
    warm = [f"question {i}, {mode}, warm" for mode in ("serial", "concurrent") for i in (1, 2, 3)]
    assert sorted(named) == sorted([*warm, "question 2, serial, fill", "question 3, serial, fill"])
    assert "question 1, serial, warm: must reuse at least 384 tokens" in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_given_random_ids(tiny_model, tmp_path):
    bare = shutil.copytree(tiny_model, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    status, content, _ = run(bare, tmp_path, "--questions", 1)
    assert status == 0 and content["requests"][0]["boundary"] == 384


def test_a_cold_pass_that_reuses_something_fails():
    reused = Served(430, 384, 384, 1.0, None, None, "")
    found = failures(Measured({("serial", "cold"): [reused]}, {}), EngineConfig(), prefix_tokens=9)
    assert found == ["question 1, serial, cold: reused 384 tokens, caching is off"]


@pytest.mark.parametrize(("mode", "held"), [("serial", [1, 1, 1]), ("concurrent", [3, 2, 1])])
def test_concurrent_hands_in_all_requests_and_keeps_their_order(mode, held):
    llm, advanced = OneAtATime(newest=True), []
    outputs = serve(llm, [[5], [6], [7]], None, mode=mode, advance=lambda: advanced.append(1))
    assert [o.request_id for o in outputs] == ["[5]", "[6]", "[7]"]
    assert [len(queue) for queue in llm.held] == held and len(advanced) == 3


# ---- comparing


def output(token_ids, logits):
    return request_output(token_ids=token_ids, logits=logits)


def test_a_single_bit_in_a_single_row_is_a_difference():
    rows = [torch.linspace(-1, 1, 8), torch.linspace(-2, 2, 8)]
    reference = output([7, 7], rows)
    assert first_difference(reference, output([7, 7], [row.clone() for row in rows])) is None
    changed = rows[1].clone()
    changed.view(torch.int32)[3] ^= 1
    assert first_difference(reference, output([7, 7], [rows[0], changed])) == (
        "logits of new token 1 differ in 1 of 8 values"
    )


def test_other_tokens_fewer_rows_and_nan_are_differences():
    rows = [torch.zeros(4), torch.zeros(4)]
    reference = output([1, 2], rows)
    assert first_difference(reference, output([1, 3], rows)) == "token ids [1, 3], not [1, 2]"
    assert first_difference(reference, output([1], rows[:1])) == "1 rows of logits, not 2"
    poisoned = output([1, 2], [torch.full((4,), torch.nan)] * 2)
    assert first_difference(poisoned, poisoned) is not None


@pytest.mark.parametrize(
    ("i", "mode", "pass_", "prompt_tokens", "expected"),
    [
        (0, "serial", "warm", 430, 384),
        (0, "serial", "warm", 385, 384),
        (0, "concurrent", "warm", 384, 320),  # never the final token
        (0, "serial", "fill", 430, 0),
        (1, "serial", "fill", 430, 256),
        (1, "serial", "fill", 256, 128),
        (1, "concurrent", "fill", 430, 0),
        (1, "serial", "cold", 430, 0),
    ],
)
def test_what_a_request_must_reuse(i, mode, pass_, prompt_tokens, expected):
    config = EngineConfig(checkpoint_every=EVERY)
    request = Served(prompt_tokens, 0, 0, 1.0, None, None, "")
    prefix_tokens = min(PREFIX, prompt_tokens)
    due = least_boundary(request, i, mode, pass_, config, prefix_tokens=prefix_tokens)
    assert due == expected


# ---- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--questions", "0"], "--questions: '0'; expected an integer of at least 1"),
        (["--max-tokens", "many"], "--max-tokens: 'many'; expected an integer of at least 1"),
        (["--checkpoint-every", "100"], "checkpoint_every=100: must be a multiple of chunk_stride"),
        (["--restore", "move"], "--restore: invalid choice: 'move'"),
        (["--prefix-tokens", "4049"], "need 4089 + 8 positions; the model has 4096"),
        (["--prefix-tokens", "24"], "a prompt of 64 tokens; expected at least 65"),
        (
            ["--json", "out.png"],
            "argument --json: 'out.png'; expected a file name that ends in .json",
        ),
        (["--model", "no/such/model"], "no/such/model"),
        (["--question", "2"], "unrecognized arguments: --question"),
    ],
)
def test_a_bad_option_is_one_clear_error(
    tiny_model, monkeypatch, tmp_path, refusal, options, message
):
    monkeypatch.chdir(tmp_path)
    start = ["--model", str(tiny_model), "--prefix-tokens", "90", "--suffix-tokens", "40"]
    line = refusal(main, [*start, "--json", "out.json", *options])
    assert line.startswith("warm_start: error: ") and message in line


def test_a_model_without_weights_is_one_clear_error(tiny_model, tmp_path, capsys):
    bare = shutil.copytree(tiny_model, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    assert (
        main(["--model", str(bare), "--prefix-tokens", "90", "--json", str(tmp_path / "a.json")])
        == 2
    )
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith("warm_start: error: ") and "bare" in last_line


def test_a_tokenizer_of_another_model_is_refused(tiny_model):
    with pytest.raises(ValueError, match="gives id 121; the model has ids below 100"):
        shared_prompts(
            Tokenizer.from_directory(tiny_model),
            100,
            prefix_tokens=50,
            suffix_tokens=9,
            num_questions=1,
        )


def test_pools_beyond_this_machine_are_refused(tiny_model, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("experiments.warm_start.memory_bytes", lambda: 10**6)
    with pytest.raises(SystemExit) as exit_:
        main(
            [
                "--model",
                str(tiny_model),
                "--prefix-tokens",
                "500",
                "--json",
                str(tmp_path / "a.json"),
            ]
        )
    assert exit_.value.code == 2
    assert "this machine has 0.0 GB of memory" in capsys.readouterr().err


# ---- prompts and files


def prompts_of(tokenizer, **sizes):
    defaults = {"prefix_tokens": 50, "suffix_tokens": 20, "num_questions": 3}
    return shared_prompts(tokenizer, 300, **defaults | sizes)


@pytest.mark.parametrize("sizes", [{}, {"prefix_tokens": 20_000}, {"suffix_tokens": 500}])
@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_prompts_share_exactly_the_document(tiny_model, with_tokenizer, sizes):
    tokenizer = Tokenizer.from_directory(tiny_model) if with_tokenizer else None
    sizes = {"prefix_tokens": 50, "suffix_tokens": 20} | sizes
    prompts = prompts_of(tokenizer, **sizes)
    assert {len(prompt) for prompt in prompts} == {sum(sizes.values())}
    prefix = sizes["prefix_tokens"]
    assert len({tuple(prompt[:prefix]) for prompt in prompts}) == 1
    assert len({prompt[prefix] for prompt in prompts}) == len(prompts)
    assert prompts == prompts_of(tokenizer, **sizes)
    assert all(0 <= token < 300 for prompt in prompts for token in prompt)


def test_no_two_sections_of_a_long_document_are_equal():
    sections = list(islice(numbered_sections(), 40))
    assert len(set(sections)) == 40
    assert [section.split(".")[0] for section in sections] == [
        f"Section {i + 1}" for i in range(40)
    ]


def test_results_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.json"
    write_json(path, {"value": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"value": float("nan")})
    content = json.loads(path.read_text())
    assert content["value"] == 1 and content["machine"]["torch"] == torch.__version__
    assert list(tmp_path.iterdir()) == [path]
