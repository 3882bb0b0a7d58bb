"""Which boundaries are saved, boundary by boundary."""

import pytest

from cache.eviction import Kind
from cache.placement import (
    CHECKPOINT_EVERY,
    USUAL,
    Branch,
    Combined,
    Every,
    Prompt,
    PromptEnd,
    combined,
    parse_placement,
    usual,
)
from tests.cache.builders import checkpoints, composite, linear_leaf, linear_step, sequence, served

PROMPT = Prompt(23, 4, branch=12)  # the last boundary below its final token is 20


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
        (PromptEnd(before=2), 0, 24, [20]),
        (PromptEnd(before=3), 0, 24, [16]),
        (PromptEnd(before=18), 0, 24, [4]),
        (PromptEnd(before=19), 0, 24, [20]),
        (PromptEnd(before=99), 0, 24, [20]),
        (Branch(), 11, 12, [12]),
        (Branch(), 12, 24, []),
        (Combined((Every(8), Branch())), 0, 16, [8, 12, 16]),
        (combined(16), 0, 24, [12, 16, 20]),
        (combined(None, branch=False), 0, 24, [20]),
        (combined(None, ends=(8,)), 0, 24, [12]),
        (combined(None, ends=(4,)), 0, 24, [12, 16]),
        (combined(None, ends=(4, 0)), 0, 24, [12, 16, 20]),
        (combined(None, ends=()), 0, 24, [12]),
    ],
)
def test_the_boundaries_of_a_step_are_those_above_its_start_up_to_its_end(
    placement, start, end, expected
):
    assert sorted(placement.boundaries(start, end, PROMPT)) == expected


def test_a_prompt_without_a_branch_has_none_at_token_0():
    assert Branch().boundaries(0, 24, Prompt(23, 4)) == {}
    assert PromptEnd().boundaries(0, 24, Prompt(4, 4)) == {}
    assert PromptEnd(before=4).boundaries(0, 24, Prompt(0, 4)) == {}


@pytest.mark.parametrize(("resumed", "expected"), [(0, [12]), (4, [12]), (8, []), (12, [])])
def test_a_branch_that_is_hardly_deeper_than_where_its_prompt_resumed_is_not_saved(
    resumed, expected
):
    prompt = Prompt(23, 4, branch=12, resumed=resumed)
    assert sorted(Branch(apart=4).boundaries(resumed, 24, prompt)) == expected
    assert sorted(combined(None, ends=(4,)).boundaries(0, 24, prompt)) == [*expected, 16]


def test_the_turns_of_a_chat_that_save_before_their_ends_leave_one_state_each():
    """Each goes on from 4 tokens above where its predecessor's K/V ends: that is no branch."""
    manager = composite(placement=combined(None, ends=(4,)))

    def saved(token_ids):
        served(manager, token_ids)
        return sorted(checkpoints(manager.linear, sequence([*token_ids, *range(900, 905)])))

    assert saved(range(15)) == [8]
    assert saved(range(31)) == [8, 24]
    assert saved([*range(29), *range(100, 110)]) == [8, 24, 32], "its last two tokens are others"
    assert saved([*range(22), *range(200, 213)]) == [8, 20, 28], "it parts 12 tokens above 8"


def test_a_prompts_end_on_a_branch_on_the_comb_is_a_tip():
    found = combined(4).boundaries(0, 24, Prompt(23, 4, branch=20))
    assert found[20] is Kind.TIP and found[16] is Kind.COMB
    assert combined(4).boundaries(0, 24, Prompt(23, 4, branch=16))[16] is Kind.BRANCH


def test_of_several_ends_the_one_farthest_above_is_the_tip():
    found = combined(None, branch=False, ends=(0, 4)).boundaries(0, 24, Prompt(23, 4))
    assert found == {16: Kind.TIP, 20: Kind.END}
    assert combined(None, ends=(0, 4)).boundaries(0, 8, Prompt(7, 4)) == {4: Kind.TIP}


def test_a_name_is_its_parts():
    assert parse_placement("prompt_end + branch+comb(128)", 64) == combined(128)
    assert parse_placement("every(64)", 64) == Combined((Every(64),))
    assert parse_placement("comb(128)+comb(64)", 64) == Combined((Every(128), Every(64)))
    before = parse_placement("prompt_end(100)+branch+comb(128)", 64)
    assert before == combined(128, ends=(100,))
    assert parse_placement("prompt_end(64)", 64) == Combined((PromptEnd(64),))
    both = parse_placement("prompt_end+prompt_end(64)", 64)
    assert both == Combined((PromptEnd(0, Kind.END), PromptEnd(64)))


def test_the_usual_one_is_the_text_that_names_it():
    assert usual(CHECKPOINT_EVERY) == parse_placement(USUAL, 64)
    assert usual(128) == parse_placement("every(128)+branch+prompt_end(64)+prompt_end", 64)


def test_whole_prompts_are_a_word_beside_the_boundaries():
    parsed = parse_placement("branch + whole_prompt", 64)
    assert parsed == Combined((Branch(),), whole_prompt=True)
    assert parse_placement("whole_prompt", 64) == Combined((), whole_prompt=True)
    assert not parse_placement("branch", 64).whole_prompt
    assert parse_placement("whole_prompt", 64).boundaries(0, 640, Prompt(576, 128)) == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "branch+",
        "branch+branch",
        "comb",
        "comb(0)",
        "comb(100)",
        "every(-64)",
        "tip",
        "prompt_end(x)",
        "branch(64)",
        "prompt_end+prompt_end(0)",
        "comb(64)+comb(64)",
    ],
)
def test_other_names_are_refused_in_words_that_say_what_was_read(text):
    with pytest.raises(ValueError, match=r"must be prompt_end, .* a multiple of chunk_stride=64"):
        parse_placement(text, 64)


def test_a_step_that_is_no_step_is_refused():
    with pytest.raises(ValueError, match="step must be at least 1, got 0"):
        Every(0)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (None, [4, 8, 12]),
        (combined(8), [8, 12]),
        (combined(None), [12]),
        (combined(8, ends=()), [8]),
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
