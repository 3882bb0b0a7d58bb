"""Hits, failed restores, failed steps and aborts, as the scheduler handles them. Stride 64."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.composite_block_manager import MissReason
from cache.ops import LinearStateCacheOp
from engine.sequence import Status
from tests.engine.scheduling import Driver

PREFIX = list(range(200))


def warm(**options) -> Driver:
    """A driver that has served the prefix: states at 64, 128 and 192 in slots 4, 3 and 2."""
    driver = Driver(**options)
    driver.add("first", PREFIX)
    driver.finish_all()
    return driver


# ---- hits


def test_a_hit_starts_at_the_boundary_and_reads_the_checkpoint():
    driver = warm()
    seq = driver.add("again", PREFIX)
    assert driver.step() == [("again", 192, 200)]
    assert driver.last_batch.rows[0].op == LinearStateCacheOp(5, True, 2, 192)
    assert (seq.num_cached_tokens, seq.restored_boundary, seq.miss_reason) == (192, 192, None)
    assert (driver.manager.num_queries, driver.manager.num_hits) == (2, 1)
    assert driver.manager.misses == {MissReason.NO_CHECKPOINT: 1}


def test_a_miss_is_also_the_reason_why_it_resumed_no_later():
    driver = Driver()
    seq = driver.add("first", PREFIX)
    driver.finish_all()
    assert seq.miss_reason is seq.limit_reason is MissReason.NO_CHECKPOINT


def test_the_budget_counts_what_is_computed_and_not_what_is_reused():
    driver = warm(max_num_batched_tokens=128)
    driver.add("again", [*PREFIX, *range(500, 650)])
    assert driver.step() == [("again", 192, 320)]
    assert driver.step() == [("again", 320, 350)]


def test_two_requests_with_one_prefix_in_one_step_both_compute_it():
    """trap 13: a hit on something computed in the same step."""
    driver = Driver(max_num_batched_tokens=512)
    driver.add("a", PREFIX)
    driver.add("b", PREFIX)
    assert driver.step() == [("a", 0, 200), ("b", 0, 200)]
    driver.add("c", PREFIX)
    assert driver.step() == [("c", 192, 200)]


def test_the_same_prompt_hits_below_its_final_token():
    """trap 6: a prompt of exactly k strides: hits at k - 1 and k."""
    driver = warm()
    driver.add("k strides", PREFIX[:192])
    driver.add("k strides and 1", [*PREFIX[:192], 7])
    assert driver.step() == [("k strides", 128, 192), ("k strides and 1", 192, 193)]


def test_blocks_and_strides_of_different_size_are_never_confused():
    """trap 31: a stride several blocks wide, end to end."""
    driver = warm(block_size=16, chunk_stride=128, checkpoint_every=128)
    driver.add("again", PREFIX)
    assert driver.step() == [("again", 128, 200)]
    assert len(driver.requests["again"].block_table) == 0  # it has left
    assert driver.manager.num_tokens_reused == 128


def test_a_running_prefill_jumps_to_a_boundary_that_another_one_has_reached():
    driver = Driver(max_num_batched_tokens=300)
    driver.add("short", PREFIX)
    long = driver.add("long", [*PREFIX, *range(900, 1200)])
    assert driver.step() == [("short", 0, 200), ("long", 0, 64)]
    assert driver.step() == [("long", 192, 448)]
    assert (long.num_cached_tokens, long.restored_boundary) == (128, 192)
    assert driver.step() == [("long", 448, 500)]


def test_without_prefix_caching_every_prompt_is_prefilled_in_full():
    driver = warm(enable_prefix_caching=False)
    seq = driver.add("again", PREFIX)
    assert driver.step() == [("again", 0, 200)]
    assert seq.miss_reason is MissReason.DISABLED
    assert driver.manager.misses == {MissReason.DISABLED: 2}
    assert driver.manager.linear.saves_skipped == {}


def test_a_model_without_recurrent_layers_has_no_ops_and_reuses_kv():
    driver = warm(recurrent=False)
    driver.add("again", PREFIX)
    assert driver.step() == [("again", 192, 200)]
    assert driver.last_batch.rows[0].op is None


@given(
    st.integers(0, 300), st.integers(1, 200), st.sampled_from([64, 128]), st.sampled_from([64, 300])
)
def test_the_third_request_resumes_where_the_shared_prefix_ends(shared, unique, every, budget):
    """trap 26: the only checkpoint sits at the prompt's tail, inside the unique part."""
    driver = Driver(checkpoint_every=every, max_num_batched_tokens=budget)
    starts = []
    for user in range(3):
        prompt = [*range(shared), *range(1000 * (user + 1), 1000 * (user + 1) + unique)]
        seq = driver.add(str(user), prompt)
        driver.finish_all()
        starts.append(seq.restored_boundary)
    assert starts[0] == 0
    assert starts[1] >= shared // every * every
    assert starts[2] == shared // 64 * 64


