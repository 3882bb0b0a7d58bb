"""Responses that notice when nobody listens any more."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = "data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


def sse(event: BaseModel) -> str:
    """One server-sent event."""
    return f"data: {event.model_dump_json()}\n\n"


class EventStream(StreamingResponse):
    """Sends events, the first of which is there already, and closes their generator in any case.

    Starlette stops at a disconnect but leaves the generator, and what it holds, to the collector.
    """

    media_type = "text/event-stream"

    def __init__(self, first: str, rest: AsyncGenerator[str, None]) -> None:
        super().__init__(_chain(first, rest), headers={"Cache-Control": "no-cache"})
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or stop where the client leaves."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._rest.aclose()


async def _chain(first: str, rest: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    yield first
    async for event in rest:
        yield event


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is cancelled, and ClientGone raised, if the client leaves.

    The request's body must have been read.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
