"""What do many users ask about one document? Prompts with a long common beginning."""

from collections.abc import Iterator
from itertools import count, cycle, islice
from pathlib import Path

import torch

from engine.tokenizer import Tokenizer

_DATA = Path(__file__).resolve().parent / "data"
RANDOM_IDS_SEED = 7


def shared_prompts(
    tokenizer: Tokenizer | None,
    vocab_size: int,
    *,
    prefix_tokens: int,
    suffix_tokens: int,
    num_questions: int,
) -> list[list[int]]:
    """Token ids of `num_questions` prompts: the document's first tokens, then one question.

    The document repeats, its sections numbered on, until it is long enough; a question is cut, or
    repeats itself, to `suffix_tokens`. Without a tokenizer both are seeded random ids. Raises
    ValueError if the tokenizer gives an id that the vocabulary lacks.
    """
    if tokenizer is None:
        num_ids = prefix_tokens + num_questions * suffix_tokens
        ids = random_ids(num_ids, vocab_size, seed=RANDOM_IDS_SEED)
        document = ids[:prefix_tokens]
        starts = range(prefix_tokens, num_ids, suffix_tokens)
        questions = [ids[start : start + suffix_tokens] for start in starts]
    else:
        document = list(islice(_document_ids(tokenizer), prefix_tokens))
        texts = islice(numbered_questions(), num_questions)
        questions = [list(islice(cycle(tokenizer.encode(t)), suffix_tokens)) for t in texts]
    largest = max(document + [token for question in questions for token in question])
    if largest >= vocab_size:
        raise ValueError(f"the tokenizer gives id {largest}; the model has ids below {vocab_size}")
    return [document + question for question in questions]


def random_ids(num_tokens: int, vocab_size: int, *, seed: int) -> list[int]:
    """Seeded ids, uniform over the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()


def numbered_sections() -> Iterator[str]:
    """The document's sections, over and over; no two have the same number."""
    text = (_DATA / "shared_document.md").read_text(encoding="utf-8")
    sections = [section.strip() for section in text.split("## ") if section.strip()]
    for number, section in zip(count(1), cycle(sections), strict=False):
        title, body = section.split("\n", 1)
        yield f"Section {number}. {title}\n\n{body}\n\n"


def numbered_questions() -> Iterator[str]:
    """The questions, over and over; the number comes first, so that short cuts differ too."""
    lines = (_DATA / "questions.txt").read_text(encoding="utf-8").splitlines()
    for number, line in zip(count(1), cycle(lines), strict=False):
        yield f"{number}. {line}\n"


def _document_ids(tokenizer: Tokenizer) -> Iterator[int]:
    for section in numbered_sections():
        yield from tokenizer.encode(section)
