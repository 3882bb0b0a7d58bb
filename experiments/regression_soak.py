"""What do the clients of the soak do? Proper requests of every kind, and improper ones."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import openai
from openai import AsyncOpenAI

from engine.tokenizer import Tokenizer
from experiments.recall_documents import Document, user_turn
from experiments.recall_workload import fitting_document
from experiments.regression_clients import chat_turns, new_client, read_stream
from experiments.regression_server import ServerProcess

DOCUMENTS = 6
LONG_ANSWER = 96  # tokens
SHORT_ANSWER = 16
SALTS = ("", "", "red", "blue")
KINDS = {
    "plain": 10, "loose": 2, "choices": 2, "stop": 1, "sampled": 1, "close": 3, "hang up": 2,
    "refused": 2,
}  # fmt: skip
STOP = " lives"
MOST_FAILURES = 20  # are told

Spelt = tuple[str, tuple[str, ...]]  # an answer's text and its tokens


@dataclass(frozen=True)
class Prompt:
    """A chat up to its next answer, or a completion's prompt alone; and how long the answer is."""

    chat: bool
    messages: tuple[str, ...]
    max_tokens: int
    ignore_eos: bool


def make_catalog(tokenizer: Tokenizer, rng: random.Random, number: int) -> list[Prompt]:
    """Prompts on documents that are asked about often, that begin alike, or that are new."""
    documents = [
        fitting_document(tokenizer, f"soak {i}", max_tokens=rng.randrange(200, 1400))
        for i in range(DOCUMENTS)
    ]
    return [_prompt(tokenizer, rng, documents, i) for i in range(number)]


def _prompt(
    tokenizer: Tokenizer, rng: random.Random, documents: Sequence[Document], number: int
) -> Prompt:
    document = rng.choice(documents)
    fact, *others = rng.sample(document.facts, min(3, len(document.facts)))
    long = rng.random() < 0.3
    max_tokens = LONG_ANSWER if long else SHORT_ANSWER
    text = f"{document.text} {fact.question}"
    kind = rng.choice(("shared", "talk", "branch", "own"))
    if kind == "talk":
        messages = [text]
        for other in others:
            messages += [fact.sentence, other.question]
            fact = other
        return Prompt(True, tuple(messages), max_tokens, long)
    if kind == "branch":
        more = fitting_document(tokenizer, f"soak tail {number}", max_tokens=150)
        text = f"{document.text} {more.text} {more.facts[0].question}"
    elif kind == "own":
        own = fitting_document(tokenizer, f"soak own {number}", max_tokens=rng.randrange(70, 900))
        text = f"{own.text} {own.facts[0].question}"
    chat = kind == "shared"
    return Prompt(chat, (text if chat else user_turn(text),), max_tokens, long)


def reference_answers(catalog: Sequence[Prompt], threads: int) -> tuple[list[Spelt], list[str]]:
    """Of a server without caching, one after another; and what is wrong about how it ended."""

    async def ask_all(server: ServerProcess) -> list[Spelt]:
        async with new_client(server.url) as client:
            whole = [await create(client, server.model, p, stream=False) for p in catalog]
            return [spelt(reply.choices[0]) for reply in whole]

    options = ("--no-enable-prefix-caching", "--no-idle-prefill")
    with ServerProcess(*options, threads=threads) as server:
        return asyncio.run(ask_all(server)), server.stop()


