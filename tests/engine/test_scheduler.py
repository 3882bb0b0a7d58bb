"""Which rows a step holds, as literal (request, start, end). Stride and blocks of 64 tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.scheduling import Driver

# ---- budget and grid


def test_a_long_prompt_is_cut_on_the_grid_and_at_its_end():
    driver = Driver(max_num_batched_tokens=200)
    driver.add("a", 500)
    assert driver.steps(4) == [[("a", 0, 192)], [("a", 192, 384)], [("a", 384, 500)], []]


def test_a_prompt_within_the_budget_runs_in_one_step():
    driver = Driver(max_num_batched_tokens=500)
    driver.add("a", 500)
    assert driver.step() == [("a", 0, 500)]


def test_a_prompt_is_never_cut_inside_a_stride():
    """trap 1: a token budget ends a prefill mid-stride: 364 of stride 512."""
    driver = Driver(chunk_stride=512, checkpoint_every=512, max_num_batched_tokens=876)
    driver.add("a", 1500)
    driver.add("b", 600)
    assert driver.step() == [("a", 0, 512)]  # 364 tokens of budget are left, and not used
    assert driver.step() == [("a", 512, 1024)]
    assert driver.step() == [("a", 1024, 1500)]
    assert driver.step() == [("b", 0, 600)]
    assert driver.manager.linear.num_saves == 3  # a: 512, 1024; b: 512


def test_what_one_prompt_leaves_of_the_budget_the_next_one_gets():
    driver = Driver(max_num_batched_tokens=512)
    driver.add("a", 300)
    driver.add("b", 600)
    assert driver.step() == [("a", 0, 300), ("b", 0, 192)]
    assert driver.step() == [("b", 192, 600)]


def test_decoding_requests_come_first_and_take_one_token_each_of_the_budget():
    driver = Driver(max_num_batched_tokens=128)
    driver.add("a", 10, max_tokens=9)
    driver.add("b", 20, max_tokens=9)
    assert driver.step() == [("a", 0, 10), ("b", 0, 20)]
    driver.add("c", 300)
    assert driver.step() == [("a", 10, 11), ("b", 20, 21), ("c", 0, 64)]
    assert driver.step() == [("a", 11, 12), ("b", 21, 22), ("c", 64, 128)]


def test_the_first_prefill_of_a_step_gets_a_whole_stride_although_decodes_fill_the_budget():
    """trap 32: the chunk rounds down to zero for ever."""
    driver = Driver(max_num_batched_tokens=64)
    driver.add("a", 10, max_tokens=9)
    driver.add("b", 20, max_tokens=9)
    assert driver.step() == [("a", 0, 10), ("b", 0, 20)]
    driver.add("c", 100)
    driver.add("d", 100)
    assert driver.step() == [("a", 10, 11), ("b", 20, 21), ("c", 0, 64)]
    assert driver.step() == [("a", 11, 12), ("b", 21, 22), ("c", 64, 100)]
    assert driver.step() == [("a", 12, 13), ("b", 22, 23), ("d", 0, 64)]


def test_a_running_prefill_that_gets_nothing_lets_no_one_pass():
    driver = Driver(max_num_batched_tokens=128)
    driver.add("a", 70)
    driver.add("b", 400)
    driver.add("c", 5)
    assert driver.step() == [("a", 0, 70)]  # 58 tokens are left: no whole stride of b
    assert driver.step() == [("b", 0, 128)]
    assert driver.step() == [("b", 128, 256)]
    assert driver.step() == [("b", 256, 384)]
    assert driver.step() == [("b", 384, 400), ("c", 0, 5)]


def test_nothing_to_do_is_no_batch():
    driver = Driver()
    assert driver.step() == [] and not driver.scheduler.has_unfinished


def test_a_step_must_be_settled_before_the_next_one_is_scheduled():
    driver = Driver()
    driver.add("a", 10)
    driver.schedule()
    with pytest.raises(AssertionError, match="neither committed nor rolled back"):
        driver.scheduler.schedule()


# ---- order


def test_requests_are_admitted_first_come_first_served():
    driver = Driver(max_num_batched_tokens=256)
    driver.add("a", 200)
    driver.add("b", 100)
    driver.add("c", 3)
    assert driver.step() == [("a", 0, 200)]  # b does not fit; c waits behind it
    assert driver.step() == [("b", 0, 100), ("c", 0, 3)]


def test_no_more_than_max_num_seqs_run_at_once():
    driver = Driver(max_num_seqs=2)
    for name in "abc":
        driver.add(name, 10, max_tokens=2)
    assert driver.step() == [("a", 0, 10), ("b", 0, 10)]
    assert driver.step() == [("a", 10, 11), ("b", 10, 11)]
    assert driver.step() == [("c", 0, 10)]


def test_a_prompt_waits_until_it_fits_beside_what_the_running_ones_still_need():
    driver = Driver(num_blocks=6, max_num_batched_tokens=64)
    driver.add("a", 128, max_tokens=2)  # 2 blocks, and a third for its answer
    driver.add("b", 192)  # 3 blocks: 5 there, 3 promised to a
    assert driver.step() == [("a", 0, 64)]
    assert driver.step() == [("a", 64, 128)]
    assert driver.step() == [("a", 128, 129)]
    assert driver.step() == [("b", 0, 64)]


def test_a_prompt_does_not_take_the_block_of_the_next_token_of_a_running_one():
    driver = Driver(num_blocks=6, max_num_batched_tokens=512)
    driver.add("a", 128, max_tokens=2)  # 2 blocks now, and a third for its answer
    driver.add("b", 192)  # the 3 blocks that are left
    assert driver.steps(3) == [[("a", 0, 128)], [("a", 128, 129)], [("b", 0, 192)]]


def test_two_prompts_that_fit_beside_each_other_run_together():
    driver = Driver(num_blocks=7, max_num_batched_tokens=512)
    driver.add("a", 128, max_tokens=2)
    driver.add("b", 192)
    assert driver.step() == [("a", 0, 128), ("b", 0, 192)]


def test_the_blocks_that_a_hit_shares_are_no_room_for_anything_else():
    driver = Driver(num_blocks=7, max_num_batched_tokens=100)  # 6 blocks
    shared = range(256)
    driver.add("first", [*shared, 0])
    driver.finish_all()  # 4 blocks stay cached, 2 are free
    driver.add("a", 300)  # 4 blocks, and a fifth for its answer
    driver.add("b", [*shared, *range(900, 930)])  # shares 4 blocks and needs a fifth
    assert driver.step() == [("a", 0, 64)]


# ---- progress


@given(
    budget=st.sampled_from([64, 65, 127, 128, 200, 364, 1000]),
    stride=st.sampled_from([64, 128]),
    block_size=st.sampled_from([16, 64]),
    spare_blocks=st.integers(0, 40),
    spare_slots=st.integers(0, 6),
    requests=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 20)), min_size=1, max_size=6),
)
def test_every_request_that_fits_finishes_under_every_budget(
    budget, stride, block_size, spare_blocks, spare_slots, requests
):
    """trap 32: every request that fits makes progress under every budget."""
    longest = max(prompt + answer - 1 for prompt, answer in requests)
    driver = Driver(
        max_num_batched_tokens=max(budget, stride),
        chunk_stride=stride,
        checkpoint_every=stride,
        block_size=block_size,
        num_blocks=-(-longest // block_size) + 1 + spare_blocks,
        num_slots=5 + spare_slots,
    )
    for number, (prompt, answer) in enumerate(requests):
        driver.add(str(number), [7] * prompt, answer)
    driver.finish_all()
    assert all(
        driver.requests[str(number)].num_generated == answer
        for number, (_, answer) in enumerate(requests)
    )
    assert driver.manager.kv.pool.num_in_use == 0
    assert driver.manager.linear.pool.num_in_use == 0
