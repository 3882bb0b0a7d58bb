"""How does a client see an answer? Requests by the openai package, in streams, one or many."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from openai import AsyncOpenAI

from experiments.regression_workloads import Request, Workload, history

MAX_TOKENS = 16
TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Answer:
    """One answer and what came with it. ttft_ms: from asking to its first text, or its end."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    boundary: int
    limit_reason: str | None
    ttft_ms: float


@dataclass
class Phase:
    """One pass through a workload, answers in the order they ended. seconds: without priming."""

    answers: dict[str, Answer] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def texts(self) -> dict[str, str]:
        return {name: answer.text for name, answer in self.answers.items()}


def new_client(url: str) -> AsyncOpenAI:
    """One that never asks twice."""
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_SECONDS)


async def ask(
    client: AsyncOpenAI, model: str, messages: list[str], *, chat: bool, **settings: Any
) -> Answer:
    """Ask greedily for a few tokens and read the stream. settings: those under `warmstate`."""
    common: dict[str, Any] = {
        "model": model,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"warmstate": settings},
    }
    start = time.perf_counter()
    if chat:
        turns = chat_turns(messages)
        stream = await client.chat.completions.create(messages=turns, logprobs=True, **common)
    else:
        [prompt] = messages
        stream = await client.completions.create(prompt=prompt, logprobs=0, **common)
    return await read_stream(stream, start)


def chat_turns(messages: Iterable[str]) -> Any:
    """User's message, answer, user's message, ... as OpenAI writes them."""
    roles = zip(cycle(("user", "assistant")), messages)
    return [{"role": role, "content": text} for role, text in roles]


async def read_stream(stream: Any, start: float) -> Answer:
    """The one answer of a stream that was asked for at `start`. RuntimeError if it ends early."""
    text, tokens, logprobs, ttft = "", [], [], 0.0
    reason: Any = None
    facts: Any = None
    usage: Any = None
    async for event in stream:
        usage = event.usage or usage
        facts = (event.model_extra or {}).get("warmstate") or facts
        for choice in event.choices:
            new = choice.text if hasattr(choice, "text") else choice.delta.content
            if not ttft and (new or choice.finish_reason):
                ttft = time.perf_counter() - start
            text += new or ""
            reason = choice.finish_reason or reason
            for token, value in _spelt(choice.logprobs):
                tokens.append(token)
                logprobs.append(value)
    if None in (reason, facts, usage):
        raise RuntimeError(f"a stream ended early, after {text!r}")
    return Answer(
        text=text,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        finish_reason=reason,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens,
        boundary=facts["boundary"],
        limit_reason=facts["limit_reason"],
        ttft_ms=1e3 * ttft,
    )


def _spelt(logprobs: Any) -> Iterable[tuple[str, float]]:
    """(token, log-probability) in either of OpenAI's shapes."""
    if logprobs is None:
        return []
    if hasattr(logprobs, "content"):
        return [(each.token, each.logprob) for each in logprobs.content]
    return zip(logprobs.tokens, logprobs.token_logprobs, strict=True)


async def run_phase(
    url: str,
    model: str,
    workload: Workload,
    *,
    clients: int,
    salt: str,
    exact: bool = True,
    think_seconds: float = 0.0,
) -> Phase:
    """The priming, then all lanes by so many clients. Only what has the same salt is reused.

    think_seconds: before each request.
    """
    phase = Phase()

    async with new_client(url) as client:

        async def serve(lane: Iterable[Request]) -> None:
            for request in lane:
                await asyncio.sleep(think_seconds)
                messages = history(workload, request, phase.texts)
                phase.answers[request.name] = await ask(
                    client, model, messages, chat=workload.chat, cache_salt=salt, exact=exact
                )

        await serve(workload.priming)
        start = time.perf_counter()
        if clients == 1:
            await serve(workload.timed)
        else:
            lanes = iter(workload.lanes)  # shared: whoever is free takes the next one

            async def work() -> None:
                for lane in lanes:
                    await serve(lane)

            async with asyncio.TaskGroup() as group:
                for _ in range(clients):
                    group.create_task(work())
        phase.seconds = time.perf_counter() - start
    return phase