async def create(
    client: AsyncOpenAI,
    model: str,
    prompt: Prompt,
    *,
    stream: bool,
    warmstate: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """One request, greedy unless `fields` say otherwise: a reply or a stream."""
    extra = {"ignore_eos": prompt.ignore_eos, "warmstate": warmstate or {}}
    common: dict[str, Any] = {
        "model": model,
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "stream": stream,
        "extra_body": extra,
    }
    if stream:
        common["stream_options"] = {"include_usage": True}
    if prompt.chat:
        turns = chat_turns(prompt.messages)
        return await client.chat.completions.create(
            messages=turns, logprobs=True, **common | fields
        )
    [text] = prompt.messages
    return await client.completions.create(prompt=text, logprobs=0, **common | fields)


def spelt(choice: Any) -> Spelt:
    """Text and tokens of a whole answer."""
    if hasattr(choice, "message"):
        tokens = tuple(each.token for each in choice.logprobs.content)
        return choice.message.content or "", tokens
    return choice.text, tuple(choice.logprobs.tokens)


@dataclass
class Soak:
    """The clients, what they count and what they find wrong. url, model: of the server."""

    catalog: Sequence[Prompt]
    references: Sequence[Spelt]
    seed: int
    url: str = ""
    model: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    async def client(self, number: int, deadline: float) -> None:
        """One after another until the time is over; what is drawn follows from the seed."""
        rng = random.Random(f"client {self.seed} {number}")
        loop = asyncio.get_running_loop()
        async with new_client(self.url) as client:
            while loop.time() < deadline and len(self.failures) < MOST_FAILURES:
                [kind] = rng.choices(list(KINDS), list(KINDS.values()))
                index = rng.randrange(len(self.catalog))
                try:
                    await self._act(client, rng, kind, index)
                except openai.RateLimitError:
                    self.counts["queue full"] += 1
                    await asyncio.sleep(0.05)
                except (openai.OpenAIError, OSError, RuntimeError) as error:
                    self.failures.append(f"{kind}, prompt {index}: {error!r}")

    async def _act(self, client: AsyncOpenAI, rng: random.Random, kind: str, index: int) -> None:
        prompt = self.catalog[index]
        settings: dict[str, Any] = {"cache_salt": rng.choice(SALTS)}
        if kind == "hang up":
            return await self._hang_up(rng, prompt)
        if kind == "refused":
            return await self._refused(rng, prompt)
        if kind == "close":
            stream = await create(client, self.model, prompt, stream=True, warmstate=settings)
            await self._close_early(stream, rng.randrange(6))
        elif kind == "plain":
            start = time.perf_counter()
            stream = await create(client, self.model, prompt, stream=True, warmstate=settings)
            answer = await read_stream(stream, start)
            self._compare(index, (answer.text, answer.tokens), self.references[index])
        elif kind == "loose":
            settings["exact"] = False
            await create(client, self.model, prompt, stream=False, warmstate=settings)
            self.counts["answered"] += 1
        else:
            fields = _fields(kind, rng)
            reply = await create(
                client, self.model, prompt, stream=False, warmstate=settings, **fields
            )
            self._check_reply(kind, index, reply)

    def _check_reply(self, kind: str, index: int, reply: Any) -> None:
        if kind == "sampled":
            self.counts["answered"] += 1
        elif kind == "stop":
            text, tokens = self.references[index]
            answer = spelt(reply.choices[0])
            self._compare(index, answer, (text.split(STOP)[0], tokens[: len(answer[1])]))
        else:
            for choice in reply.choices:
                self._compare(index, spelt(choice), self.references[index])

    def _compare(self, index: int, answer: Spelt, wanted: Spelt) -> None:
        self.counts["answered"] += 1
        self.counts["compared"] += 1
        if answer != wanted:
            self.failures.append(f"prompt {index}: {answer}, not {wanted}")

    async def _close_early(self, stream: Any, events: int) -> None:
        async for _ in stream:
            events -= 1
            if events < 0:
                break
        await stream.close()
        self.counts["closed"] += 1

    async def _hang_up(self, rng: random.Random, prompt: Prompt) -> None:
        """In the middle of the request, right after it, or a little later."""
        request = self._raw(prompt, {"stream": rng.random() < 0.5})
        whole = rng.random() < 0.7
        _, writer = await self._connect()
        writer.write(request if whole else request[: rng.randrange(len(request))])
        await writer.drain()
        await asyncio.sleep(rng.choice((0, 0.01, 0.1)))
        writer.transport.abort()
        self.counts["hung up"] += 1

    async def _refused(self, rng: random.Random, prompt: Prompt) -> None:
        """Something that has to be answered with 400, or with 429 before it is read in full."""
        wrong = ({"temperature": -1}, {"colour": "red"}, {"max_tokens": 10**6}, {"n": "two"}, None)
        request = self._raw(prompt, rng.choice(wrong))
        reader, writer = await self._connect()
        writer.write(request)
        status = await asyncio.wait_for(reader.readline(), 120)
        writer.transport.abort()
        code = status.split()[1].decode() if status.split()[1:] else "no"
        self.counts["queue full" if code == "429" else "refused"] += 1
        if code not in ("400", "429"):
            self.failures.append(f"a request that must be refused got status {code}")

    def _raw(self, prompt: Prompt, more: dict[str, Any] | None) -> bytes:
        """Bytes of a request; more: fields beside the right ones, None: no JSON at all."""
        body = {"model": self.model, "max_tokens": prompt.max_tokens}
        if prompt.chat:
            body["messages"] = chat_turns(prompt.messages)
        else:
            body["prompt"] = prompt.messages[0]
        content = b"{" if more is None else json.dumps(body | more).encode()
        path = "/v1/chat/completions" if prompt.chat else "/v1/completions"
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {urlsplit(self.url).netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        place = urlsplit(self.url)
        return await asyncio.open_connection(place.hostname, place.port)


def _fields(kind: str, rng: random.Random) -> dict[str, Any]:
    if kind == "choices":
        return {"n": rng.randrange(2, 4)}
    if kind == "stop":
        return {"stop": [STOP]}
    return {"temperature": 0.8, "seed": rng.randrange(1000)}
