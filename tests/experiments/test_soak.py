"""The soak: growth and balances from literal numbers, and five seconds of the real thing."""

import json
from types import SimpleNamespace

import pytest

from experiments.regression_soak import Prompt, Soak
from experiments.soak import draw, growth, main, too_much, unbalanced


def samples(sizes, minutes_each=1.0):
    return [{"minutes": i * minutes_each, "rss_mib": size} for i, size in enumerate(sizes)]


def test_growth_is_that_of_the_second_half():
    grown = growth(samples([0, 50, 100, 101, 102]))
    assert grown == {"minutes": 2.0, "mib_per_minute": 1.0, "range_mib": 2}
    assert growth(samples([7]))["mib_per_minute"] is None


def test_only_a_growth_that_was_long_enough_seen_is_too_much():
    assert too_much(growth(samples([0, 0, 0, 9, 18], minutes_each=3))) == [
        "memory grows by 3.00 MiB a minute; at most 1.0 is allowed"
    ]
    assert too_much(growth(samples([9, 9, 9, 6, 3], minutes_each=3))) == []
    assert too_much(growth(samples([0, 0, 0, 9, 18], minutes_each=2.4))) == []


def pools(**wrong):
    slots = {"slots_free": 3, "slots_live": 2, "slots_checkpoint": 4, "slots_total": 9}
    blocks = {"blocks_free": 1, "blocks_in_use": 0, "blocks_cached": 5, "blocks_total": 6}
    return slots | blocks | wrong


def test_pools_whose_parts_are_not_the_whole_are_told():
    assert unbalanced(pools()) == []
    assert unbalanced(pools(slots_live=1))[0].startswith("slots: ")
    assert unbalanced(pools(blocks_total=7))[0].startswith("blocks: ")
    assert len(unbalanced(pools(slots_free=-1, slots_live=6))) == 1


def choice(text, *tokens):
    return SimpleNamespace(text=text, logprobs=SimpleNamespace(tokens=list(tokens)))


@pytest.mark.parametrize(
    ("kind", "choices", "wrong"),
    [
        ("choices", [choice("a lives b", "a", " lives", " b")] * 2, 0),
        ("choices", [choice("a lives b", "a", " lives", " b"), choice("a", "a")], 1),
        ("choices", [choice("a lives b", "a", " lives", " c")], 1),
        ("stop", [choice("a", "a", " lives")], 0),
        ("stop", [choice("a lives b", "a", " lives", " b")], 1),
        ("stop", [choice("a", "b", " lives")], 1),
        ("sampled", [choice("anything")], 0),
    ],
)
def test_which_answers_are_wrong(kind, choices, wrong):
    prompt = Prompt(False, ("p",), 4, False)
    soak = Soak([prompt], [("a lives b", ("a", " lives", " b"))], seed=0)
    soak._check_reply(kind, 0, SimpleNamespace(choices=choices))
    assert len(soak.failures) == wrong


def test_a_few_seconds_of_everything(tmp_path, capsys):
    path = tmp_path / "soak.json"
    options = ["--minutes", "0.06", "--prompts", "8", "--clients", "12", "--overlap"]
    assert main([*options, "--json", str(path)]) == 0, capsys.readouterr().err
    content = json.loads(path.read_text())
    assert content["passed"] and content["failures"] == []
    assert content["counts"]["compared"] > 0 and content["counts"]["refused"] > 0
    assert content["server"]["queries"] >= content["counts"]["answered"]
    assert all(sample["rss_mib"] > 50 for sample in content["samples"])
    assert content["conclusion"].startswith("Yes: in 0.06 minutes ")
    picture = path.with_suffix(".png")
    drawn = picture.read_bytes()
    draw(content, picture)
    assert picture.read_bytes() == drawn and drawn.startswith(b"\x89PNG")
