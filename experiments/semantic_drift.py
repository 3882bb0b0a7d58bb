"""What happens to the answers if a wrong state is restored?

Documents of facts are read once; then questions about them resume from the cache, with one fault
put in between the restore and the first forward pass: the state of a neighbouring boundary or of
another document, a zero state, a zero convolution window, zero K/V, a rounded state. Answers and
logits are compared with those of a cold run; without a fault every bit of them must be equal.

    python -m experiments.semantic_drift
    python -m experiments.semantic_drift --documents 2 --questions 4 --sentences 130 --facts 16

Exit status: 0, 1 if a bit of the run without a fault differs, 2 for a refused option.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from engine import LLM, RequestOutput, SamplingParams
from engine.builtin import BUILTIN_MODEL_DIR
from experiments.fault_injection import FAULTS, Fault, checkpoint_slots, injected
from experiments.options import count, results_file, thread_count
from experiments.plots import COLD, FIRST, LINE, TEXT, WARM, new_figure, save_figure
from experiments.recall_documents import USER, Document, Fact, make_document, prompt
from experiments.results_io import RESULTS, write_json

QUESTION = "What happens to the answers if a wrong state is restored?"
STRIDE = 64
MAX_TOKENS = 12
MOST_TOKENS_OF_A_SENTENCE = 16
MOST_EXAMPLES = 2  # of each fault
ROUNDED = ("bfloat16", "int8")
BOUNDARY_RULE = (
    "of each document, the last boundary but one that was saved: cached K/V and states end there "
    "for every question, and the states a stride earlier and a stride later exist"
)
REGIONS = ("earlier", "last_stride", "suffix")
_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
Advance = Callable[[], None]


# ---- what is asked


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


# ---- what is answered


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
    fact, text = asked.fact, warm.text.strip()
    pairs = list(zip(cold.logits or [], warm.logits or [], strict=False))
    same = cold.token_ids == warm.token_ids
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
        bits_equal=same and all(torch.equal(a, b) for a, b in pairs),
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
    for fault in FAULTS:
        changed = [asdict(a) for a in answers if a.fault == fault.name and a.differs]
        shown += changed[:MOST_EXAMPLES]
    return shown


def conclusion(rows: list[dict[str, Any]]) -> str:
    """One sentence with the numbers."""
    by_name = {row["fault"]: row for row in rows}
    control = by_name["none"]
    coarse = [row for row in rows if row["fault"] not in ("none", *ROUNDED)]
    told = "; ".join(
        f"{row['title']}: {_percent(row['exact'])} and {_percent(row['differs_from_cold'])}"
        for row in coarse
    )
    least = min(row["well_formed"] for row in coarse)
    rounded = [_percent(by_name[name]["differs_from_cold"]) for name in ROUNDED]
    return (
        f"Nothing shows it: no fault raises an error, and under each {_at_least(least)} of the "
        "answers are well-formed sentences; but while with the right state all "
        f"{control['answers']} equal the cold run's in every bit and {_percent(control['exact'])} "
        f"are right, with a fault the shares right and changed are ({told}); rounding the right "
        f"state changes {rounded[0]} of the answers as bfloat16 and {rounded[1]} as int8."
    )


def _at_least(share: float) -> str:
    return "all" if share == 1 else f"at least {_percent(share)}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


_HEADERS = (
    "what the model starts from",
    "right",
    "not as\ncold",
    "well-\nformed",
    "fluent,\nwrong",
    "logits,\n1st token",
    "logits,\nlargest",
    "bits\nequal",
)
_LEGEND = """\
right: the expected sentence; well-formed: '<asked name> <verb> <a value of that relation>.'
fluent, wrong: well-formed and not right. logits: largest difference to the cold run's, of the
first new token (the name) and of any up to the first where the answers part."""


def table(rows: list[dict[str, Any]]) -> Table:
    """One line a fault."""
    out = Table(box=SIMPLE_HEAD, padding=(0, 1), caption=_LEGEND, caption_justify="left")
    for header in _HEADERS:
        out.add_column(header, justify="left" if header == _HEADERS[0] else "right", no_wrap=True)
    for row in rows:
        shares = ("exact", "differs_from_cold", "well_formed", "fluent_but_wrong")
        out.add_row(
            row["title"],
            *(_percent(row[name]) for name in shares),
            f"{row['first_token_logit_difference']:.2g}",
            f"{row['largest_logit_difference']:.2g}",
            "yes" if row["bits_equal"] else "no",
        )
    return out


def _last_stride_line(rows: list[dict[str, Any]]) -> str:
    near = {row["fault"]: _percent(row["exact_by_region"]["last_stride"]) for row in rows}
    return (
        f"Facts in the stride before the boundary: right {near['none']} with the right state, "
        f"{near['stride_earlier']} with that of a stride earlier."
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """One bar a fault: answers that are right, fluent but wrong, and neither."""
    rows = results["rows"][::-1]
    outcome = f"{rows[-1]['answers']} answers under each fault; no error is raised"
    figure, axes = new_figure(QUESTION, outcome)
    right = [100 * row["exact"] for row in rows]
    fluent = [100 * row["fluent_but_wrong"] for row in rows]
    both = [a + b for a, b in zip(right, fluent, strict=True)]
    titles = [row["title"] for row in rows]
    axes.barh(titles, right, color=COLD, label="right")
    axes.barh(titles, fluent, left=right, color=WARM, label="well-formed sentence, but wrong")
    if min(both) < 100:
        other = [100 - share for share in both]
        axes.barh(titles, other, left=both, color=FIRST, label="something else")
    for place, row in enumerate(rows):
        changed = _percent(row["differs_from_cold"])
        note = f"{changed}, {row['largest_logit_difference']:.2g}"
        axes.text(101.5, place, note, va="center", fontsize=8, color=TEXT)
    note = "changed answers, largest\ndifference of a logit to cold"
    axes.text(101.5, len(rows) - 0.5, note, va="bottom", fontsize=7, color=TEXT)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the answers")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=LINE)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    save_figure(figure, path)


# ---- command line


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    width = None if sys.stdout.isatty() else 100
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    try:
        warm, cold = _engine(options, caching=True), _engine(options, caching=False)
        readings = read_documents(warm, options)
    except (ValueError, OSError) as error:
        print(f"semantic_drift: error: {error}", file=sys.stderr)
        return 2
    answers = _measure(warm, cold, readings)
    rows = [summary(fault, [a for a in answers if a.fault == fault.name]) for fault in FAULTS]
    results = _results(warm, options, readings, rows, answers)
    write_json(options.json, results)
    console.print(table(rows))
    console.print(_last_stride_line(rows))
    for example in results["examples"]:
        console.print(
            "{fault}: {question} {answer} (cold: {cold} right: {expected})".format(**example)
        )
    picture = options.json.with_suffix(".png")
    if not results["passed"]:
        picture.unlink(missing_ok=True)  # it would show an older run
        print("FAILED: without a fault, bits differ from the cold run", file=sys.stderr)
        return 1
    draw(results, picture)
    console.print(f"Written: {options.json}, and {picture.name} beside it.")
    console.print(results["conclusion"])
    return 0


def _measure(warm: LLM, cold: LLM, readings: list[Reading]) -> list[Answer]:
    answers = []
    total = sum(len(reading.asked) for reading in readings)
    with Progress(*_COLUMNS, console=Console(stderr=True)) as progress:

        def start(name: str) -> Advance:
            return partial(progress.advance, progress.add_task(name, total=total))

        cold_outputs = serve_cold(cold, readings, start("cold"))
        for fault in FAULTS:
            answers += serve(warm, readings, fault, cold_outputs, start(fault.title))
    warm.scheduler.check()
    return answers


def _around(llm: LLM, reading: Reading) -> str:
    """The words at the boundary, "|" where it falls."""
    assert llm.tokenizer is not None
    ids, boundary = reading.token_ids, reading.boundary
    parts = ids[boundary - 8 : boundary], ids[boundary : boundary + 8]
    return "|".join(llm.tokenizer.decode(part) for part in parts)


def _results(
    llm: LLM,
    options: argparse.Namespace,
    readings: list[Reading],
    rows: list[dict[str, Any]],
    answers: list[Answer],
) -> dict[str, Any]:
    passed = rows[0]["bits_equal"]
    documents = [
        {
            "tokens": len(reading.token_ids),
            "last_saved_boundary": max(reading.slots),
            "boundary": reading.boundary,
            "cut_at": _around(llm, reading),
            "questions": len(reading.asked),
        }
        for reading in readings
    ]
    return {
        "question": QUESTION,
        "passed": passed,
        "conclusion": conclusion(rows) if passed else None,
        "model": options.model.resolve().name,
        "options": {
            name: getattr(options, name)
            for name in ("documents", "facts", "sentences", "questions", "seed", "threads")
        },
        "chunk_stride": STRIDE,
        "checkpoint_every": STRIDE,
        "max_tokens": MAX_TOKENS,
        "boundary_rule": BOUNDARY_RULE,
        "documents": documents,
        "rows": rows,
        "examples": examples(answers),
        "answers": [asdict(answer) for answer in answers],
    }


def _engine(options: argparse.Namespace, *, caching: bool) -> LLM:
    """An engine with room for every state and block of all documents: nothing is evicted."""
    strides = options.documents * (options.sentences * MOST_TOKENS_OF_A_SENTENCE // STRIDE + 4)
    return LLM(
        options.model,
        enable_prefix_caching=caching,
        chunk_stride=STRIDE,
        checkpoint_every=STRIDE,
        block_size=STRIDE,
        restore="copy",
        max_num_seqs=1,
        num_slots=strides + 10 if caching else 2,
        num_blocks=strides + 10,
    )


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Options; bad ones exit with status 2."""
    parser = argparse.ArgumentParser(
        prog="semantic_drift", description=(__doc__ or "").split("\n", 1)[0], allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, default=BUILTIN_MODEL_DIR, help="trained on recall")
    parser.add_argument("--documents", type=count, default=4, help="at least 2")
    parser.add_argument("--facts", type=count, default=64, help="of a document")
    parser.add_argument("--sentences", type=count, default=520, help="of a document")
    parser.add_argument("--questions", type=count, default=16, help="on a document")
    parser.add_argument("--seed", type=count, default=1, help="of the documents")
    parser.add_argument("--small", action="store_true", help="two short documents, in seconds")
    parser.add_argument("--threads", type=thread_count, default=1, help="of torch")
    parser.add_argument("--json", type=results_file, default=RESULTS / "semantic_drift.json")
    options = parser.parse_args(argv)
    if options.small:
        options.documents, options.facts, options.sentences, options.questions = 2, 16, 130, 4
    if options.documents < 2:
        parser.error("--documents 1; expected at least 2, to restore one's state for another")
    if options.questions > options.facts:
        parser.error(
            f"--questions {options.questions}; expected at most --facts {options.facts}, one each"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
