"""From what a client sent to the jobs that compute it."""

from typing import Any
from uuid import uuid4

from engine.api_types import ChatRequest, CompletionRequest, GenerationRequest
from engine.chat_template import ChatTemplate, next_turn_prefix, reusable_points
from engine.engine_loop import Job
from engine.llm import LLM
from engine.requests import Prompt, as_batch, token_ids_of
from engine.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16  # OpenAI's for completions


class RequestPlanner:
    """Tokenises, renders and checks; slow for long prompts, so call it beside the event loop.

    Takes from the engine only what never changes. Any thread may call it.
    """

    def __init__(self, llm: LLM, template: ChatTemplate | None) -> None:
        self.tokenizer = llm.tokenizer
        self.template = template
        self._vocab_size = llm.model_config.vocab_size
        self._chunk_stride = llm.config.chunk_stride
        pool_tokens = llm.manager.kv.pool.capacity * llm.config.block_size
        self._max_tokens = min(llm.max_model_len, pool_tokens + 1)  # the last is never computed

    def completion_jobs(self, body: CompletionRequest, request_id: str) -> list[Job]:
        """n jobs for each prompt, in order. ValueError for a request that can't be served."""
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        jobs: list[Job] = []
        for prompt in as_batch(body.prompt):
            ids = self._token_ids(prompt)
            jobs += _choices(body, request_id, ids, max_tokens, body.logprobs, first=len(jobs))
        return jobs

    def chat_jobs(self, body: ChatRequest, request_id: str) -> list[Job]:
        """n jobs for the conversation. ValueError, the template's own among them."""
        if self.template is None or self.tokenizer is None:
            raise ValueError("this model has no chat template: use /v1/completions")
        messages = _messages(body)
        ids = self._token_ids(self.template.render(messages, tools=body.tools))
        points = reusable_points(self.template, self.tokenizer, messages, ids, tools=body.tools)
        max_tokens = body.limit or max(1, self._max_tokens - len(ids))
        return _choices(body, request_id, ids, max_tokens, body.num_logprobs, points=tuple(points))

    def _token_ids(self, prompt: Prompt) -> list[int]:
        limit = self._max_tokens - 1  # for one new token
        return token_ids_of(prompt, self.tokenizer, self._vocab_size, max_tokens=limit)

    def next_turn_job(self, body: ChatRequest, answer: str) -> Job | None:
        """A background job that prefills an answer for the turn that may follow it.

        None where not even one stride of it could be kept.
        """
        assert self.template is not None and self.tokenizer is not None
        prefix = next_turn_prefix(
            self.template, self.tokenizer, _messages(body), answer, tools=body.tools
        )
        boundary = len(prefix) // self._chunk_stride * self._chunk_stride
        if not boundary:
            return None
        return Job(
            request_id=f"next-{uuid4().hex}",
            prompt=prefix,
            sampling=SamplingParams(temperature=0.0, max_tokens=1),
            cache_salt=body.warmstate.cache_salt,
            save_points=(boundary,),
        )


def _messages(body: ChatRequest) -> list[dict[str, Any]]:
    return [message.for_template() for message in body.messages]


def _choices(
    body: GenerationRequest,
    request_id: str,
    prompt: list[int],
    max_tokens: int,
    logprobs: int | None,
    *,
    first: int = 0,
    points: tuple[int, ...] = (),
) -> list[Job]:
    """The n jobs of one prompt; all but the first wait until its prompt can be reused."""
    jobs = []
    for choice in range(body.n or 1):
        index = first + choice
        jobs.append(
            Job(
                request_id=f"{request_id}-{index}" if index else request_id,
                prompt=prompt,
                sampling=body.sampling(choice, max_tokens=max_tokens, logprobs=logprobs),
                cache_salt=body.warmstate.cache_salt,
                exact=body.warmstate.exact,
                save_points=points,
                after=first if choice else None,
            )
        )
    return jobs
