"""The engine behind asyncio, without HTTP: who waits, who is told, who gives back."""

import asyncio
import threading
from contextlib import aclosing, asynccontextmanager

import pytest

from engine import LLM, SamplingParams
from engine.builtin import BUILTIN_MODEL_DIR
from engine.engine_loop import EngineFailed, EngineFault, EngineStopped, Job
from engine.engine_thread import EngineThread, QueueFull
from tests.engine.server_fixture import POOLS, WAIT_SECONDS

LONG, SHORT = 2000, 4


class Ear:
    """An observer that writes down what it is told."""

    def __init__(self):
        self.outcomes, self.faults, self.first, self.later = [], 0, 0, 0

    def first_token(self, seconds):
        self.first += 1

    def next_token(self, seconds):
        self.later += 1

    def restored(self, seconds):
        pass

    def ended(self, outcome):
        self.outcomes.append(outcome)

    def fault(self):
        self.faults += 1


@asynccontextmanager
async def running(**options):
    """A started engine; at the end it holds nothing."""
    llm = LLM(BUILTIN_MODEL_DIR, **POOLS)
    engine = EngineThread(llm, observer=Ear(), **options)
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        llm.scheduler.check()
        assert not llm.has_unfinished() and engine.num_unfinished == 0
        stats = llm.stats()
        assert (stats.slots_live, stats.blocks_in_use) == (0, 0)


def job(name, *, max_tokens=SHORT, length=70, **fields):
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
    return Job(request_id=name, prompt=[ord(name[0])] * length, sampling=params, **fields)


def run(engine, *jobs):
    return engine.run(len(jobs), lambda: jobs)


async def finals(engine, *jobs):
    return {i: output async for i, output in run(engine, *jobs) if output.finished}


async def until(condition):
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


def test_outputs_are_those_of_the_engine_alone():
    async def main():
        async with running() as engine:
            outputs = await finals(engine, job("a"), job("b"))
            assert engine._observer.outcomes == ["length"] * 2
            assert engine._observer.first == 2 and engine._observer.later == 6
            return outputs

    outputs = asyncio.run(main())
    llm = LLM(BUILTIN_MODEL_DIR, **POOLS)
    for i, name in enumerate("ab"):
        [expected] = llm.generate([job(name).prompt], job(name).sampling)
        assert outputs[i].token_ids == expected.token_ids


def test_a_closed_generator_gives_everything_back():
    async def main():
        async with running() as engine:
            async with aclosing(run(engine, job("a", max_tokens=LONG), job("b"))) as outputs:
                await anext(outputs)
            await until(lambda: engine.snapshot.requests_running == 0)
            assert engine.num_unfinished == 0
            assert set(engine._observer.outcomes) <= {"abort", "length"}
            assert engine.recent.find("a").outcome == "abort"

    asyncio.run(main())


def test_a_cancelled_reader_gives_everything_back():
    async def main():
        async with running() as engine:
            reader = asyncio.create_task(finals(engine, job("a", max_tokens=LONG)))
            await until(lambda: engine.snapshot.requests_running == 1)
            reader.cancel()
            await until(lambda: engine.snapshot.requests_running == 0)
            assert reader.cancelled()

    asyncio.run(main())


def test_a_slow_reader_finds_the_latest_output():
    async def main():
        async with running() as engine, aclosing(run(engine, job("a", max_tokens=50))) as outputs:
            await anext(outputs)
            await until(lambda: engine.recent.find("a"))
            rest = [output async for _, output in outputs]
            assert len(rest) == 1 and rest[0].finished and len(rest[0].token_ids) == 50

    asyncio.run(main())


def test_a_job_waits_for_the_first_token_of_another():
    async def main():
        async with running() as engine:
            jobs = [job("a"), job("a2", after=0), job("a3", after=0)]
            outputs = await finals(engine, *jobs)
            assert [outputs[i].num_cached_tokens for i in range(3)] == [0, 64, 64]

    asyncio.run(main())


