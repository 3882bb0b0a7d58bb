"""The engine in a thread of its own, behind asyncio.

The event loop and the thread share two queues: commands go in through `EngineLoop.commands`, news
come back through `loop.call_soon_threadsafe`. Only the thread touches the `LLM`.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

from engine.engine_loop import EngineFault, EngineLoop, EngineStopped, Job, Live, News, Observer
from engine.llm import LLM
from engine.output import EngineStats, RequestOutput
from engine.request_log import RequestLog


class QueueFull(RuntimeError):
    """As many requests as allowed are unfinished; nothing of the new one was queued."""


class EngineThread:
    """Runs an `LLM` in one thread from `start` to `stop`. Its methods belong to the event loop.

    recent: the records of the requests that ended last.
    num_unfinished: answers asked for and not yet delivered, background jobs left out.
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
        self.num_unfinished = 0
        self._observer = observer
        self._engine = EngineLoop(llm, recent=self.recent, observer=observer, post=self._post)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining = False
        self._thread = threading.Thread(target=self._engine.run, name="engine", daemon=True)

    @property
    def snapshot(self) -> EngineStats:
        """The engine's statistics after its last step. Any thread may ask."""
        return self._engine.snapshot

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
        """End every request with `EngineStopped`."""
        self._engine.commands.put(self._engine.abort_all)

    async def stop(self) -> None:
        """End every request with `EngineStopped` and wait until the thread has ended."""
        self._draining = True
        if self._thread.is_alive():
            self._engine.commands.put(self._engine.stop)
            await asyncio.to_thread(self._thread.join)

    async def run(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The outputs of some jobs as they come: (index of the job, the job so far).

        A slow reader skips outputs: each holds all of its job's tokens so far. Closing the
        generator, or cancelling what waits for it, aborts what is left. Raises ValueError for a
        prompt that the engine refuses, QueueFull, EngineStopped, EngineFault; the first of these
        ends all jobs.
        """
        self.check_room(len(jobs))
        mailbox = _Mailbox()
        unfinished, waiting = set(range(len(jobs))), dict(enumerate(jobs))
        self.num_unfinished += len(unfinished)
        try:
            self._submit_after(None, waiting, mailbox)
            while unfinished:
                for index, output in await mailbox.take():
                    if output.finished:
                        unfinished.remove(index)
                        self.num_unfinished -= 1
                        _check_outcome(output)
                    self._submit_after(index, waiting, mailbox)
                    yield index, output
        finally:
            self.num_unfinished -= len(unfinished)
            for index in unfinished - waiting.keys():
                self._engine.commands.put(partial(self._engine.abort, jobs[index].request_id))

    def submit_background(self, job: Job) -> None:
        """Compute a job when nothing else runs; its outputs, and a refusal, are dropped.

        Of more than `max_num_seqs` such jobs the oldest is given up.
        """
        if self.is_open:
            self._engine.commands.put(partial(self._engine.add, Live(job, None)))

    def check_room(self, num_jobs: int) -> None:
        """Raises what `run` would raise before it queues so many jobs."""
        if not self.is_open:
            raise EngineStopped("the server is shutting down")
        limit = self.max_queued_requests
        if num_jobs > limit:
            raise ValueError(f"{num_jobs} answers are asked for; at most {limit} can be queued")
        if self.num_unfinished + num_jobs > limit:
            self._observer.ended("queue_full")
            raise QueueFull(f"{self.num_unfinished} of {limit} places in the queue are taken")

    def _submit_after(self, index: int | None, waiting: dict[int, Job], box: "_Mailbox") -> None:
        for i in [i for i, job in waiting.items() if job.after == index]:
            live = Live(waiting.pop(i), partial(box.put, i))
            self._engine.commands.put(partial(self._engine.add, live))
        if self._engine.closed:  # perhaps before it saw the commands
            raise EngineStopped("the engine has stopped")

    def _post(self, calls: list[Callable[[], None]]) -> None:
        """On the engine's thread: make calls on the event loop, if that is still there."""
        assert self._loop is not None
        if calls and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_call_all, calls)


class _Mailbox:
    """The latest news of each job of one `run`. Lives on the event loop."""

    def __init__(self) -> None:
        self._latest: dict[int, News] = {}
        self._changed = asyncio.Event()

    def put(self, index: int, news: News) -> None:
        """News replace older ones: outputs hold all that came before."""
        self._latest[index] = news
        self._changed.set()

    async def take(self) -> list[tuple[int, RequestOutput]]:
        """Wait for news and take them; raises the first error among them."""
        await self._changed.wait()
        self._changed.clear()
        latest, self._latest = self._latest, {}
        outputs = []
        for index, news in latest.items():
            if isinstance(news, Exception):
                raise news
            outputs.append((index, news))
        return outputs


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _check_outcome(output: RequestOutput) -> None:
    """Raise for an answer that ended without being one."""
    if output.finish_reason == "error":
        raise EngineFault("the model's logits were not finite")
    if output.finish_reason == "abort":
        raise EngineStopped("the request was aborted")