# ---- a restore fails


def test_a_row_whose_restore_fails_starts_again_from_token_0_on_private_blocks():
    """trap 20: a failed restore leaves a row marked warm; fail one row in a batch of four."""
    driver = warm(max_num_batched_tokens=512)
    names = ["a", "b", "c", "d"]
    for name in names:
        driver.add(name, [*PREFIX, ord(name)])
    assert driver.schedule() == [(name, 192, 201) for name in names]
    driver.issue(cold=["b"])
    b = driver.requests["b"]
    assert (b.status, b.num_computed_tokens, b.reuse_allowed) == (Status.WAITING, 0, False)
    assert [driver.requests[name].num_generated for name in names] == [1, 0, 1, 1]
    assert driver.scheduler.num_cold_starts == 1
    assert driver.step() == [("b", 0, 201)]
    assert (b.num_cached_tokens, b.restored_boundary) == (0, 0)
    assert driver.manager.misses[MissReason.RESTORE_FAILED] == 1
    assert (driver.manager.num_queries, driver.manager.num_hits) == (5, 3)


def test_a_request_that_starts_cold_stays_older_than_those_that_went_on():
    driver = warm(max_num_batched_tokens=512)
    for name in "ab":
        driver.add(name, [*PREFIX, ord(name)], max_tokens=5)
    driver.schedule()
    driver.issue(cold=["a"])
    assert driver.step() == [("b", 201, 202), ("a", 0, 201)]
    assert [seq.request_id for seq in driver.scheduler.running] == ["a", "b"]
    assert driver.step() == [("a", 201, 202), ("b", 202, 203)]


def test_a_checkpoint_that_could_not_be_restored_is_not_offered_again():
    driver = warm()
    driver.add("a", PREFIX)
    driver.schedule()
    driver.issue(cold=["a"])
    driver.add("b", PREFIX)
    assert driver.step() == [("a", 0, 200)]
    assert driver.step() == [("b", 192, 200)]  # saved again by a
    assert driver.manager.num_hits == 1


def test_a_row_that_was_aborted_and_starts_cold_is_gone():
    driver = warm()
    seq = driver.add("a", PREFIX)
    driver.schedule()
    driver.scheduler.abort(seq)
    driver.issue(cold=["a"])
    assert (seq.status, seq.finish_reason) == (Status.FINISHED, "abort")
    assert not driver.scheduler.has_unfinished


def test_a_request_that_starts_cold_says_why_it_resumed_nowhere():
    driver = warm()
    seq = driver.add("a", [*PREFIX, *range(500, 600)])
    driver.schedule()
    assert (seq.restored_boundary, seq.limit_reason) == (192, MissReason.UNSEEN)
    driver.issue(cold=["a"])
    driver.finish_all()
    assert (seq.restored_boundary, seq.limit_reason) == (0, MissReason.RESTORE_FAILED)


# ---- a step fails


def test_after_a_failed_step_its_requests_start_again_and_nothing_of_it_is_found():
    """trap 14: the producer fails before the bytes were written."""
    driver = Driver()
    driver.add("a", PREFIX, max_tokens=3)
    driver.schedule()
    driver.scheduler.rollback(driver.last_batch)
    driver.scheduler.check()
    assert len(driver.manager.linear.cache) == 0
    assert driver.manager.kv.pool.num_in_use == 0
    assert driver.steps(2) == [[("a", 0, 200)], [("a", 200, 201)]]
    driver.schedule()
    driver.scheduler.rollback(driver.last_batch)
    assert driver.step() == [("a", 192, 200)]  # the states of the steps before are good
    assert driver.needed_logits == [False]
    driver.finish_all()
    assert driver.requests["a"].generated_token_ids == [1000, 1001, 1002]


def test_a_failed_step_does_not_count_a_hit_twice():
    """trap 36: counters; more tokens reused than the prompt has."""
    driver = warm()
    seq = driver.add("again", PREFIX)
    for _ in range(2):
        driver.schedule()
        driver.scheduler.rollback(driver.last_batch)
    assert driver.step() == [("again", 192, 200)]
    assert seq.num_cached_tokens == 192
    assert driver.manager.num_tokens_reused == 192