def test_places_are_taken_as_a_whole_and_given_back_one_by_one():
    async def main():
        async with running(max_queued_requests=3) as engine:
            async with aclosing(run(engine, job("a", max_tokens=LONG), job("b"))) as outputs:
                await anext(outputs)
                assert engine.num_unfinished == 2
                with pytest.raises(QueueFull):
                    await finals(engine, job("c"), job("d"))
                assert engine.num_unfinished == 2
                async for index, output in outputs:
                    if index == 1 and output.finished:
                        break
                assert len(await finals(engine, job("c"), job("d"))) == 2
            with pytest.raises(ValueError, match="4 answers"):
                await finals(engine, *map(job, "abcd"))
            assert engine._observer.outcomes.count("queue_full") == 1

    asyncio.run(main())


class SlowPlan:
    """Plans that wait until they are let go."""

    def __init__(self):
        self.begun, self.go = [], threading.Event()

    def __call__(self, name):
        def plan():
            self.begun.append(name)
            assert self.go.wait(WAIT_SECONDS)
            return [job(name)]

        return plan

    def start(self, engine, name):
        async def read():
            return [output async for _, output in engine.run(1, self(name)) if output.finished]

        return asyncio.create_task(read())


def test_a_place_is_held_while_a_request_is_planned_and_two_are_planned_at_once():
    async def main():
        async with running(max_queued_requests=3) as engine:
            slow = SlowPlan()
            readers = [slow.start(engine, name) for name in "abc"]
            await until(lambda: len(slow.begun) == 2)
            assert engine.num_queued == 3
            with pytest.raises(QueueFull):
                await finals(engine, job("d"))
            readers[0].cancel()  # its thread goes on, and nobody takes its place there
            await until(lambda: engine.num_queued == 2)
            await asyncio.sleep(0.05)
            assert slow.begun == ["a", "b"]
            slow.go.set()
            for reader in readers[1:]:
                assert len(await reader) == 1
            assert slow.begun == ["a", "b", "c"]

    asyncio.run(main())


def test_a_drain_goes_on_with_what_is_planned_and_an_abort_ends_it():
    async def main():
        async with running() as engine:
            slow, late = SlowPlan(), SlowPlan()
            drained = slow.start(engine, "a")
            aborted = late.start(engine, "b")
            await until(lambda: slow.begun and late.begun)
            engine.drain()
            assert engine.num_unfinished == 2
            slow.go.set()
            assert len(await drained) == 1
            engine.abort_all()
            late.go.set()
            with pytest.raises(EngineStopped):
                await aborted

    asyncio.run(main())


def test_a_plan_that_refuses_is_counted_and_frees_its_place():
    async def main():
        async with running() as engine:

            def refuse():
                raise ValueError("never")

            with pytest.raises(ValueError, match="never"):
                await anext(engine.run(1, refuse))
            assert engine._observer.outcomes == ["refused"] and engine.num_queued == 0

    asyncio.run(main())


def test_a_reader_that_stalls_holds_no_place_once_its_jobs_have_ended():
    async def main():
        async with running(max_queued_requests=2) as engine:
            jobs = [job("a", max_tokens=50), job("a2", max_tokens=50, after=0)]
            async with aclosing(run(engine, *jobs)) as outputs:
                await anext(outputs)
                await until(lambda: engine.recent.find("a2"))
                await until(lambda: engine.num_queued == 0)
                assert engine.num_unfinished == 2, "a drain waits for the reader"
                assert len(await finals(engine, job("b"), job("c"))) == 2
                rest = {index: len(output.token_ids) async for index, output in outputs}
                assert rest == {0: 50, 1: 50}

    asyncio.run(main())


def test_a_thread_that_dies_says_so_and_forgets_what_ran():
    async def main():
        async with running() as engine:
            reader = asyncio.create_task(finals(engine, job("a", max_tokens=LONG)))
            await until(lambda: engine.snapshot.requests_running == 1)
            llm = engine._engine.llm

            def broken():
                llm.abort("a")
                raise AssertionError("bookkeeping is broken")

            engine._engine.commands.put(broken)
            with pytest.raises(EngineFailed, match="restart the server"):
                await reader
            with pytest.raises(EngineFailed):
                await finals(engine, job("b"))
            assert engine.has_failed and not engine.is_open
            assert engine.snapshot.requests_running == 0

    asyncio.run(main())


