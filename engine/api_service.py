"""One request from its body to its response."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial

from fastapi import Request, Response

from engine.api_answers import Answers
from engine.api_errors import ApiError, api_error, error_reply
from engine.api_stream import DONE, ClientGone, EventStream, sse, unless_disconnected
from engine.api_types import ChatRequest, GenerationRequest
from engine.engine_loop import EngineFault, EngineStopped, Job
from engine.engine_thread import EngineThread, QueueFull
from engine.request_planner import RequestPlanner

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # nobody is there to read it


class Service:
    """Plans requests, runs them in the engine and answers them.

    idle_prefill: prefill a chat's answer when nothing else runs, for the turn that may follow.
    """

    def __init__(
        self, engine: EngineThread, planner: RequestPlanner, *, idle_prefill: bool
    ) -> None:
        self.engine = engine
        self.planner = planner
        self._idle_prefill = idle_prefill
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_preparing(self) -> int:
        """Next turns whose prefill is yet to be handed to the engine."""
        return len(self._tasks)

    async def respond(
        self,
        request: Request,
        body: GenerationRequest,
        plan: Callable[[], list[Job]],
        answers: Answers,
    ) -> Response:
        """The whole answer, or a stream whose first event is there; ApiError for a refusal.

        A fault before the first token has a status of its own; later it is an event.
        """
        with _told_as_api_errors():
            try:
                if not body.stream:
                    await unless_disconnected(request, self._compute(body, plan, answers))
                    return Response(
                        answers.whole().model_dump_json(), media_type="application/json"
                    )
                events = self._events(body, plan, answers)
                first = await unless_disconnected(request, _next(events))
                return EventStream(first, events)
            except ClientGone:
                return Response(status_code=CLIENT_GONE)

    async def _compute(
        self, body: GenerationRequest, plan: Callable[[], list[Job]], answers: Answers
    ) -> None:
        async with aclosing(self.engine.run(body.num_answers, plan)) as outputs:
            async for index, output in outputs:
                answers.take(index, output)
        self._prepare_next_turn(body, answers)

    async def _events(
        self, body: GenerationRequest, plan: Callable[[], list[Job]], answers: Answers
    ) -> AsyncGenerator[str, None]:
        begun = False
        try:
            async with aclosing(self.engine.run(body.num_answers, plan)) as outputs:
                async for index, output in outputs:
                    for event in answers.events(index, output):
                        begun = True
                        if body.continuous_usage:
                            event.usage = answers.usage()
                        yield sse(event)
        except Exception as error:
            if not begun:
                raise
            yield sse(error_reply(error))
            return
        self._prepare_next_turn(body, answers)
        if body.include_usage:
            yield sse(answers.usage_event())
        yield DONE

    def _prepare_next_turn(self, body: GenerationRequest, answers: Answers) -> None:
        """Of an exact chat with one answer. It goes on beside the response."""
        wanted = self._idle_prefill and body.warmstate.exact and answers.n == 1
        if wanted and isinstance(body, ChatRequest):
            task = asyncio.create_task(self._prefill(body, answers.outputs[0].text))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _prefill(self, body: ChatRequest, answer: str) -> None:
        if not self.engine.is_open:
            return
        try:
            job = await self.engine.plan(partial(self.planner.next_turn_job, body, answer))
        except ValueError as error:  # the template refuses its own model's answer
            logger.info("no idle prefill: %s", error)
        else:
            if job is not None:
                self.engine.submit_background(job)


async def _next(events: AsyncIterator[str]) -> str:
    return await anext(events)


@contextmanager
def _told_as_api_errors() -> Iterator[None]:
    try:
        yield
    except ApiError:
        raise
    except (ValueError, QueueFull, EngineStopped, EngineFault) as error:
        raise api_error(error) from error
