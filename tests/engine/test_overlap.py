"""Each step is prepared while the one before it runs: same tokens, right order, nothing leaks."""

import math
import re
import threading
from pathlib import Path

import pytest

from engine import LLM, EngineConfig, SamplingParams
from engine.stream import InlineStream, ThreadStream
from tests.engine.test_interrupts import interrupt_at
from tests.lazy_stream import LazyStream
from tests.oracle import VOCAB, OracleModel, expected_output, load, state_after

ROOT = Path(__file__).parents[2]
STREAMS = [InlineStream, LazyStream, ThreadStream]
POOLS = {"num_slots": 14, "num_blocks": 60, "max_num_seqs": 3, "checkpoint_every": 64}
LONG = [(7 * i + i * i) % VOCAB for i in range(260)]
PROMPTS = {"a": LONG[:200], "b": LONG[:130] + [3] * 40, "c": LONG[:66]}


def greedy(max_tokens, **options):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def oracle(stream=LazyStream, **options):
    llm = LLM.from_model(OracleModel(), EngineConfig(**(POOLS | {"overlap": True} | options)))
    use(llm, stream)
    return llm


def use(llm, stream):
    llm.worker.stream.submit(lambda: None).result()
    llm.worker.stream = stream()


def finish(llm, limit=500):
    done = {}
    for _ in range(limit):
        done |= {o.request_id: o for o in llm.step() if o.finished}
        llm.scheduler.check()
        if not llm.has_unfinished():
            return done
    raise AssertionError("no progress")


def assert_nothing_is_held(llm):
    llm.step()
    stats = llm.stats()
    assert stats.blocks_in_use == stats.slots_live == 0
    assert llm.manager.linear.pool.num_in_use == 0


# ---- what is done when


def test_a_step_is_scheduled_and_issued_before_the_one_before_it_has_run():
    llm = oracle()
    llm.add_request(PROMPTS["c"], greedy(3), request_id="c")
    assert llm.step() == []
    assert len(llm.worker.stream.queue) == 1, "the prefill waits"
    [output] = llm.step()
    assert len(llm.worker.stream.queue) == 1, "the first token is read, the next step waits"
    want = expected_output(PROMPTS["c"], 3)
    assert output.token_ids == want[:1] and not output.finished
    outputs = [llm.step()[0], llm.step()[0]]
    assert [o.token_ids for o in outputs] == [want[:2], want]
    assert outputs[-1].finish_reason == "length"
    assert not llm.worker.stream.queue, "its end was known: no step too many"


def test_on_a_thread_the_host_prepares_while_the_model_runs():
    """The forward of each step waits until the next one was scheduled, or for ever."""
    llm = oracle(ThreadStream)
    scheduled = [threading.Event() for _ in range(20)]
    schedule, forward = llm.scheduler.schedule, llm.worker.model.forward
    num_scheduled = num_run = 0

    def scheduling():
        nonlocal num_scheduled
        batch = schedule()
        scheduled[num_scheduled].set()
        num_scheduled += 1
        return batch

    def waiting(*args):
        nonlocal num_run
        num_run += 1
        assert scheduled[num_run].wait(timeout=30), "its successor was not prepared meanwhile"
        return forward(*args)

    llm.scheduler.schedule, llm.worker.model.forward = scheduling, waiting
    llm.add_request(PROMPTS["c"], greedy(4), request_id="c")
    assert finish(llm)["c"].token_ids == expected_output(PROMPTS["c"], 4)
    assert num_run == 4


@pytest.mark.parametrize("restore", ["copy", "redirect"])
def test_states_and_kv_are_touched_on_the_stream_alone_and_a_restore_comes_first(restore):
    llm = oracle(restore=restore, max_num_batched_tokens=128)
    log, stream = [], llm.worker.stream
    copy, forward = llm.worker.state_pool.copy, llm.worker.model.forward
    issue = llm.worker.issue

    def note(name, call):
        def noted(*args):
            assert stream.is_running, f"{name} outside the stream"
            log.append(name)
            return call(*args)

        return noted

    def issuing(batch, before):
        log.append("restores" if any(r.op.restore_requested for r in batch.rows) else "issues")
        return issue(batch, before)

    llm.worker.state_pool.copy = note("copy", copy)
    llm.worker.model.forward = note("forward", forward)
    llm.worker.issue = issuing
    for name, prompt in PROMPTS.items():
        llm.add_request(prompt, greedy(3), request_id=name)
        llm.step()
    finish(llm)
    llm.add_request(PROMPTS["a"], greedy(3))
    finish(llm)
    assert log.count("forward") == log.count("restores") + log.count("issues")
    assert log.count("restores") >= 3
    assert log.count("copy") == (log.count("restores") if restore == "copy" else 0)
    text = " ".join(log)
    if restore == "copy":  # the copy is behind the forward before, and before its own forward
        assert len(re.findall("restores (?:forward )?copy", text)) == log.count("copy")
        assert "copy copy" not in text
    else:
        assert "issues restores forward" in text or "restores restores forward" in text


