"""What does a conversation ask, turn by turn? Prompts that grow, of several users in turn."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from engine import LLM
from experiments.recall_documents import answer_turn, make_document, prompt, user_turn

ORDER_SEED = 1


@dataclass(frozen=True)
class Turn:
    """One request, and what the right answer to it is. `turn` counts from 1."""

    conversation: int
    turn: int
    prompt: list[int]
    answer: str


def conversation_turns(llm: LLM, *, conversations: int, turns: int, sentences: int) -> list[Turn]:
    """In the order they are served: whose turn is next is drawn, seeded."""
    numbers = range(1, conversations + 1)
    talks = {n: iter(_conversation(llm, n, turns=turns, sentences=sentences)) for n in numbers}
    order = [number for number in numbers for _ in range(turns)]
    random.Random(ORDER_SEED).shuffle(order)
    return [next(talks[number]) for number in order]


def _conversation(llm: LLM, number: int, *, turns: int, sentences: int) -> list[Turn]:
    """The answers in it are the right ones, whatever a model says."""
    assert llm.tokenizer is not None
    num_facts = max(turns, sentences // 8)
    document = make_document(number, num_facts=num_facts, num_sentences=sentences)
    asked = [document.facts[turn * num_facts // turns] for turn in range(turns)]
    ids = llm.tokenizer.encode(prompt(document, asked[0]))
    talk = [Turn(number, 1, ids, asked[0].sentence)]
    for turn, (before, fact) in enumerate(pairwise(asked), start=2):
        said = answer_turn(before.sentence) + user_turn(fact.question)
        ids = ids + llm.tokenizer.encode(said)
        talk.append(Turn(number, turn, ids, fact.sentence))
    return talk


def latest_boundaries(turns: Iterable[Turn], chunk_stride: int) -> list[int]:
    """For each turn the last grid boundary below the last token of the prompt before it."""
    ends: dict[int, int] = {}
    latest = []
    for turn in turns:
        latest.append(ends.get(turn.conversation, 0))
        ends[turn.conversation] = (len(turn.prompt) - 1) // chunk_stride * chunk_stride
    return latest
