"""What is asked about a document that was read, and where do its questions resume? Readings."""

import argparse
from dataclasses import dataclass

from engine import LLM, SamplingParams
from experiments.fault_injection import checkpoint_slots
from experiments.recall_documents import USER, Document, Fact, make_document, prompt

STRIDE = 64  # chunk_stride, checkpoint_every and block_size
BOUNDARY_RULE = (
    "of each document, the last boundary but one that was saved: cached K/V and states end there "
    "for every question, and the states a stride earlier and a stride later exist"
)
REGIONS = ("earlier", "last_stride", "suffix")


@dataclass(frozen=True)
class Asked:
    """One question. region: where its fact ends: in the stride before the boundary, earlier, or in
    the tokens after the boundary, which every run computes itself."""

    document: int
    fact: Fact
    region: str
    token_ids: list[int]


@dataclass(frozen=True)
class Reading:
    """One document as it is in the cache. boundary: where its questions resume: the last boundary
    but one that was saved, so that the states of both neighbours exist."""

    token_ids: list[int]
    boundary: int
    slots: dict[int, int]
    asked: list[Asked]


def read_documents(llm: LLM, options: argparse.Namespace) -> list[Reading]:
    """Serve every document once, without a question, and choose what is asked about it."""
    assert llm.tokenizer is not None
    readings = []
    for number in range(options.documents):
        document = make_document(
            f"{options.seed}/{number}", num_facts=options.facts, num_sentences=options.sentences
        )
        token_ids = llm.tokenizer.encode(f"{USER} {document.text}")
        llm.generate(token_ids, SamplingParams(temperature=0.0, max_tokens=1))
        slots = checkpoint_slots(llm, token_ids)
        if len(slots) < 3:
            raise ValueError(
                f"--sentences {options.sentences} make a document of {len(token_ids)} tokens with "
                f"{len(slots)} saved states; expected at least 3, a stride of {STRIDE} apart"
            )
        boundary = sorted(slots)[-2]
        asked = _questions(llm, document, number, boundary, options.questions)
        readings.append(Reading(token_ids, boundary, slots, asked))
    return readings


def _questions(
    llm: LLM, document: Document, number: int, boundary: int, questions: int
) -> list[Asked]:
    """Facts spread evenly over the document, and all that end in the stride before the boundary."""
    tokenizer, num_facts = llm.tokenizer, len(document.facts)
    assert tokenizer is not None
    spread = {int((i + 0.5) * num_facts / questions) for i in range(questions)}
    asked = []
    for index, (fact, place) in enumerate(zip(document.facts, document.positions, strict=True)):
        end = len(tokenizer.encode(f"{USER} {' '.join(document.sentences[: place + 1])}"))
        region = REGIONS[(end > boundary - STRIDE) + (end > boundary)]
        if index in spread or region == "last_stride":
            ids = tokenizer.encode(prompt(document, fact))
            asked.append(Asked(number, fact, region, ids))
    return asked


def around(llm: LLM, reading: Reading) -> str:
    """The words at the boundary, "|" where it falls."""
    assert llm.tokenizer is not None
    ids, boundary = reading.token_ids, reading.boundary
    parts = ids[boundary - 8 : boundary], ids[boundary : boundary + 8]
    return "|".join(llm.tokenizer.decode(part) for part in parts)
