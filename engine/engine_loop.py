"""The engine's side of the server: obeys commands, steps, tells what happened. Runs in one thread.

Everything here belongs to that thread, except the attributes that `EngineLoop` describes.
"""

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from engine.llm import LLM
from engine.output import EngineStats, RequestOutput
from engine.request_log import RequestLog, RequestRecord
from engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class EngineStopped(RuntimeError):
    """The engine takes no new requests, or ended this one because it stops."""


class EngineFailed(EngineStopped):
    """The engine's thread has ended by an error: it takes nothing and can't be started again."""

    def __init__(self) -> None:
        super().__init__("the engine has failed; restart the server")


class EngineFault(RuntimeError):
    """The engine failed while it computed this request; others go on."""


News = RequestOutput | Exception


@dataclass(frozen=True, kw_only=True)
class Job:
    """One answer to compute; the fields are those of `LLM.add_request`.

    after: index, among the jobs it is run with, of the one whose first token it waits for.
    """

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    exact: bool = True
    save_points: tuple[int, ...] = ()
    after: int | None = None


class Observer(Protocol):
    """Is told what the loop measures, on its thread. It is told nothing of background jobs."""

    def first_token(self, seconds: float) -> None:
        """A request's first token came this long after it was queued."""

    def next_token(self, seconds: float) -> None:
        """A later token came this long after the one before."""

    def restored(self, seconds: float) -> None:
        """A step restored states, and that took this long."""

    def ended(self, outcome: str) -> None:
        """A request ended: an outcome of `RequestRecord`, "refused" or "queue_full"."""

    def fault(self) -> None:
        """A step raised."""


@dataclass(eq=False)
class Live:
    """A job inside the engine. tell is called with its news; None: a background job."""

    job: Job
    tell: Callable[[News], None] | None
    arrival: float = field(default_factory=time.time)
    num_tokens: int = 0
    token_time: float = 0.0


