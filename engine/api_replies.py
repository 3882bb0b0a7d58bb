"""What clients get back: OpenAI's shapes, with our facts under `warmstate`."""

from typing import Literal

from pydantic import BaseModel, Field

from engine.output import EngineStats, RequestOutput
from engine.request_log import RequestRecord


def _is_none(value: object) -> bool:
    return value is None


FinishReason = Literal["stop", "length"]


class Facts(BaseModel):
    """How a request met the cache; of several answers in one body, the first one.

    boundary: the token count of the checkpoint it resumed from, 0 if none.
    miss_reason: why nothing was reused. limit_reason: why nothing later was.
    exact: its bits are those of a cold run. ttft_ms: from the queue to the first token.
    """

    request_id: str
    boundary: int
    miss_reason: str | None
    limit_reason: str | None
    exact: bool
    ttft_ms: float | None

    @classmethod
    def of(cls, output: RequestOutput) -> "Facts":
        return cls(
            request_id=output.request_id,
            boundary=output.boundary,
            miss_reason=output.miss_reason,
            limit_reason=output.limit_reason,
            exact=output.exact,
            ttft_ms=output.ttft_ms,
        )


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    """Tokens of all prompts, each counted once, and of all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """Of every new token; one without text of its own is spelt `bytes:\\x..`."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Reply(BaseModel):
    """The fields of every reply. usage and warmstate are left out where they don't belong."""

    id: str
    created: int
    model: str
    usage: Usage | None = Field(default=None, exclude_if=_is_none)
    warmstate: Facts | None = Field(default=None, exclude_if=_is_none)


class Completion(Reply):
    """A whole reply, or one event of a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Reply):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = Field(default=None, exclude_if=_is_none)
    content: str | None = Field(default=None, exclude_if=_is_none)


class ChatDeltaChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(Reply):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatDeltaChoice]


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """Every error, on every route."""

    error: Error


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "warmstate"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Stats(BaseModel):
    """What the page shows. hit_rate: of the requests whose prompt was computed; null before one."""

    model: str
    uptime_seconds: float
    engine: EngineStats
    hit_rate: float | None
    recent: list[RequestRecord]
