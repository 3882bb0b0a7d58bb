"""The HTTP interface: OpenAI's endpoints, the engine's statistics, and one page."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import FileResponse
from prometheus_client import CONTENT_TYPE_LATEST

from engine.api_answers import ChatAnswers, CompletionAnswers
from engine.api_body import StrictRoute
from engine.api_errors import ApiError, api_error, install_error_handlers
from engine.api_openapi import body_of, errors, openapi_of
from engine.api_replies import ChatCompletion, Completion, Health, ModelCard, ModelList, Stats
from engine.api_service import Service
from engine.api_types import ChatRequest, CompletionRequest
from engine.chat_template import ChatTemplate
from engine.engine_loop import EngineStopped
from engine.engine_thread import EngineThread
from engine.llm import LLM
from engine.metrics import Metrics
from engine.request_log import RequestRecord
from engine.request_planner import RequestPlanner

PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}
_GENERATION_ERRORS = errors(400, 404, 413, 429, 500, 503)
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
_STREAM = {"text/event-stream": {"itemSchema": _EVENT}}


def create_app(
    llm: LLM,
    *,
    model: str,
    chat_template: ChatTemplate | None = None,
    max_queued_requests: int = 256,
    max_body_bytes: int = 8 << 20,
    recent_requests: int = 100,
    idle_prefill: bool = True,
) -> FastAPI:
    """The server's app; from its start to its end the engine belongs to a thread of the app.

    model: the name it is served under. ValueError for limits that allow nothing.
    """
    if max_body_bytes < 1:
        raise ValueError(f"max_body_bytes={max_body_bytes}: must be at least 1")
    metrics = Metrics()
    engine = EngineThread(
        llm,
        max_queued_requests=max_queued_requests,
        recent_requests=recent_requests,
        observer=metrics,
    )
    metrics.watch(lambda: engine.snapshot)
    planner = RequestPlanner(llm, chat_template)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.stop()

    app = FastAPI(
        title="warmstate",
        version="0.1.0",
        description="Prefix caching for hybrid recurrent-state models behind OpenAI's interface.",
        lifespan=lifespan,
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.engine, app.state.max_body_bytes = engine, max_body_bytes
    keeps = llm.config.enable_prefix_caching  # else there is nobody to prefill for
    service = Service(engine, planner, idle_prefill=idle_prefill and keeps)
    app.state.service = service
    app.include_router(_generation_routes(service, model))
    app.include_router(_model_routes(model))
    app.include_router(_status_routes(engine, metrics, model))
    install_error_handlers(app)
    app.openapi = partial(openapi_of, app)  # type: ignore[method-assign]
    return app


def _generation_routes(service: Service, model: str) -> APIRouter:
    router = APIRouter(route_class=StrictRoute)
    tokenizer, planner = service.planner.tokenizer, service.planner

    @router.post(
        "/v1/completions",
        response_model=None,
        responses=_GENERATION_ERRORS | {200: {"model": Completion, "content": _STREAM}},
    )
    async def complete(request: Request, body: CompletionRequest) -> Response:
        """Continue one or several prompts. With `stream` the same shape comes as events."""
        _check_model(body.model, model)
        reply_id = f"cmpl-{uuid4().hex}"
        answers = CompletionAnswers(reply_id, model, tokenizer, n=body.n or 1)
        plan = partial(planner.completion_jobs, body, reply_id)
        return await service.respond(request, body, plan, answers)

    @router.post(
        "/v1/chat/completions",
        response_model=None,
        responses=_GENERATION_ERRORS | {200: {"model": ChatCompletion, "content": _STREAM}},
    )
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation. With `stream` it comes as `chat.completion.chunk` events."""
        _check_model(body.model, model)
        reply_id = f"chatcmpl-{uuid4().hex}"
        top = body.top_logprobs or 0
        answers = ChatAnswers(reply_id, model, tokenizer, n=body.n or 1, top_logprobs=top)
        plan = partial(planner.chat_jobs, body, reply_id)
        return await service.respond(request, body, plan, answers)

    return router


def _model_routes(model: str) -> APIRouter:
    router = APIRouter()
    card = ModelCard(id=model, created=int(time.time()))

    @router.get("/v1/models")
    async def models() -> ModelList:
        """The one model that is served."""
        return ModelList(data=[card])

    @router.get("/v1/models/{model_id:path}", responses=errors(404))
    async def model_by_id(model_id: str) -> ModelCard:
        """The model, if it has this name."""
        _check_model(model_id, model)
        return card

    return router


def _status_routes(engine: EngineThread, metrics: Metrics, model: str) -> APIRouter:
    router = APIRouter()
    started = time.monotonic()

    @router.get("/health", responses=errors(503))
    async def health() -> Health:
        """Whether new requests are taken."""
        try:
            engine.check_open()
        except EngineStopped as error:
            raise api_error(error) from None
        return Health()

    @router.get(
        "/metrics", response_class=Response, responses=body_of("text/plain", "For Prometheus")
    )
    async def prometheus() -> Response:
        """The statistics in Prometheus' text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/stats")
    async def stats() -> Stats:
        """The statistics and the requests that ended last, as the page shows them."""
        snapshot = engine.snapshot
        return Stats(
            model=model,
            uptime_seconds=time.monotonic() - started,
            engine=snapshot,
            hit_rate=snapshot.hits / snapshot.queries if snapshot.queries else None,
            recent=engine.recent.newest_first(),
        )

    @router.get("/requests/{request_id}", responses=errors(404))
    async def request_by_id(request_id: str) -> RequestRecord:
        """The facts of one of the requests that ended last."""
        record = engine.recent.find(request_id)
        if record is None:
            raise ApiError(404, f"no request {request_id!r} ended lately", code="not_found")
        return record

    @router.get("/", response_class=FileResponse, responses=body_of("text/html", "The page"))
    async def page() -> FileResponse:
        """A page that shows the statistics as they change."""
        return FileResponse(PAGE, media_type="text/html", headers=PAGE_HEADERS)

    return router


def _check_model(asked: str, served: str) -> None:
    if asked != served:
        raise ApiError(
            404,
            f"the model {asked!r} is not served here; {served!r} is",
            param="model",
            code="model_not_found",
        )