class EngineLoop:
    """Owns an `LLM` while `run` runs.

    commands: what other threads want done between two steps.
    snapshot: the engine's statistics after the last step, immutable.
    recent: the records of the requests that ended last.
    closed: the loop has ended; commands have no effect but that new jobs are told so.
    failed: it ended by an error.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        recent: RequestLog,
        observer: Observer,
        post: Callable[[list[Callable[[], None]]], None],
    ) -> None:
        """post: carries calls to where `Live.tell` may be called."""
        self.llm = llm
        self.recent = recent
        self.commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.snapshot: EngineStats = llm.stats()
        self.closed = self.failed = False
        self._observer = observer
        self._post = post
        self._stopping = False
        self._num_threads = torch.get_num_threads()
        self._live: dict[str, Live] = {}

    def run(self) -> None:
        """Obey and step until a command calls `stop`. Whatever happens, every job gets an end."""
        torch.set_num_threads(self._num_threads)  # OpenMP keeps the number for each thread
        try:
            while not self._stopping:
                self._obey()
                if self.llm.has_unfinished() and not self._stopping:
                    self._step()
        except BaseException:
            logger.critical("the engine thread ends: its engine is not usable", exc_info=True)
            self.failed = True
            self._observer.fault()
        finally:
            self.closed = True
            self.snapshot = replace(
                self.snapshot, requests_waiting=0, requests_running=0, requests_background=0
            )
            left, self._live = self._live, {}
            self._tell([(live, self.end_error()) for live in left.values()])
            while not self.commands.empty():
                self.commands.get()()

    def end_error(self) -> EngineStopped:
        """What a closed loop tells of jobs that it can't compute."""
        return EngineFailed() if self.failed else EngineStopped("the engine has stopped")

    # ---- commands

    def add(self, live: Live) -> None:
        """Queue a job; one that is refused is told the ValueError."""
        job = live.job
        if self.closed:
            return self._tell([(live, self.end_error())])
        try:
            self.llm.add_request(
                job.prompt,
                job.sampling,
                request_id=job.request_id,
                cache_salt=job.cache_salt,
                exact=job.exact,
                save_points=job.save_points,
                background=live.tell is None,
            )
        except ValueError as error:
            if live.tell is not None:
                self._observer.ended("refused")
            return self._tell([(live, error)])
        except Exception:
            logger.exception("request %s could not be queued", job.request_id)
            self._observer.fault()
            return self._tell([(live, EngineFault("it could not be queued"))])
        self._live[job.request_id] = live
        if live.tell is None:
            self._limit_background()

    def abort(self, request_id: str) -> None:
        """Take a job out and give back what it holds; nothing happens if it has ended."""
        live = self._live.get(request_id)
        if live is not None:
            self._end(live, "abort", EngineStopped("the request was aborted"))

    def abort_all(self) -> None:
        """Take all jobs out."""
        for live in list(self._live.values()):
            self._end(live, "abort", EngineStopped("the server is shutting down"))

    def stop(self) -> None:
        """Take all jobs out and let `run` return."""
        self.abort_all()
        self._stopping = True

    def _limit_background(self) -> None:
        background = [live for live in self._live.values() if live.tell is None]
        for oldest in background[: -self.llm.config.max_num_seqs]:
            self._end(oldest, "abort", EngineStopped("given up"))

    # ---- steps

    def _obey(self) -> None:
        """Carry out all commands; wait for one when there is nothing to compute."""
        wait = not self.llm.has_unfinished()
        if not wait and self.commands.empty():
            return
        while wait or not self.commands.empty():
            self.commands.get()()
            wait = False
        self.snapshot = self.llm.stats()

    def _step(self) -> None:
        try:
            outputs = self.llm.step()
        except Exception as error:
            self._fail(error)
        else:
            if self.llm.last_restore_seconds is not None:
                self._observer.restored(self.llm.last_restore_seconds)
            self.snapshot = self.llm.stats()  # nobody is told before the statistics know
            self._report(outputs)

    def _report(self, outputs: list[RequestOutput]) -> None:
        now = time.perf_counter()
        news: list[tuple[Live, News]] = []
        for output in outputs:
            live = self._live[output.request_id]
            if live.tell is not None:
                self._measure(live, output, now)
            news.append((live, output))
            if output.finished:
                self._forget(live, output, str(output.finish_reason))
        self._tell(news)

    def _measure(self, live: Live, output: RequestOutput, now: float) -> None:
        if len(output.token_ids) == live.num_tokens:
            return
        if live.num_tokens:
            self._observer.next_token(now - live.token_time)
        elif output.ttft_ms is not None:
            self._observer.first_token(output.ttft_ms / 1e3)
        live.num_tokens, live.token_time = len(output.token_ids), now

    def _fail(self, error: Exception) -> None:
        """End the requests of the step that raised; without their names, all of them."""
        named = self.llm.failed_request_ids or list(self._live)
        failed = [request_id for request_id in named if request_id in self._live]
        logger.error("a step failed; requests %s end", failed, exc_info=error)
        self._observer.fault()
        for request_id in failed:
            self._end(self._live[request_id], "fault", EngineFault("a step failed"))

    def _end(self, live: Live, outcome: str, error: Exception) -> None:
        """Take a request out of the engine and tell its reader why."""
        self._forget(live, self.llm.abort(live.job.request_id), outcome)
        self.snapshot = self.llm.stats()
        self._tell([(live, error)])

    def _forget(self, live: Live, output: RequestOutput | None, outcome: str) -> None:
        self._live.pop(live.job.request_id, None)
        if live.tell is not None and output is not None:
            self._observer.ended(outcome)
            self.recent.add(RequestRecord.of(output, time=live.arrival, outcome=outcome))

    def _tell(self, news: list[tuple[Live, News]]) -> None:
        self._post([_call(live.tell, what) for live, what in news if live.tell is not None])


def _call(tell: Callable[[News], None], what: News) -> Callable[[], None]:
    return lambda: tell(what)
