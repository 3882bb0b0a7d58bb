"""Which prompts does the built-in model get? Documents cut to a number of tokens, and questions."""

from collections.abc import Iterator

from engine.tokenizer import Tokenizer
from experiments.recall_documents import ASSISTANT, END, USER, Document, Fact, make_document, prompt

TOKENS_PER_FACT = 64  # of a document, where nothing else is asked for
LONGEST_QUESTION = 16  # tokens from the end of a document to the start of the answer
SENTENCE_TOKENS = 6  # fewer than the average, so that documents are long enough


def fitting_document(
    tokenizer: Tokenizer, seed: int | str, *, max_tokens: int, num_facts: int | None = None
) -> Document:
    """The longest document of whole sentences that takes at most `max_tokens` as a prompt's start.

    num_facts: None: one to each TOKENS_PER_FACT tokens. Raises ValueError when the facts alone are
    longer.
    """
    facts = max(1, max_tokens // TOKENS_PER_FACT) if num_facts is None else num_facts
    low, high = facts + facts // 8, max_tokens  # a sentence has at least one token
    if low > high or _num_tokens(tokenizer, seed, facts, low) > max_tokens:
        raise ValueError(f"{facts} facts don't fit into {max_tokens} tokens: ask for fewer")
    while low < high:
        middle = (low + high + 1) // 2
        if _num_tokens(tokenizer, seed, facts, middle) <= max_tokens:
            low = middle
        else:
            high = middle - 1
    return make_document(seed, num_facts=facts, num_sentences=low)


def _num_tokens(tokenizer: Tokenizer, seed: int | str, facts: int, sentences: int) -> int:
    document = make_document(seed, num_facts=facts, num_sentences=sentences)
    return document_tokens(tokenizer, document)


def document_tokens(tokenizer: Tokenizer, document: Document) -> int:
    """Tokens of a prompt that come before its question: the role and the document."""
    return len(tokenizer.encode(f"{USER} {document.text}"))


def spread_facts(document: Document, number: int) -> list[Fact]:
    """That many facts from the beginning to the end of a document, over again if it has fewer."""
    have = len(document.facts)
    if number >= have:
        return [document.facts[i % have] for i in range(number)]
    return [document.facts[i * have // number] for i in range(number)]


def question_prompts(
    tokenizer: Tokenizer, document: Document, facts: list[Fact]
) -> Iterator[list[int]]:
    """Token ids of one prompt a fact."""
    for fact in facts:
        yield tokenizer.encode(prompt(document, fact))


def questioned_document(
    tokenizer: Tokenizer, seed: int | str, *, prefix: int, suffix: int, questions: int
) -> list[list[int]]:
    """Prompts of exactly `prefix` + `suffix` tokens: one document's beginning, then questions.

    The suffix of each starts with another question and ends where the answer begins.
    """
    sentences = max(prefix // SENTENCE_TOKENS, 2 * questions)
    facts = max(questions, min(sentences // 12, 400))
    document = make_document(seed, num_facts=facts, num_sentences=sentences)
    ids = tokenizer.encode(f"{USER} {document.text}")
    assert len(ids) >= prefix, f"the document has {len(ids)} tokens, not {prefix}"
    turn = tokenizer.encode(END + ASSISTANT)
    asked = [fact.question for fact in document.facts]
    prompts = []
    for i in range(questions):
        text = tokenizer.encode("".join(f" {question}" for question in asked[i:] + asked[:i]))
        text *= -(-suffix // len(text))
        prompts.append(ids[:prefix] + text[: suffix - len(turn)] + turn)
    return prompts
