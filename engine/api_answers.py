"""From the engine's outputs to OpenAI's replies, whole or event by event."""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from engine.api_logprobs import LogprobWriter
from engine.api_replies import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatDeltaChoice,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    Facts,
    FinishReason,
    PromptTokensDetails,
    Reply,
    Usage,
)
from engine.output import RequestOutput
from engine.tokenizer import Tokenizer


@dataclass
class _Told:
    """How much of one choice has been sent."""

    logprobs: LogprobWriter
    characters: int = 0
    tokens: int = 0


class Answers(ABC):
    """The choices of one HTTP request: prompts times n, in the order of their jobs."""

    def __init__(self, reply_id: str, model: str, tokenizer: Tokenizer | None, *, n: int) -> None:
        self.id, self.model, self.n = reply_id, model, n
        self.created = int(time.time())
        self.outputs: dict[int, RequestOutput] = {}
        self._tokenizer = tokenizer
        self._told: dict[int, _Told] = {}

    def take(self, index: int, output: RequestOutput) -> None:
        """Note a choice's latest state."""
        self.outputs[index] = output

    @abstractmethod
    def whole(self) -> Reply:
        """All choices, ended, in one body."""

    @abstractmethod
    def event(self, index: int) -> Reply | None:
        """What is new of a choice since its last event; None if that is nothing."""

    def opening(self, index: int) -> Reply | None:
        """What comes before the first event of a choice."""
        return None

    @abstractmethod
    def usage_event(self) -> Reply:
        """The last event of a stream that was to include the usage."""

    def events(self, index: int, output: RequestOutput) -> list[Reply]:
        """Note a choice's latest state; the events that tell it."""
        opening = self.opening(index) if index not in self._told else None
        self.take(index, output)
        return [event for event in (opening, self.event(index)) if event is not None]

    def usage(self) -> Usage:
        """Each prompt counts once, with what its first choice found in the cache."""
        firsts = [output for index, output in self.outputs.items() if index % self.n == 0]
        prompt = sum(len(output.prompt_token_ids) for output in firsts)
        new = sum(len(output.token_ids) for output in self.outputs.values())
        cached = sum(output.num_cached_tokens for output in firsts)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=new,
            total_tokens=prompt + new,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    def _told_of(self, index: int) -> _Told:
        return self._told.setdefault(index, _Told(LogprobWriter(self._tokenizer)))

    def _new_text(self, index: int) -> str | None:
        """The text to send now; None when there is no reason for an event."""
        output, told = self.outputs[index], self._told_of(index)
        text = output.text[told.characters :]
        told.characters += len(text)
        has_logprobs = output.logprobs is not None and len(output.token_ids) > told.tokens
        return text if text or output.finished or has_logprobs else None

    def _new_tokens(self, index: int) -> tuple[LogprobWriter, list[int], list[dict[int, float]]]:
        """The tokens to tell the log-probabilities of now, and these."""
        output, told = self.outputs[index], self._told_of(index)
        start, told.tokens = told.tokens, len(output.token_ids)
        return told.logprobs, output.token_ids[start:], (output.logprobs or [])[start:]

    def _facts(self, index: int) -> Facts | None:
        output = self.outputs[index]
        return Facts.of(output) if output.finished else None


class CompletionAnswers(Answers):
    """Replies of /v1/completions."""

    def whole(self) -> Completion:
        choices = [self._choice(index) for index in sorted(self.outputs)]
        return self._reply(choices, usage=self.usage(), warmstate=self._facts(0))

    def event(self, index: int) -> Completion | None:
        text = self._new_text(index)
        if text is None:
            return None
        return self._reply([self._choice(index, text)], warmstate=self._facts(index))

    def usage_event(self) -> Completion:
        return self._reply([], usage=self.usage())

    def _choice(self, index: int, text: str | None = None) -> CompletionChoice:
        output = self.outputs[index]
        writer, token_ids, logprobs = self._new_tokens(index)
        return CompletionChoice(
            index=index,
            text=output.text if text is None else text,
            logprobs=None if output.logprobs is None else writer.completion(token_ids, logprobs),
            finish_reason=_reason(output),
        )

    def _reply(
        self,
        choices: list[CompletionChoice],
        usage: Usage | None = None,
        warmstate: Facts | None = None,
    ) -> Completion:
        return Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            warmstate=warmstate,
        )


class ChatAnswers(Answers):
    """Replies of /v1/chat/completions, with the top_logprobs likeliest tokens where asked for."""

    def __init__(
        self,
        reply_id: str,
        model: str,
        tokenizer: Tokenizer | None,
        *,
        n: int,
        top_logprobs: int = 0,
    ) -> None:
        super().__init__(reply_id, model, tokenizer, n=n)
        self._top_logprobs = top_logprobs

    def whole(self) -> ChatCompletion:
        choices = []
        for index, output in sorted(self.outputs.items()):
            reason = _reason(output)
            assert reason is not None, "the answer has not ended"
            choices.append(
                ChatChoice(
                    index=index,
                    message=ChatMessage(content=output.text),
                    logprobs=self._chat_logprobs(index),
                    finish_reason=reason,
                )
            )
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.usage(),
            warmstate=self._facts(0),
        )

    def opening(self, index: int) -> ChatCompletionChunk:
        delta = ChatDelta(role="assistant", content="")
        choice = ChatDeltaChoice(index=index, delta=delta, logprobs=None, finish_reason=None)
        return self._chunk([choice])

    def event(self, index: int) -> ChatCompletionChunk | None:
        text, output = self._new_text(index), self.outputs[index]
        if text is None:
            return None
        choice = ChatDeltaChoice(
            index=index,
            delta=ChatDelta(content=text or None),
            logprobs=self._chat_logprobs(index),
            finish_reason=_reason(output),
        )
        return self._chunk([choice], warmstate=self._facts(index))

    def usage_event(self) -> ChatCompletionChunk:
        return self._chunk([], usage=self.usage())

    def _chat_logprobs(self, index: int) -> ChatLogprobs | None:
        writer, token_ids, logprobs = self._new_tokens(index)
        if self.outputs[index].logprobs is None:
            return None
        return writer.chat(token_ids, logprobs, count=self._top_logprobs)

    def _chunk(
        self,
        choices: list[ChatDeltaChoice],
        usage: Usage | None = None,
        warmstate: Facts | None = None,
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            warmstate=warmstate,
        )


def _reason(output: RequestOutput) -> FinishReason | None:
    """Answers that end otherwise are errors and never get here."""
    match output.finish_reason:
        case "stop":
            return "stop"
        case "length":
            return "length"
    assert output.finish_reason is None, output.finish_reason
    return None
