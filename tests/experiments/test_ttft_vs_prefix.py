"""Time to first token by prefix: what is reported is true, and a broken cache makes it fail."""

import json

import pytest
import torch

from cache.linear_state_prefix_cache import LinearStatePrefixCache
from experiments.bare_model import BareModel
from experiments.ttft_vs_prefix import draw, main


def run(model, tmp_path, *more):
    """Exit status, the results file, and the path of the picture."""
    path = tmp_path / "out.json"
    options = ["--model", model, "--prefixes", 320, 128, "--repeats", 2, "--json", path, *more]
    status = main([str(option) for option in options])
    return status, json.loads(path.read_text()), path.with_suffix(".png")


@pytest.mark.parametrize("suffix", [64, 150])
def test_warm_requests_resume_at_the_end_of_the_document_with_equal_bits(
    tiny_model, tmp_path, capsys, suffix
):
    status, content, picture = run(tiny_model, tmp_path, "--suffix-tokens", suffix)
    assert status == 0 and content["passed"] and content["failures"] == []
    rows = content["rows"]
    assert [row["prefix_tokens"] for row in rows] == [128, 320]
    for row in rows:
        assert row["suffix_tokens"] == suffix and row["bits_equal"] is True
        assert row["cold_cached_tokens"] == 0
        assert row["copy_cached_tokens"] == row["redirect_cached_tokens"] == row["prefix_tokens"]
        for kind in ("cold", "copy", "redirect", "suffix_alone"):
            low, high = sorted(row[f"{kind}_all_ms"])
            assert 0 < row[f"{kind}_ms"] == pytest.approx((low + high) / 2)
        rounds = zip(row["redirect_all_ms"], row["suffix_alone_all_ms"], strict=True)
        mean = sum(warm / alone for warm, alone in rounds) / 2
        assert row["redirect_over_alone"] == pytest.approx(mean)
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.endswith(" ".join(content["conclusion"].split()))
    again = tmp_path / "again.png"
    draw(content, again)
    assert again.read_bytes() == picture.read_bytes()


def test_a_state_that_is_off_by_one_part_in_a_thousand_fails_the_run(
    tiny_model, tmp_path, perturb_restores, capsys
):
    run(tiny_model, tmp_path)
    perturb_restores(lambda op, num_ops, copy: op.boundary == 320 and copy)
    status, content, picture = run(tiny_model, tmp_path)
    assert status == 1 and not content["passed"] and content["conclusion"] is None
    assert [row["bits_equal"] for row in content["rows"]] == [True, False]
    assert not picture.exists(), "the picture of the good run before is still there"
    named = {failure.split(": ")[0] for failure in content["failures"]}
    assert named == {"prefix 320, question 0, copy", "prefix 320, question 1, copy"}
    assert "copy: logits of new token 0 differ" in capsys.readouterr().err


def test_a_cache_that_never_hits_fails_the_run(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(LinearStatePrefixCache, "deepest", lambda *_: None)
    status, content, _ = run(tiny_model, tmp_path, "--repeats", 1)
    assert status == 1
    assert content["failures"] == [
        f"prefix {prefix}, question 0, {kind}: reused 0 tokens, not {prefix}"
        for prefix in (128, 320)
        for kind in ("copy", "redirect")
    ]


def test_a_line_for_other_work_than_the_request_fails_the_run(tiny_model, tmp_path, monkeypatch):
    original = BareModel.prefill
    monkeypatch.setattr(BareModel, "prefill", lambda *args: torch.neg(original(*args)))
    status, content, _ = run(tiny_model, tmp_path, "--repeats", 1)
    assert status == 1
    assert content["failures"][0] == (
        "prefix 128, question 0, suffix alone: other logits than cold"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prefixes", "100"], "--prefixes [100]: each must be a multiple of 64"),
        (["--suffix-tokens", "63"], "--suffix-tokens 63: must be at least 64"),
        (["--repeats", "0"], "--repeats: '0'; expected an integer of at least 1"),
        (["--json", "out.png"], "expected a file name that ends in .json"),
    ],
)
def test_a_bad_option_is_one_clear_error(refusal, options, message):
    line = refusal(main, options)
    assert line.startswith("ttft_vs_prefix: error: ") and message in line


def test_a_prefix_beyond_the_model_is_refused(tiny_model, tmp_path, capsys):
    path = str(tmp_path / "a.json")
    assert main(["--model", str(tiny_model), "--prefixes", "4096", "--json", path]) == 2
    assert "4160 tokens are needed; the model has 4096" in capsys.readouterr().err
