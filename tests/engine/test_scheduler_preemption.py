"""Who gives way when blocks run out, and how it comes back. Stride and blocks of 64 tokens."""

from engine.sequence import Status
from tests.engine.scheduling import Driver


def test_the_youngest_is_preempted_and_resumes_before_later_arrivals():
    """trap 19: a preempted request resumes on its old state."""
    driver = Driver(num_blocks=8, max_num_batched_tokens=512, enable_prefix_caching=False)
    driver.add("a", 127, max_tokens=80)
    driver.add("b", 127, max_tokens=80)
    c = driver.add("c", 65, max_tokens=80)
    assert driver.step() == [("a", 0, 127), ("b", 0, 127), ("c", 0, 65)]
    assert driver.step() == [("a", 127, 128), ("b", 127, 128), ("c", 65, 66)]
    driver.add("d", 10)  # it would fit where c does not
    assert driver.step() == [("a", 128, 129), ("b", 128, 129)]
    assert (c.status, c.num_preemptions, c.num_computed_tokens) == (Status.WAITING, 1, 0)
    assert [seq.request_id for seq in driver.scheduler.waiting] == ["c", "d"]
    assert driver.scheduler.num_preemptions == 1
    while driver.requests["a"].status is Status.RUNNING:
        assert not {"c", "d"} & {name for name, _, _ in driver.step()}
    assert driver.step()[-2:] == [("c", 0, 65), ("d", 0, 10)]
    driver.finish_all()


def test_a_resumed_request_replays_its_own_tokens_and_chooses_none_of_them_again():
    driver = Driver(num_blocks=5, max_num_batched_tokens=512, enable_prefix_caching=False)
    driver.add("a", 126, max_tokens=5)
    b = driver.add("b", 65, max_tokens=5)
    assert driver.steps(3)[2] == [("a", 127, 128), ("b", 66, 67)]
    assert driver.steps(2) == [[("a", 128, 129)], [("a", 129, 130)]]
    assert (b.num_preemptions, b.generated_token_ids) == (1, [1000, 1001, 1002])
    needed = []
    for rows in ([("b", 0, 65)], [("b", 65, 66)], [("b", 66, 67)], [("b", 67, 68)]):
        assert driver.step() == rows
        needed += driver.needed_logits
    assert needed == [False, False, False, True]
    assert b.generated_token_ids == [1000, 1001, 1002, 1003]


def test_the_oldest_request_advances_in_every_step():
    """A younger one that is decoding must give way to the prefill of an older one."""
    driver = Driver(num_blocks=8, max_num_batched_tokens=127, enable_prefix_caching=False)
    driver.add("a", 330)  # 6 blocks
    driver.add("b", 63, max_tokens=50)  # 1 block, then 2: together one more than there are
    seen = driver.steps(5)
    assert [row for rows in seen for row in rows if row[0] == "a"] == [
        ("a", 0, 64),
        ("a", 64, 128),
        ("a", 128, 192),
        ("a", 192, 256),
        ("a", 256, 330),
    ]


def test_a_sequence_preempts_only_younger_ones_and_waits_otherwise():
    driver = Driver(num_blocks=6, max_num_batched_tokens=512)
    driver.add("a", 64, max_tokens=100)
    driver.add("b", 128, max_tokens=2)
    assert driver.step() == [("a", 0, 64), ("b", 0, 128)]
    taken = driver.manager.kv.pool.allocate()  # 5 blocks: a 1, b 2, this 1, free 1
    assert [(r.seq.request_id, r.start, r.end) for r in driver.scheduler.schedule().rows] == [
        ("a", 64, 65)
    ]
    assert driver.requests["b"].status is Status.RUNNING
    driver.manager.kv.pool.release(taken)


def test_the_oldest_takes_from_the_youngest_first_and_then_from_the_next():
    driver = Driver(num_blocks=7, max_num_batched_tokens=512, enable_prefix_caching=False)
    for name in "abc":
        driver.add(name, 60, max_tokens=300)
    seen = []
    while driver.requests["a"].status is not Status.FINISHED:
        before = [seq.request_id for seq in driver.scheduler.running]
        driver.step()
        after = [seq.request_id for seq in driver.scheduler.running]
        seen += [name for name in before if name not in after]
    assert seen == ["c", "b", "a"]
    driver.finish_all()


def test_a_request_that_fits_alone_but_not_with_others_finishes():
    """trap 33: admitted, cut and requeued without end."""
    driver = Driver(num_blocks=8, max_num_batched_tokens=64)
    for name in "abc":
        driver.add(name, 300, max_tokens=100)  # 7 blocks each, and 7 there
    driver.finish_all(limit=900)
    assert all(seq.num_generated == 100 for seq in driver.requests.values())