def test_nothing_waits_for_the_whole_device():
    """No global synchronise: the host waits for the small copy of the chosen tokens alone, and
    streams for each other when a graph is captured, at start."""
    waits = re.compile(r"synchronize\(|wait_stream\(")
    found = []
    for folder in ("engine", "cache", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            lines = path.read_text().splitlines()
            found += [(path.name, line.strip()) for line in lines if waits.search(line)]
    assert found == [
        ("stream.py", "self._copied.synchronize()"),
        ("graphs.py", "stream.wait_stream(current)"),
        ("graphs.py", "current.wait_stream(stream)"),
    ]


def test_what_a_step_writes_is_not_found_before_the_step_is_issued():
    """Two requests with one prefix in one step: the second reuses nothing; the next one does."""
    llm = oracle(max_num_batched_tokens=512)
    issue, known = llm.worker.issue, []

    def issuing(batch, before):
        known.append((len(llm.manager.linear.cache), len(llm.manager.kv._index.ids())))
        return issue(batch, before)

    llm.worker.issue = issuing
    for name in ("first", "twin"):
        llm.add_request(LONG[:200], greedy(2), request_id=name)
    llm.step()
    assert known == [(0, 0)]
    assert len(llm.worker.stream.queue) == 1, "issued, not run"
    llm.add_request(LONG[:200], greedy(2), request_id="next")
    done = finish(llm)
    assert [done[n].boundary for n in ("first", "twin", "next")] == [0, 0, 192]
    assert {tuple(o.token_ids) for o in done.values()} == {tuple(expected_output(LONG[:200], 2))}


# ---- ends that come as a surprise


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("length", range(1, 7))
@pytest.mark.parametrize("exact", [True, False])
def test_a_request_that_stops_leaves_its_row_too_many_behind(stream, length, exact):
    """Its answer ends on, before or after a boundary; nothing past its end is published."""
    prompt = LONG[:124]
    want = expected_output(prompt, 10)
    llm = oracle(stream)
    params = greedy(40, stop_token_ids=(want[length - 1],))
    llm.add_request(prompt, params, request_id="stops", exact=exact)
    llm.add_request(PROMPTS["b"], greedy(9), request_id="stays")
    done = finish(llm)
    first = want.index(want[length - 1]) + 1
    assert (done["stops"].token_ids, done["stops"].finish_reason) == (want[:first], "stop")
    assert done["stays"].token_ids == expected_output(PROMPTS["b"], 9)
    assert_nothing_is_held(llm)
    texts = (prompt + want[:first], PROMPTS["b"] + done["stays"].token_ids)
    true = [state_after(text[:end]).words() for text in texts for end in range(len(text) + 1)]
    slots = llm.manager.linear.cache.slot_ids()
    assert len(slots) >= 2
    assert all(load(llm.worker.state_pool, slot).words() in true for slot in slots)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("when", range(9))
def test_an_abort_at_any_point_changes_no_other_token(stream, inside, when):
    """Between two steps, with the tokens of one unread, or between schedule and forward."""
    llm = oracle(stream, max_num_batched_tokens=128)
    issue, calls = llm.worker.issue, iter(range(100))

    def aborting(batch, before):
        if next(calls) == when:
            llm.abort("a")
        return issue(batch, before)

    if inside:
        llm.worker.issue = aborting
    for name, prompt in PROMPTS.items():
        llm.add_request(prompt, greedy(12), request_id=name)
    done = {}
    for step in range(200):
        if step == when and not inside and (given_up := llm.abort("a")) is not None:
            done["a"] = given_up
        done |= {o.request_id: o for o in llm.step() if o.finished}
        llm.scheduler.check()
        if not llm.has_unfinished():
            break
    for name, prompt in PROMPTS.items():
        want = expected_output(prompt, 12)
        assert done[name].token_ids == want[: len(done[name].token_ids)]
        assert done[name].finish_reason == ("abort" if name == "a" else "length")
        assert name == "a" or done[name].token_ids == want
    assert_nothing_is_held(llm)
    llm.add_request(PROMPTS["a"], greedy(12), request_id="again")
    assert finish(llm)["again"].token_ids == expected_output(PROMPTS["a"], 12)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("victim", ["a", "b", "c"])
@pytest.mark.parametrize("when", range(1, 9))
def test_a_preemption_at_any_point_changes_no_token(stream, victim, when):
    """trap 19: also of a request whose token nobody has read yet."""
    llm = oracle(stream, max_num_batched_tokens=128)
    for name, prompt in PROMPTS.items():
        llm.add_request(prompt, greedy(6), request_id=name)
    done = {}
    for _ in range(when):
        done |= {o.request_id: o for o in llm.step() if o.finished}
    for seq in list(llm.scheduler.running):
        if seq.request_id == victim:
            llm.scheduler._preempt(seq)
            llm.scheduler.check()
    done |= finish(llm)
    for name, prompt in PROMPTS.items():
        assert done[name].token_ids == expected_output(prompt, 6)
    assert_nothing_is_held(llm)


def test_blocks_that_run_out_preempt_a_request_with_an_unread_token():
    llm = oracle(num_blocks=5, block_size=64, num_slots=8, max_num_seqs=2)
    prompts = {"old": LONG[:60], "young": LONG[100:160]}
    for name, prompt in prompts.items():
        llm.add_request(prompt, greedy(90), request_id=name)
    done = finish(llm)
    assert llm.stats().preemptions > 0
    for name, prompt in prompts.items():
        assert done[name].token_ids == expected_output(prompt, 90)


# ---- what breaks


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("when", range(6))
def test_a_forward_that_fails_is_told_late_and_loses_nothing(stream, rows, when):
    llm = oracle(stream, max_num_batched_tokens=128)
    for name, prompt in PROMPTS.items():
        llm.add_request(prompt, greedy(5), request_id=name)
    done = {}
    for _ in range(when):
        done |= {o.request_id: o for o in llm.step() if o.finished}
    llm.worker.stream.submit(lambda: None).result()
    llm.worker.model.fail_after = rows
    errors = []

    def step():
        try:
            done.update({o.request_id: o for o in llm.step() if o.finished})
        except RuntimeError as error:
            errors.append(str(error))
            assert llm.failed_request_ids and not done.keys() & llm.failed_request_ids
        llm.scheduler.check()

    step()
    llm.worker.stream.submit(lambda: None).result()
    llm.worker.model.fail_after = None
    while llm.has_unfinished():
        step()
    assert errors == ["the device is gone"] * (rows == 0 or len(errors))
    assert llm.failed_request_ids == ()
    for name, prompt in PROMPTS.items():
        assert done[name].token_ids == expected_output(prompt, 5)
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("stream", STREAMS)
def test_what_a_request_with_nan_logits_left_is_not_reused_by_the_step_ahead(stream):
    """Its states are published when the next request is scheduled; only then is it known."""
    llm = oracle(stream, max_num_batched_tokens=512)
    forward, spoilt = llm.worker.model.forward, []

    def spoiling(inputs, pool, kv_cache):
        logits = forward(inputs, pool, kv_cache)
        if not spoilt:
            spoilt.append(True)
            logits[0] = math.nan
            written = [*inputs.prefill_slots.write.host, *inputs.snapshot_slots.host]
            pool.arena[[slot for slot in written if slot > 0]] = 255
            kv_cache[list(inputs.prefill_block_tables.host[0])] = -9
        return logits

    llm.worker.model.forward = spoiling
    llm.add_request(LONG[:137], greedy(3), request_id="bad")
    assert llm.step() == []
    others = {str(i): [*LONG[:128], i, *range(9)] for i in range(2)}
    for name, prompt in others.items():
        llm.add_request(prompt, greedy(3), request_id=name)
    schedule, seen = llm.scheduler.schedule, []

    def scheduling():
        batch = schedule()
        seen.extend(row.start for row in batch.rows if row.is_prefill)
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.scheduler, "schedule", scheduling)
        done = {o.request_id: o for o in llm.step()}
    assert seen == [128, 128], "they were scheduled on what the bad one left"
    done |= finish(llm)
    assert done["bad"].finish_reason == "error" and done["bad"].token_ids == []
    for name, prompt in others.items():
        assert done[name].token_ids == expected_output(prompt, 3)
    assert_nothing_is_held(llm)


