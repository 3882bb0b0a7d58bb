"""Reads request bodies: no more bytes than allowed, and only JSON that is JSON."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from engine.api_errors import ApiError

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class StrictRequest(Request):
    """A request whose body is limited by `app.state.max_body_bytes`.

    413 as soon as too much is announced or has come; 400 for what is not said to be JSON, is none
    or not in UTF-8, for NaN, infinity, lone surrogates and keys that occur twice.
    """

    async def body(self) -> bytes:
        """The whole body; nothing is read of one that is announced as too large."""
        if not hasattr(self, "_body"):
            limit: int = self.app.state.max_body_bytes
            announced = self.headers.get("content-length", "")
            size = int(announced) if announced.isdecimal() else 0
            parts: list[bytes] = []
            if size <= limit:
                size = 0
                async for part in self.stream():
                    parts.append(part)
                    size += len(part)
                    if size > limit:
                        break
            if size > limit:
                raise ApiError(
                    413,
                    f"the body is larger than {limit} bytes",
                    code="request_too_large",
                    headers={"Connection": "close"},  # the rest of the body is not read
                )
            self._body = b"".join(parts)
            self._check_kind()
        return self._body

    def _check_kind(self) -> None:
        if not self._body:
            raise ApiError(400, "the body is empty; expected a JSON object")
        kind = self.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise ApiError(
                400, f"the header Content-Type is {kind!r:.80}; expected application/json"
            )

    async def json(self) -> Any:
        """The parsed body."""
        body = await self.body()
        try:
            value = json.loads(
                body.decode("utf-8-sig"),
                parse_constant=_refuse,
                parse_float=_finite,
                object_pairs_hook=_object,
            )
            if _SURROGATE_ESCAPE.search(body):  # in pairs they are characters
                json.dumps(value, ensure_ascii=False).encode()
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply") from None
        except UnicodeError:
            raise ApiError(
                400, "the body is not UTF-8, or holds text that UTF-8 can't hold"
            ) from None
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}") from None
        return value


class StrictRoute(APIRoute):
    """A route that reads its requests as `StrictRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strict


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ApiError(400, f"an object of the body has the key {key!r:.80} more than once")
    return value


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits:.40} is beyond the range of numbers")
    return value
