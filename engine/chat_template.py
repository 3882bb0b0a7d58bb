"""A conversation as prompt text, and how much of a prompt the next turn will start with.

Templates rewrite history: many drop the reasoning of earlier turns, so the next prompt may leave
this one before its end. Where it does is found by rendering next turns that don't exist yet.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.tokenizer import Tokenizer

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]] | None

_SPECIAL_TOKENS = [f"{n}_token" for n in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
_OPENING_ROLES = ("system", "developer")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# What somebody may write next. A word merges with a space before it, a newline with a newline, a
# sign with a sign: what all three leave alone is safe from the text that really comes.
_DUMMIES = ("What", "\n\n(", "(-")


class ChatTemplate:
    """A compiled Jinja chat template; it runs sandboxed and can't change what it is given."""

    def __init__(self, sources: dict[str, str], variables: dict[str, str] | None = None) -> None:
        """Compile templates by name: "default", and "tool_use" for prompts with tools if there.

        variables: what templates see besides the conversation, such as `eos_token`. Raises
        ValueError if "default" is missing or a template doesn't compile.
        """
        if "default" not in sources:
            raise ValueError(f"chat templates are {sorted(sources)}; expected one named 'default'")
        compiled = _environment().from_string
        try:
            self._templates = {name: compiled(source) for name, source in sources.items()}
        except Exception as error:  # also a SyntaxError of the Python it makes, a RecursionError
            raise ValueError(f"chat template doesn't compile: {error}") from error
        self._variables = variables or {}

    @classmethod
    def from_directory(cls, path: str | Path) -> "ChatTemplate | None":
        """The template of a model directory, or None where it has none.

        `chat_template.jinja` comes before `chat_template` of `tokenizer_config.json`, which is one
        template or a list of {"name", "template"}. Raises ValueError, with the file's name, for
        one that can't be read or compiled.
        """
        file, jinja = Path(path) / "tokenizer_config.json", Path(path) / "chat_template.jinja"
        try:
            config = json.loads(file.read_text("utf-8")) if file.is_file() else {}
            if not isinstance(config, dict):
                raise ValueError(f"holds a {type(config).__name__}; expected an object")
            tokens = {name: config.get(name) for name in _SPECIAL_TOKENS}
            texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in tokens.items()}
            sources = config.get("chat_template")
            if jinja.is_file():
                file, sources = jinja, jinja.read_text("utf-8")
            if sources is None:
                return None
            if isinstance(sources, str):
                sources = {"default": sources}
            else:
                sources = {entry["name"]: entry["template"] for entry in sources}
            return cls(sources, {k: v for k, v in texts.items() if v is not None})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{file}: {error}") from error

    def render(
        self, messages: Messages, *, tools: Tools = None, add_generation_prompt: bool = True
    ) -> str:
        """Prompt text of a conversation of JSON values, as Hugging Face's `apply_chat_template`.

        Nothing given is changed. A content that is a list of parts goes to the template as it is:
        whether it can read one is its own matter. Raises ValueError with the template's message
        where it refuses, and for messages that are none.
        """
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        try:
            return self._templates[name].render(
                self._variables,
                messages=_readable(messages),
                tools=json.loads(json.dumps(tools)),
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, ValueError) as error:
            raise ValueError(str(error)) from error
        except Exception as error:  # a template is code of its own: TypeError, KeyError, ...
            raise ValueError(f"chat template: {type(error).__name__}: {error}") from error


def reusable_points(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Messages,
    prompt_token_ids: list[int],
    tools: Tools = None,
) -> list[int]:
    """Numbers of first tokens of this prompt that another prompt will start with, ascending.

    One for an answer and a next user turn, one for a tool call and its result, one for another
    conversation with the same system message and tools, where the template renders them; equal ones
    once, and no 0. prompt_token_ids: the encoded `template.render(messages, tools=tools)`. Costs
    ten renderings; only the ends of long ones are tokenised, and an opening once.
    """
    this = template.render(messages, tools=tools), prompt_token_ids
    opening = list(takewhile(lambda message: message.get("role") in _OPENING_ROLES, messages))
    starts = [(messages, _user_turn, this), (messages, _tool_turn, this)]
    if opening or tools:
        starts.append((opening, _first_turn, ("", [])))
    points = set()
    for start, turn, known in starts:
        conversations = [[*start, *turn(dummy, dummy)] for dummy in _DUMMIES]
        nexts = _encoded(template, tokenizer, conversations, tools, known)
        points.add(min((_common_length(prompt_token_ids, ids) for ids in nexts), default=0))
    return sorted(points - {0})


def next_turn_prefix(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Messages,
    answer_text: str,
    tools: Tools = None,
) -> list[int]:
    """Token ids that the next user turn's prompt starts with once this answer is in its history.

    answer_text: the content that the client will send back. Empty if the template refuses.
    """
    conversations = [[*messages, *_user_turn(answer_text, dummy)] for dummy in _DUMMIES]
    nexts = _encoded(template, tokenizer, conversations, tools, ("", []))
    return nexts[0][: min(_common_length(nexts[0], ids) for ids in nexts)] if nexts else []


def _first_turn(_: str, text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _user_turn(answer: str, text: str) -> Messages:
    return [{"role": "assistant", "content": answer}, {"role": "user", "content": text}]


def _tool_turn(reasoning: str, text: str) -> Messages:
    function = {"name": "f", "arguments": {"a": text}}
    call = {"id": "call00000", "type": "function", "function": function}  # some want 9 letters
    asked = {"role": "assistant", "content": "", "reasoning_content": reasoning}
    result = {"role": "tool", "tool_call_id": call["id"], "name": "f", "content": text}
    return [{**asked, "tool_calls": [call]}, result]


def _encoded(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    conversations: list[list[dict[str, Any]]],
    tools: Tools,
    known: tuple[str, list[int]],
) -> list[list[int]]:
    """Ids of each conversation's prompt; none at all if the template refuses one.

    known: a text and its ids. No token crosses a special one, so what a text shares with it up to
    the last special token is not tokenised again.
    """
    try:
        texts = [template.render(messages, tools=tools) for messages in conversations]
    except ValueError:
        return []
    encoded = []
    for text in texts:
        num_ids, start = _shared(tokenizer, text, *known)
        known = text, known[1][:num_ids] + tokenizer.encode(text[start:])
        encoded.append(known[1])
    return encoded


def _shared(tokenizer: Tokenizer, text: str, known: str, ids: list[int]) -> tuple[int, int]:
    """How many ids, and characters, precede the last special token that both texts have."""
    shared, start = _common_length(text, known), len(known)
    for i in range(len(ids) - 1, -1, -1):
        token = tokenizer.decode([ids[i]])
        if token and not tokenizer.decode([ids[i]], skip_special_tokens=True):
            start = known.rfind(token, 0, start)
            if start < 0:
                break
            if start + len(token) <= shared:
                return i, start
    return 0, 0


def _common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the longest common prefix, by bisection, which compares slices at C's speed."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


class _Generation(Extension):
    """`{% generation %}` marks what a model wrote, for training; here it is a plain block."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # no HTML escapes
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _readable(messages: Messages) -> list[dict[str, Any]]:
    """A copy in the form templates expect, of plain JSON: no object has methods of its own."""
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"messages is {messages!r:.200}; expected one or more objects")
    copies = []
    for message in json.loads(json.dumps(list(messages))):
        copy = {key: value for key, value in message.items() if value is not None}
        for reasoning in [copy[name] for name in _REASONING_FIELDS if name in copy][:1]:
            copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
        copies.append(copy)
    return copies
