"""What the OpenAPI document says beyond what FastAPI finds out itself."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from engine.api_replies import ErrorReply

_REASONS = {
    400: "Refused: malformed, an unknown or unsupported field, or a prompt that can't be served",
    404: "There is no such thing",
    413: "The body is too large",
    429: "Too many requests are unfinished; Retry-After says when to try again",
    500: "The engine failed while it computed this request",
    503: "The server is shutting down, or its engine has failed",
}

Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int) -> Responses:
    """The errors of a route."""
    return {status: {"model": ErrorReply, "description": _REASONS[status]} for status in statuses}


def body_of(kind: str, description: str) -> Responses:
    """A successful answer of a media type that is not JSON."""
    content = {kind: {"schema": {"type": "string"}}}
    return {200: {"content": content, "description": description}}


def openapi_of(app: FastAPI) -> dict[str, Any]:
    """The app's document without FastAPI's 422: wrong requests are answered with 400."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        app.openapi_schema = document
    return app.openapi_schema
