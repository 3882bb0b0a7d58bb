"""What do the clients of the regression ask? Four workloads of documents and questions.

shared-prefix: one document, many questions. multi-turn: conversations, the whole history sent
again with the answers that came. branching: documents that begin alike and end differently.
no-reuse: nothing is alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from engine.tokenizer import Tokenizer
from experiments.recall_documents import Fact, answer_turn, user_turn
from experiments.recall_workload import fitting_document, spread_facts
from experiments.regression_expected import STRIDE

SHARED, TALKS, BRANCHES, OWN = "shared-prefix", "multi-turn", "branching", "no-reuse"
STAGGER = 11  # tokens, modulo a stride: conversations lie differently on the grid
PRIMING = 2  # prompts of a prefix after which the third finds all of it saved


@dataclass(frozen=True)
class Sizes:
    """How much of everything: requests that are timed, and tokens."""

    document_tokens: int
    questions: int
    talks: int
    turns: int
    heads: int
    tails: int
    tail_tokens: int
    own_documents: int


@dataclass(frozen=True)
class Request:
    """A user's message (of a completion: the whole prompt). after: the turn it follows."""

    name: str
    text: str
    after: str | None = None


@dataclass(frozen=True)
class Workload:
    """Requests. priming: asked first, in order, untimed. lanes: each asked in its own order."""

    name: str
    chat: bool
    priming: tuple[Request, ...]
    lanes: tuple[tuple[Request, ...], ...]

    @property
    def timed(self) -> list[Request]:
        """In the order of a single client: of each lane its first, of each its second, ..."""
        longest = max(map(len, self.lanes))
        return [lane[i] for i in range(longest) for lane in self.lanes if i < len(lane)]

    @property
    def by_name(self) -> dict[str, Request]:
        return {request.name: request for request in (*self.priming, *self.timed)}


def history(workload: Workload, request: Request, answers: Mapping[str, str]) -> list[str]:
    """User's message, answer, user's message, ..., up to this request's own message."""
    if request.after is None:
        return [request.text]
    before = workload.by_name[request.after]
    return [*history(workload, before, answers), answers[before.name], request.text]


def prompt_text(workload: Workload, request: Request, answers: Mapping[str, str]) -> str:
    """The prompt as the model reads it: for a chat, what the built-in model's template writes."""
    if not workload.chat:
        return request.text
    turns = history(workload, request, answers)
    texts = [
        answer_turn(text.strip()) if i % 2 else user_turn(text.strip())
        for i, text in enumerate(turns)
    ]
    return "".join(texts)


def make_workloads(tokenizer: Tokenizer, sizes: Sizes) -> list[Workload]:
    """All four."""
    return [
        shared_prefix(tokenizer, sizes),
        conversations(tokenizer, sizes),
        branching(tokenizer, sizes),
        no_reuse(tokenizer, sizes),
    ]


def shared_prefix(tokenizer: Tokenizer, sizes: Sizes) -> Workload:
    """Chats that ask about one document."""
    text, facts = _document(tokenizer, "shared", sizes.document_tokens, PRIMING + sizes.questions)
    asked = [
        Request(f"question {i}", f"{text} {fact.question}") for i, fact in enumerate(facts, start=1)
    ]
    return Workload(
        SHARED, True, tuple(asked[:PRIMING]), tuple((each,) for each in asked[PRIMING:])
    )


def conversations(tokenizer: Tokenizer, sizes: Sizes, *, seed: str = "talk") -> Workload:
    """Chats that go on. The first turn of each brings a document and is priming."""
    firsts, lanes = [], []
    for talk in range(1, sizes.talks + 1):
        length = sizes.document_tokens - STAGGER * talk % STRIDE
        text, facts = _document(tokenizer, f"{seed} {talk}", length, sizes.turns + 1)
        name = partial("talk {} turn {}".format, talk)
        firsts.append(Request(name(1), f"{text} {facts[0].question}"))
        lanes.append(
            tuple(
                Request(name(turn), fact.question, after=name(turn - 1))
                for turn, fact in enumerate(facts[1:], start=2)
            )
        )
    return Workload(TALKS, True, tuple(firsts), tuple(lanes))


def branching(tokenizer: Tokenizer, sizes: Sizes) -> Workload:
    """Completions of documents with a common head; tails, and the questions on them, differ."""
    priming, lanes = [], []
    head_tokens = sizes.document_tokens - sizes.tail_tokens
    for head in range(1, sizes.heads + 1):
        text, _ = _document(tokenizer, f"head {head}", head_tokens, 1)
        for tail in range(1, PRIMING + sizes.tails + 1):
            seed = f"tail {head} {tail}"
            more, (fact,) = _document(tokenizer, seed, sizes.tail_tokens, 1)
            request = Request(
                f"head {head} tail {tail}", user_turn(f"{text} {more} {fact.question}")
            )
            if tail <= PRIMING:
                priming.append(request)
            else:
                lanes.append((request,))
    return Workload(BRANCHES, False, tuple(priming), tuple(lanes))


def no_reuse(tokenizer: Tokenizer, sizes: Sizes) -> Workload:
    """Completions about a document each."""
    lanes = []
    for number in range(1, sizes.own_documents + 1):
        text, (fact,) = _document(tokenizer, f"own {number}", sizes.document_tokens, 1)
        lanes.append((Request(f"own {number}", user_turn(f"{text} {fact.question}")),))
    return Workload(OWN, False, (), tuple(lanes))


def _document(
    tokenizer: Tokenizer, seed: str, max_tokens: int, num_questions: int
) -> tuple[str, list[Fact]]:
    """A document's text, and facts to ask for."""
    document = fitting_document(tokenizer, f"regression {seed}", max_tokens=max_tokens)
    return document.text, spread_facts(document, num_questions)
