"""What clients send: OpenAI's fields, each of them checked, and a few of our own.

A field that is known to OpenAI but has no effect here is accepted at the value that means "no
effect"; any other value, and any unknown field, is refused by name.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import core_schema

from engine.requests import as_batch
from engine.sampling_params import MAX_STOP_CHARACTERS, MAX_STOPS, SamplingParams


class Neutral:
    """Marks an option that has no effect: null, or one of these JSON values, is all it may be."""

    def __init__(self, *values: object) -> None:
        self.allowed = [*values, None]

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": self.allowed}

    def _check(self, value: object) -> object:
        if value not in self.allowed:
            raise ValueError("is not supported; leave it out")
        return value


MAX_INT64 = (1 << 63) - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_INT64)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
Prompt = Text | TokenIds | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
Prompts = Prompt | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stops = Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]
Positive = Annotated[int, Field(ge=1, le=MAX_INT64)]


class _Strict(BaseModel):
    """No unknown field, no "5" for 5, no infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class WarmstateOptions(_Strict):
    """Settings that OpenAI's interface has no field for.

    cache_salt: requests share cached prefixes only with those of the same salt.
    exact: only reuse what gives the bits of a cold run; false: what decode steps wrote as well.
    """

    cache_salt: str = ""
    exact: bool = True


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: the usage so far in every event
    include_obfuscation: Annotated[Any, Neutral(False)] = None


class GenerationRequest(_Strict):
    """What both kinds of request have in common."""

    model: str
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=1e30)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_INT64 - 128)] | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    warmstate: WarmstateOptions = Field(default_factory=WarmstateOptions)

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    frequency_penalty: Annotated[Any, Neutral(0)] = None
    presence_penalty: Annotated[Any, Neutral(0)] = None
    logit_bias: Annotated[Any, Neutral({})] = None
    service_tier: Annotated[Any, Neutral("auto", "default")] = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream=true")
        return self

    @property
    def num_answers(self) -> int:
        """How many are asked for."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats)

    def sampling(self, choice: int, *, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """The engine's settings of one of the n choices; ValueError if they don't go together."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=None if self.seed is None else self.seed + choice,
            max_tokens=max_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. max_tokens is 16 unless given."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[Any, Neutral(1)] = None
    echo: Annotated[Any, Neutral(False)] = None
    suffix: Annotated[Any, Neutral("")] = None

    @property
    def num_answers(self) -> int:
        """n for each prompt."""
        return len(as_batch(self.prompt)) * (self.n or 1)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


def _only_text(content: object) -> object:
    """ValueError for a part that is no text; anything else is left to the types."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text":
            raise ValueError(f"only parts of type 'text' are supported, not {kind!r:.40}")
    return content


class Message(_Strict):
    """One message of a conversation; only text can be sent."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[TextPart] | None, BeforeValidator(_only_text)] = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: Annotated[Any, Neutral()] = None
    annotations: Annotated[Any, Neutral([])] = None
    audio: Annotated[Any, Neutral()] = None
    function_call: Annotated[Any, Neutral()] = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it: text in one piece, nothing that was left out."""
        message: dict[str, Any] = self.model_dump(exclude_none=True, exclude={"annotations"})
        if isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content)
        return message


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions. Without a limit the answer may take all the room there is.

    tools go to the chat template; calls in the answer are not parsed.
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None

    tool_choice: Annotated[Any, Neutral("auto", "none")] = None
    parallel_tool_calls: Annotated[Any, Neutral(True)] = None
    response_format: Annotated[Any, Neutral({"type": "text"})] = None
    modalities: Annotated[Any, Neutral(["text"])] = None
    audio: Annotated[Any, Neutral()] = None
    prediction: Annotated[Any, Neutral()] = None
    functions: Annotated[Any, Neutral([])] = None
    function_call: Annotated[Any, Neutral("auto", "none")] = None
    reasoning_effort: Annotated[Any, Neutral()] = None
    verbosity: Annotated[Any, Neutral("medium")] = None
    web_search_options: Annotated[Any, Neutral()] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("give max_completion_tokens or max_tokens, not both")
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens asked for, under either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell; None: no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None
