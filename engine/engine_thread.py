"""The engine in a thread of its own, behind asyncio.

The event loop and the thread share two queues: commands go in through `EngineLoop.commands`, news
come back through `loop.call_soon_threadsafe`. Only the thread touches the `LLM`.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from engine.engine_loop import (
    EngineFailed,
    EngineFault,
    EngineLoop,
    EngineStopped,
    Job,
    Live,
    News,
    Observer,
)
from engine.llm import LLM
from engine.output import EngineStats, RequestOutput
from engine.request_log import RequestLog

T = TypeVar("T")
MAX_PLANNING = 2  # requests that are tokenised at once


class QueueFull(RuntimeError):
    """As many requests as allowed are unfinished; nothing of the new one was queued."""


class EngineThread:
    """Runs an `LLM` in one thread from `start` to `stop`. Its methods belong to the event loop.

    recent: the records of the requests that ended last.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_queued_requests: int = 256,
        recent_requests: int = 100,
        observer: Observer,
    ) -> None:
        """ValueError for a limit below one request, or a negative `recent_requests`."""
        if max_queued_requests < 1:
            raise ValueError(f"max_queued_requests={max_queued_requests}: must be at least 1")
        self.max_queued_requests = max_queued_requests
        self.recent = RequestLog(recent_requests)
        self._groups: set[_Group] = set()
        self._planners = ThreadPoolExecutor(min(MAX_PLANNING, max_queued_requests), "planner")
        self._observer = observer
        self._engine = EngineLoop(llm, recent=self.recent, observer=observer, post=self._post)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining = self._aborted = False
        self._thread = threading.Thread(target=self._engine.run, name="engine", daemon=True)

    @property
    def snapshot(self) -> EngineStats:
        """The engine's statistics after its last step. Any thread may ask."""
        return self._engine.snapshot

    @property
    def num_unfinished(self) -> int:
        """Answers asked for and not yet read to their end, background jobs left out."""
        return sum(len(group.unread) for group in list(self._groups))

    @property
    def num_queued(self) -> int:
        """Those of them that are yet to be planned or computed: the places that are taken."""
        return sum(len(group.queued) for group in list(self._groups))

    @property
    def has_failed(self) -> bool:
        """Whether the thread has ended by an error."""
        return self._engine.failed

    @property
    def is_open(self) -> bool:
        """Whether new requests are taken."""
        return self._thread.is_alive() and not (self._draining or self._engine.closed)

    def start(self) -> None:
        """Start the thread; its news come to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def drain(self) -> None:
        """Take no new requests from now on; the others go on. May be called from a signal."""
        self._draining = True

    def abort_all(self) -> None:
        """End every request with `EngineStopped`; those that are being planned never begin."""
        self._draining = self._aborted = True
        self._engine.commands.put(self._engine.abort_all)

    async def stop(self) -> None:
        """End every request with `EngineStopped` and wait until the thread has ended."""
        self._draining = self._aborted = True
        self._planners.shutdown(wait=False, cancel_futures=True)
        if self._thread.is_alive():
            self._engine.commands.put(self._engine.stop)
            await asyncio.to_thread(self._thread.join)

    async def plan(self, work: Callable[[], T]) -> T:
        """What some work returns; it runs beside the event loop, two such at once."""
        return await asyncio.get_running_loop().run_in_executor(self._planners, work)

    async def run(
        self, num_jobs: int, plan: Callable[[], Sequence[Job]]
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The outputs of the jobs that a plan gives, as they come: (index, the job so far).

        Their places in the queue are taken before the plan is made (see `plan`), and each is free
        again when its job has ended, read or not. A slow reader skips outputs: each holds all of
        its job's tokens so far. Closing the generator, or cancelling what waits for it, aborts what
        is left. Raises what the plan raises, ValueError for a prompt that the engine refuses,
        QueueFull, EngineStopped, EngineFault; the first of these ends all jobs.
        """
        self.check_room(num_jobs)
        group = _Group(num_jobs, self._submit)
        self._groups.add(group)
        try:
            group.begin(await self._planned(plan))
            while group.unread:
                for index, output in await group.take():
                    yield index, output
        finally:
            self._groups.remove(group)
            for job in group.close():
                self._engine.commands.put(partial(self._engine.abort, job.request_id))

    async def _planned(self, plan: Callable[[], Sequence[Job]]) -> Sequence[Job]:
        try:
            jobs = await self.plan(plan)
        except ValueError:
            self._observer.ended("refused")
            raise
        if self._aborted:
            raise EngineStopped("the server is shutting down")
        return jobs

    def submit_background(self, job: Job) -> None:
        """Compute a job when nothing else runs; its outputs, and a refusal, are dropped.

        Of more than `max_num_seqs` such jobs the oldest is given up.
        """
        if self.is_open:
            self._engine.commands.put(partial(self._engine.add, Live(job, None)))

    def check_open(self) -> None:
        """Raises EngineStopped unless new requests are taken."""
        if self.has_failed:
            raise EngineFailed
        if not self.is_open:
            raise EngineStopped("the server is shutting down")

    def check_room(self, num_jobs: int) -> None:
        """Raises what `run` would raise before it plans so many jobs."""
        self.check_open()
        limit, taken = self.max_queued_requests, self.num_queued
        if num_jobs > limit:
            self._observer.ended("refused")
            raise ValueError(f"{num_jobs} answers are asked for; at most {limit} can be queued")
        if taken + num_jobs > limit:
            self._observer.ended("queue_full")
            raise QueueFull(f"{taken} of {limit} places in the queue are taken")

    def _submit(self, live: Live) -> None:
        self._engine.commands.put(partial(self._engine.add, live))
        if self._engine.closed and live.tell is not None:  # perhaps before it saw the command
            live.tell(self._engine.end_error())

    def _post(self, calls: list[Callable[[], None]]) -> None:
        """On the engine's thread: make calls on the event loop, if that is still there."""
        assert self._loop is not None
        if calls and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_call_all, calls)