def test_drafts_make_overlap_without_effect():
    assert EngineConfig(overlap=True).overlaps
    assert not EngineConfig(overlap=True, num_speculative_tokens=1).overlaps
    llm = oracle(InlineStream, num_speculative_tokens=2, num_slots=20)
    llm.add_request(PROMPTS["c"], greedy(3))
    assert len(llm.step()) == 1, "its token is read in the step that chose it"


# ---- interrupts


@pytest.mark.parametrize("stream", [InlineStream, LazyStream])
@pytest.mark.parametrize("steps_before", [0, 1, 2, 4])
def test_an_interrupt_at_any_line_of_a_step_changes_no_token_and_leaks_nothing(
    steps_before, stream
):
    number = 1
    while True:
        llm = oracle(stream, max_num_batched_tokens=192)
        for name, prompt in PROMPTS.items():
            llm.add_request(prompt, greedy(4), request_id=name)
        done = {}
        for _ in range(steps_before):
            done |= {o.request_id: o for o in llm.step() if o.finished}
        if not interrupt_at(llm, number):
            break
        done |= finish(llm)
        for name, prompt in PROMPTS.items():
            assert done[name].token_ids == expected_output(prompt, 4), f"at line event {number}"
        assert_nothing_is_held(llm)
        number += 5
    assert number > 100
