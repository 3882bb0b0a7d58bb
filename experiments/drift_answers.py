"""What is answered from a wrong state? Every answer under every fault, against the cold run's."""

from dataclasses import asdict, dataclass
from typing import Any

from engine import LLM, RequestOutput, SamplingParams
from experiments.cold_and_warm import first_difference
from experiments.console import Advance
from experiments.drift_readings import REGIONS, Asked, Reading
from experiments.fault_injection import Fault, injected
from experiments.recall_documents import Fact

MAX_TOKENS = 12
MOST_EXAMPLES = 2  # of each fault


@dataclass(frozen=True)
class Answer:
    """One answer under one fault, against the cold run's.

    logit_difference: the largest one between the logits of the first new token, which is the asked
    name; largest_logit_difference: of any token up to the first where the answers part.
    """

    fault: str
    document: int
    region: str
    boundary: int
    question: str
    expected: str
    cold: str
    answer: str
    exact: bool
    differs: bool
    well_formed: bool
    bits_equal: bool
    logit_difference: float
    largest_logit_difference: float


def answer_of(
    fault: str, asked: Asked, boundary: int, cold: RequestOutput, warm: RequestOutput
) -> Answer:
    """What a warm output is, beside the cold one of the same question."""
    fact, text = asked.fact, warm.text.strip()
    pairs = list(zip(cold.logits or [], warm.logits or [], strict=False))
    ids = zip(cold.token_ids, warm.token_ids, strict=False)
    shared = next((i for i, (a, b) in enumerate(ids) if a != b), len(pairs) - 1)
    differences = [(a - b).abs().max().item() for a, b in pairs[: shared + 1]]
    return Answer(
        fault=fault,
        document=asked.document,
        region=asked.region,
        boundary=boundary,
        question=fact.question,
        expected=fact.sentence,
        cold=cold.text.strip(),
        answer=text,
        exact=text == fact.sentence,
        differs=text != cold.text.strip(),
        well_formed=well_formed(text, fact),
        bits_equal=first_difference(cold, warm) is None,
        logit_difference=differences[0],
        largest_logit_difference=max(differences),
    )


def well_formed(text: str, fact: Fact) -> bool:
    """Whether it answers the question at all: name, verb and some value of that relation."""
    start = f"{fact.name} {fact.relation.verb} "
    return text in {f"{start}{value}." for value in fact.relation.values}


def serve(
    llm: LLM,
    readings: list[Reading],
    fault: Fault,
    cold: list[list[RequestOutput]],
    advance: Advance,
) -> list[Answer]:
    """All questions under one fault, one at a time."""
    answers = []
    for reading, cold_outputs in zip(readings, cold, strict=True):
        others = [each.slots for each in readings if each is not reading]
        other = max(others, key=lambda slots: min(max(slots), reading.boundary))
        where = dict(boundary=reading.boundary, slots=reading.slots, other_slots=other)
        for asked, cold_output in zip(reading.asked, cold_outputs, strict=True):
            with injected(llm, fault, **where) as altered:
                [output] = llm.generate(asked.token_ids, _sampling())
            assert len(altered) == 1 and output.boundary == reading.boundary, output
            assert output.finish_reason in ("stop", "length"), output
            answers.append(answer_of(fault.name, asked, reading.boundary, cold_output, output))
            advance()
    return answers


def serve_cold(llm: LLM, readings: list[Reading], advance: Advance) -> list[list[RequestOutput]]:
    """All questions without any cache, document by document."""
    outputs = []
    for reading in readings:
        outputs.append([])
        for asked in reading.asked:
            outputs[-1] += llm.generate(asked.token_ids, _sampling())
            advance()
    return outputs


def _sampling() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, return_logits=True)


# ---- what it means


def summary(fault: Fault, answers: list[Answer]) -> dict[str, Any]:
    """One row of the results: shares of all answers under one fault."""

    def share(of: list[bool]) -> float | None:
        return sum(of) / len(of) if of else None

    return {
        "fault": fault.name,
        "title": fault.title,
        "answers": len(answers),
        "exact": share([a.exact for a in answers]),
        "exact_by_region": {
            region: share([a.exact for a in answers if a.region == region]) for region in REGIONS
        },
        "differs_from_cold": share([a.differs for a in answers]),
        "well_formed": share([a.well_formed for a in answers]),
        "fluent_but_wrong": share([a.well_formed and not a.exact for a in answers]),
        "first_token_logit_difference": max(a.logit_difference for a in answers),
        "largest_logit_difference": max(a.largest_logit_difference for a in answers),
        "bits_equal": all(a.bits_equal for a in answers),
    }


def examples(answers: list[Answer]) -> list[dict[str, Any]]:
    """Of each fault, the first answers that are not the cold run's."""
    shown: list[dict[str, Any]] = []
    for name in dict.fromkeys(a.fault for a in answers):
        changed = [asdict(a) for a in answers if a.fault == name and a.differs]
        shown += changed[:MOST_EXAMPLES]
    return shown
