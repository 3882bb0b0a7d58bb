"""Which boundaries are saved, boundary by boundary."""

import pytest

from cache.eviction import Kind
from cache.placement import Branch, Combined, Every, Prompt, PromptEnd, combined, parse_placement
from tests.cache.builders import linear_leaf, linear_step, sequence

PROMPT = Prompt(end=20, branch=12)


@pytest.mark.parametrize(
    ("placement", "start", "end", "expected"),
    [
        (Every(8), 0, 24, [8, 16, 24]),
        (Every(8), 8, 15, []),
        (Every(8), 7, 8, [8]),
        (PromptEnd(), 0, 24, [20]),
        (PromptEnd(), 19, 20, [20]),
        (PromptEnd(), 20, 24, []),
        (PromptEnd(), 0, 19, []),
        (Branch(), 11, 12, [12]),
        (Branch(), 12, 24, []),
        (Combined((Every(8), Branch())), 0, 16, [8, 12, 16]),
        (combined(16), 0, 24, [12, 16, 20]),
        (combined(None, branch=False), 0, 24, [20]),
    ],
)
def test_the_boundaries_of_a_step_are_those_above_its_start_up_to_its_end(
    placement, start, end, expected
):
    assert sorted(placement.boundaries(start, end, PROMPT)) == expected


def test_a_prompt_without_a_branch_has_none_at_token_0():
    assert Branch().boundaries(0, 24, Prompt(20, 0)) == {}
    assert PromptEnd().boundaries(0, 24, Prompt(0, 0)) == {}


def test_a_prompts_end_on_a_branch_on_the_comb_is_a_tip():
    found = combined(4).boundaries(0, 24, Prompt(end=20, branch=20))
    assert found[20] is Kind.TIP and found[16] is Kind.COMB
    assert combined(4).boundaries(0, 24, Prompt(end=20, branch=16))[16] is Kind.BRANCH


def test_a_name_is_its_parts():
    assert parse_placement("prompt_end + branch+comb(128)", 64) == combined(128)
    assert parse_placement("every(64)", 64) == Combined((Every(64),))


@pytest.mark.parametrize(
    "text", ["", "branch+", "branch+branch", "comb", "comb(0)", "comb(100)", "every(-64)", "tip"]
)
def test_other_names_are_refused_in_words_that_say_what_was_read(text):
    with pytest.raises(ValueError, match="multiple of chunk_stride, with '\\+'; got ") as refused:
        parse_placement(text, 64)
    assert repr(text) in str(refused.value)


def test_a_step_that_is_no_step_is_refused():
    with pytest.raises(ValueError, match="step must be at least 1, got 0"):
        Every(0)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (None, [4, 8, 12]),
        (combined(8), [8, 12]),
        (combined(None), [12]),
        (combined(8, prompt_end=False), [8]),
    ],
)
def test_the_leaf_snapshots_what_its_placement_says(placement, expected):
    linear = linear_leaf(placement=placement)
    seq = sequence(range(14))
    _, snapshots = linear_step(linear, seq, 14)
    assert [boundary for boundary, _ in snapshots] == expected


def test_save_points_of_a_request_are_saved_whatever_the_placement():
    linear = linear_leaf(placement=combined(None))
    seq = sequence(range(14), save_points=[6, 8])
    _, snapshots = linear_step(linear, seq, 14)
    assert [boundary for boundary, _ in snapshots] == [8, 12]