class _Group:
    """The jobs of one `run` and the latest news of each. Lives on the event loop.

    queued: indices of the jobs whose last news has not come: they take places.
    unread: indices of those whose last news has not been taken.
    """

    def __init__(self, num_jobs: int, submit: Callable[[Live], None]) -> None:
        self.queued, self.unread = set(range(num_jobs)), set(range(num_jobs))
        self._submit = submit
        self._jobs: Sequence[Job] = ()
        self._waiting: set[int] = set()
        self._latest: dict[int, News] = {}
        self._changed = asyncio.Event()

    def begin(self, jobs: Sequence[Job]) -> None:
        """Submit the jobs that wait for no other."""
        assert len(jobs) == len(self.queued)
        self._jobs, self._waiting = jobs, set(self.queued)
        self._submit_after(None)

    async def take(self) -> list[tuple[int, RequestOutput]]:
        """Wait for news and take them; raises the first error among them."""
        await self._changed.wait()
        self._changed.clear()
        latest, self._latest = self._latest, {}
        outputs = []
        for index, news in latest.items():
            if isinstance(news, Exception):
                raise news
            if news.finished:
                self.unread.discard(index)
            outputs.append((index, news))
        return outputs

    def close(self) -> list[Job]:
        """Submit no more; the jobs that are left in the engine."""
        waiting, self._waiting = self._waiting, set()
        return [self._jobs[index] for index in self.queued - waiting if self._jobs]

    def _put(self, index: int, news: News) -> None:
        """News replace older ones: outputs hold all that came before."""
        news = _checked(news)
        self._latest[index] = news
        self._changed.set()
        if isinstance(news, Exception):  # it will end all jobs: those that wait never begin
            self.queued -= self._waiting | {index}
            self._waiting.clear()
            return
        if news.finished:
            self.queued.discard(index)
        self._submit_after(index)

    def _submit_after(self, index: int | None) -> None:
        for i in sorted(i for i in self._waiting if self._jobs[i].after == index):
            self._waiting.discard(i)
            self._submit(Live(self._jobs[i], partial(self._put, i)))


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _checked(news: News) -> News:
    """An answer that ended without being one is an error."""
    if not isinstance(news, Exception) and news.finish_reason == "error":
        return EngineFault("the model's logits were not finite")
    if not isinstance(news, Exception) and news.finish_reason == "abort":
        return EngineStopped("the request was aborted")
    return news