def test_a_refused_prompt_ends_its_whole_group_and_nobody_else():
    async def main():
        async with running() as engine:
            other = asyncio.create_task(finals(engine, job("o", max_tokens=30)))
            with pytest.raises(ValueError, match="the prompt is empty"):
                await finals(engine, job("a", max_tokens=LONG), job("b", length=0))
            await until(lambda: engine.recent.find("a"))
            assert len((await other)[0].token_ids) == 30

    asyncio.run(main())


def test_a_stop_ends_what_runs_and_refuses_what_comes():
    async def main():
        async with running() as engine:
            reader = asyncio.create_task(finals(engine, job("a", max_tokens=LONG)))
            await until(lambda: engine.snapshot.requests_running == 1)
            await engine.stop()
            with pytest.raises(EngineStopped):
                await reader
            with pytest.raises(EngineStopped):
                await finals(engine, job("b"))
            assert not engine.is_open

    asyncio.run(main())


def test_a_drained_engine_finishes_what_it_has():
    async def main():
        async with running() as engine:
            reader = asyncio.create_task(finals(engine, job("a", max_tokens=60)))
            await until(lambda: engine.snapshot.requests_running == 1)
            engine.drain()
            with pytest.raises(EngineStopped):
                await finals(engine, job("b"))
            assert len((await reader)[0].token_ids) == 60

    asyncio.run(main())


def test_a_fault_without_names_ends_all_requests(monkeypatch):
    async def main():
        async with running() as engine:
            readers = [
                asyncio.create_task(finals(engine, job(name, max_tokens=LONG))) for name in "ab"
            ]
            await until(lambda: engine.snapshot.requests_running == 2)
            llm = engine._engine.llm

            def failing():
                monkeypatch.undo()
                raise RuntimeError("nobody knows")

            monkeypatch.setattr(llm, "step", failing)
            for reader in readers:
                with pytest.raises(EngineFault):
                    await reader
            assert engine._observer.faults == 1
            assert len(await finals(engine, job("c"))) == 1

    asyncio.run(main())


def test_a_request_that_can_not_be_queued_harms_nobody_else(monkeypatch):
    async def main():
        async with running() as engine:

            def failing(*args, **options):
                monkeypatch.undo()
                raise KeyError("a bug")

            monkeypatch.setattr(engine._engine.llm, "add_request", failing)
            with pytest.raises(EngineFault):
                await finals(engine, job("a"))
            assert len(await finals(engine, job("b"))) == 1

    asyncio.run(main())


def test_background_jobs_run_when_nobody_waits_and_count_for_nobody():
    async def main():
        async with running() as engine:
            engine.submit_background(job("z", max_tokens=1, save_points=(64,)))
            engine.submit_background(job("y", length=0))
            await until(lambda: engine.snapshot.tokens_prefilled_idle == 70)
            [output] = (await finals(engine, job("z2"))).values()
            assert output.boundary == 64
            assert engine._observer.outcomes == ["length"] and engine._observer.first == 1
            assert [record.request_id for record in engine.recent.newest_first()] == ["z2"]

    asyncio.run(main())


def test_of_too_many_background_jobs_the_oldest_are_given_up():
    async def main():
        async with running() as engine:
            async with aclosing(run(engine, job("a", max_tokens=LONG))) as outputs:
                await anext(outputs)
                names = [chr(ord("b") + i) for i in range(POOLS["max_num_seqs"] + 5)]
                for name in names:
                    engine.submit_background(job(name, max_tokens=1))
                await until(lambda: engine._engine.commands.empty())
                await anext(outputs)
                assert engine.snapshot.requests_background == POOLS["max_num_seqs"]
                assert list(engine._engine._live) == ["a", *names[5:]]
            await until(lambda: engine.snapshot.requests_background == 0)

    asyncio.run(main())


@pytest.mark.parametrize("option", [{"max_queued_requests": 0}, {"recent_requests": -1}])
def test_limits_that_allow_nothing_are_refused(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))}="):
        EngineThread(LLM(BUILTIN_MODEL_DIR, **POOLS), observer=Ear(), **option)