def test_after_a_failed_step_nothing_decoded_counts_as_reused():
    driver = Driver()
    first = driver.add("first", 100, max_tokens=40, exact=False)
    driver.finish_all()
    seq = driver.add("next", [*first.token_ids, 7], exact=False)
    assert driver.schedule() == [("next", 128, 141)]
    assert seq.reused_decoded
    driver.scheduler.rollback(driver.last_batch)
    assert not seq.reused_decoded
    driver.finish_all()
    assert seq.reused_decoded


def test_a_request_that_starts_over_has_the_reason_of_the_empty_cache():
    driver = Driver()
    driver.add("theirs", PREFIX, salt="theirs")
    driver.finish_all()
    seq = driver.add("ours", PREFIX)
    driver.schedule()
    assert seq.miss_reason is seq.limit_reason is MissReason.NAMESPACE
    driver.scheduler.start_over([seq])
    driver.finish_all()
    assert seq.miss_reason is seq.limit_reason is MissReason.NO_CHECKPOINT


def test_the_own_work_of_a_request_is_no_hit_after_a_failed_step():
    """trap 36: counters; a request alone in the world has hit nothing."""
    driver = Driver(max_num_batched_tokens=128)
    seq = driver.add("a", PREFIX)
    assert driver.step() == [("a", 0, 128)]
    driver.schedule()
    driver.scheduler.rollback(driver.last_batch)
    driver.finish_all()
    assert seq.num_cached_tokens == 0
    assert (driver.manager.num_queries, driver.manager.num_hits) == (1, 0)


def test_a_prefix_that_gave_nan_ends_its_request_and_is_found_by_nobody():
    driver = warm(max_num_batched_tokens=512)
    bad, good = driver.add("bad", PREFIX), driver.add("good", [*range(700, 800)])
    driver.schedule()
    driver.ledger.forward(driver.last_batch.rows)
    driver.scheduler.commit(driver.last_batch, broken=driver.last_batch.rows[:1])
    assert (bad.status, bad.finish_reason) == (Status.FINISHED, "error")
    assert good.num_computed_tokens == 100
    driver.scheduler.abort(good)
    driver.scheduler.check()
    driver.add("again", PREFIX)
    assert driver.step() == [("again", 0, 200)]


# ---- aborts


def test_a_request_is_counted_once_however_many_tokens_it_gets():
    """trap 36: hits exceed queries."""
    driver = warm()
    driver.add("again", PREFIX, max_tokens=4)
    driver.finish_all()
    assert (driver.manager.num_queries, driver.manager.num_hits) == (2, 1)


def test_an_abort_while_the_step_runs_takes_effect_at_its_end():
    """trap 14: abort between schedule and forward."""
    driver = Driver()
    seq = driver.add("a", PREFIX, max_tokens=5)
    driver.schedule()
    driver.scheduler.abort(seq)
    assert seq.status is Status.RUNNING and seq.block_table
    driver.issue()
    assert (seq.status, seq.finish_reason, seq.num_generated) == (Status.FINISHED, "abort", 0)
    assert driver.manager.kv.pool.num_in_use == driver.manager.linear.pool.num_in_use == 0


@pytest.mark.parametrize("settle", ["commit", "rollback"])
def test_an_aborted_request_gives_everything_back_however_its_step_ends(settle):
    """trap 21: a slot or block taken at match is lost when the request is aborted."""
    driver = warm()
    seq = driver.add("a", [*PREFIX, *range(400, 500)], max_tokens=5)
    driver.schedule()
    driver.scheduler.abort(seq)
    if settle == "commit":
        driver.issue()
    else:
        driver.scheduler.rollback(driver.last_batch)
    assert seq.status is Status.FINISHED
    driver.scheduler.check()
    assert driver.manager.kv.pool.num_in_use == driver.manager.linear.pool.num_in_use == 0


def test_a_waiting_and_a_running_request_can_be_aborted_between_steps():
    driver = Driver(max_num_seqs=1)
    running, waiting = driver.add("a", 100, max_tokens=5), driver.add("b", 10)
    driver.step()
    driver.scheduler.abort(waiting)
    driver.scheduler.abort(running)
    driver.scheduler.abort(running)
    assert [seq.finish_reason for seq in (running, waiting)] == ["abort", "abort"]
    driver.scheduler.check()
    assert not driver.scheduler.has_unfinished
