"""Background requests have a prefix ready for later, and nobody waits for them."""

import pytest

from engine import SamplingParams
from engine.sequence import Status
from tests.engine.real_model import make_engine, tokens
from tests.engine.scheduling import Driver


def test_a_background_prompt_runs_alone_and_a_stride_a_step():
    driver = Driver(max_num_batched_tokens=256)
    driver.add("later", 150, background=True)
    assert driver.steps(4) == [
        [("later", 0, 64)],
        [("later", 64, 128)],
        [("later", 128, 150)],
        [],
    ]


def test_background_requests_run_one_after_the_other_in_order_of_arrival():
    driver = Driver()
    driver.add("first", 70, background=True)
    driver.add("second", 60, background=True)
    assert driver.steps(3) == [[("first", 0, 64)], [("first", 64, 70)], [("second", 0, 60)]]


def test_a_background_request_waits_while_anything_else_is_left():
    driver = Driver()
    driver.add("now", 100, max_tokens=3)
    driver.add("later", 70, background=True)
    assert [row for rows in driver.steps(3) for row in rows] == [
        ("now", 0, 100),
        ("now", 100, 101),
        ("now", 101, 102),
    ]
    assert driver.step() == [("later", 0, 64)]


def test_who_comes_later_runs_in_the_very_next_step_and_the_work_done_is_kept():
    driver = Driver(checkpoint_every=512)
    later = driver.add("later", 300, background=True)
    driver.steps(2)
    driver.add("now", 90)
    assert driver.step() == [("now", 0, 90)]
    assert later.status is Status.WAITING and later.live_slot is None and not later.block_table
    assert driver.steps(3) == [
        [("later", 128, 192)],
        [("later", 192, 256)],
        [("later", 256, 300)],
    ]
    assert driver.scheduler.num_preemptions == 0


def test_what_a_background_request_computed_is_exact_and_served_to_the_next():
    driver = Driver(checkpoint_every=512)
    prompt = list(range(200))
    driver.add("later", prompt, background=True)
    driver.finish_all()
    seq = driver.add("now", [*prompt, 7, 8])
    assert driver.step() == [("now", 192, 202)]
    assert seq.restored_boundary == 192 and not seq.reused_decoded


def test_a_background_request_counts_in_no_statistics_of_hits():
    driver = Driver()
    driver.add("later", 150, max_tokens=3, background=True)
    driver.finish_all()
    assert driver.manager.num_queries == 0 and not driver.manager.misses
    assert driver.scheduler.num_tokens_prefilled == 0
    assert driver.scheduler.num_tokens_prefilled_idle == 150
    driver.add("now", 100, max_tokens=3)
    driver.finish_all()
    assert driver.manager.num_queries == 1
    assert driver.scheduler.num_tokens_prefilled == 100
    assert driver.scheduler.num_tokens_prefilled_idle == 150


def test_a_background_request_that_waits_is_unfinished():
    driver = Driver()
    driver.add("later", 70, background=True)
    assert driver.scheduler.has_unfinished and driver.scheduler.num_background == 1


def test_without_recurrent_layers_a_background_request_gives_way_too():
    driver = Driver(recurrent=False)
    driver.add("later", 300, background=True)
    driver.step()
    driver.add("now", 90)
    assert driver.steps(2) == [[("now", 0, 90)], [("later", 64, 128)]]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_background_request_can_be_aborted(steps: int):
    driver = Driver()
    later = driver.add("later", 150, background=True)
    driver.steps(steps)
    driver.scheduler.abort(later)
    driver.scheduler.check()
    assert later.finish_reason == "abort" and not driver.scheduler.has_unfinished
    assert driver.manager.kv.pool.num_in_use == driver.manager.linear.pool.num_in_use == 0


def test_a_background_request_sent_away_can_be_aborted():
    driver = Driver()
    later = driver.add("later", 150, background=True)
    driver.step()
    driver.add("now", 150, max_tokens=5)
    driver.step()
    driver.scheduler.abort(later)
    driver.finish_all()
    assert later.finish_reason == "abort"


def test_a_failed_step_sends_a_background_request_back_to_its_queue():
    driver = Driver()
    later = driver.add("later", 150, background=True)
    driver.schedule()
    driver.scheduler.rollback(driver.last_batch)
    driver.scheduler.check()
    assert driver.scheduler.idle == [later]
    driver.finish_all()
    assert later.finish_reason == "length"


def test_starting_over_keeps_background_requests_in_their_order():
    driver = Driver()
    names = [driver.add(name, 70, background=True) for name in ("a", "b", "c")]
    driver.add("now", 70)
    driver.step()
    driver.scheduler.start_over([*names])
    driver.scheduler.check()
    assert driver.scheduler.idle == names


def test_the_engine_reports_a_background_request_and_its_work_apart():
    llm = make_engine(num_slots=20, num_blocks=50)
    greedy = SamplingParams(temperature=0, max_tokens=1)
    llm.add_request(tokens(0, 150), greedy, request_id="later", background=True)
    llm.add_request(tokens(1, 40), greedy, request_id="now")
    assert llm.stats().requests_background == 1 and llm.stats().requests_waiting == 1
    finished = []
    while llm.has_unfinished():
        finished += [output.request_id for output in llm.step() if output.finished]
    assert finished == ["now", "later"]
    stats = llm.stats()
    assert (stats.tokens_prefilled, stats.tokens_prefilled_idle, stats.queries) == (40, 150, 1)
    assert stats.requests_background == 0


def test_a_background_request_that_goes_on_from_decoded_states_says_so():
    driver = Driver()
    first = driver.add("first", 100, max_tokens=40, exact=False)
    driver.finish_all()
    seq = driver.add("next", [*first.token_ids, 7], exact=False, background=True)
    assert driver.step() == [("next", 128, 141)]
    assert seq.reused_decoded
