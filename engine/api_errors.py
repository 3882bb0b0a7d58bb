"""Every error in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from engine.api_replies import Error, ErrorReply
from engine.api_types import WarmstateOptions
from engine.engine_loop import EngineFailed, EngineFault, EngineStopped
from engine.engine_thread import QueueFull

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
_UNION_MEMBER = re.compile(r"[\[\](-]|^(str|int|constrained)$")  # pydantic's names in a `loc`


class ApiError(HTTPException):
    """An answer that is an error. param: the field it is about; code: for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param, self.code = param, code


def api_error(error: Exception) -> ApiError:
    """What a client is told of an exception; the ones that are not its fault name no details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        retry = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        return ApiError(429, str(error), code="queue_full", headers=retry)
    if isinstance(error, EngineFailed):
        return ApiError(503, str(error), code="engine_failed")
    if isinstance(error, EngineStopped):
        return ApiError(503, str(error), code="shutting_down")
    if isinstance(error, EngineFault):
        return ApiError(500, f"the engine failed: {error}", code="engine_fault")
    if isinstance(error, ValueError):
        return ApiError(400, str(error), param=_named_field(str(error)))
    if isinstance(error, HTTPException):
        code = _CODES.get(error.status_code)
        return ApiError(error.status_code, error.detail, code=code, headers=error.headers)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed", code="internal_error")


def error_reply(error: Exception) -> ErrorReply:
    """The body that tells an exception."""
    api = api_error(error)
    kind = {429: "rate_limit_error"}.get(api.status_code, "invalid_request_error")
    kind = kind if api.status_code < 500 else "server_error"
    return ErrorReply(error=Error(message=api.detail, type=kind, param=api.param, code=api.code))


def error_response(error: Exception) -> JSONResponse:
    """The response that tells an exception."""
    api = api_error(error)
    return JSONResponse(error_reply(api).model_dump(), api.status_code, api.headers)


def install_error_handlers(app: FastAPI) -> None:
    """Give every error of an app this shape, those of the framework too."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return error_response(error)

    async def handle_invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(_of_validation(error.errors()))

    app.add_exception_handler(RequestValidationError, handle_invalid)
    app.add_exception_handler(HTTPException, handle)
    app.add_exception_handler(Exception, handle)


def _of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """One error, about the first field that is wrong."""
    param = _field(errors[0]["loc"])
    about_it = [each for each in errors if _field(each["loc"]) == param]
    reasons = dict.fromkeys(_reason(each) for each in about_it)
    text = " or: ".join(list(reasons)[:4])
    return ApiError(400, f"{param}: {text}" if param else text, param=param)


def _field(loc: Sequence[str | int]) -> str | None:
    """The path of a field in the body, without pydantic's names of the members of a union."""
    names = [str(part) for part in loc[1:] if not _UNION_MEMBER.search(str(part))]
    if names and names[0] in ("prompt", "stop", "stop_token_ids"):
        names = names[:1]
    return ".".join(names) or None


def _reason(error: Mapping[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "is not a known field"
    if error["type"] == "missing":
        is_model = _field(error["loc"]) == "model"
        return "is missing" + is_model * "; /v1/models says which one is served"
    return str(error["msg"]).removeprefix("Value error, ")


def _named_field(message: str) -> str | None:
    """The field that a ValueError of the engine begins with: `name=value: rule`."""
    found = re.match(r"([a-z_]+)=", message)
    name = found.group(1) if found else None
    return f"warmstate.{name}" if name in WarmstateOptions.model_fields else name
