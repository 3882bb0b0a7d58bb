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
from dataclasses import asdict
from typing import Any

import torch

from engine import LLM, EngineConfig
from experiments.command_line import add_model, fill_in, new_parser, question, refused
from experiments.console import console, passes
from experiments.drift_answers import MAX_TOKENS, Answer, examples, serve, serve_cold, summary
from experiments.drift_readings import BOUNDARY_RULE, STRIDE, Reading, around, read_documents
from experiments.engines import load
from experiments.fault_injection import FAULTS
from experiments.options import count
from experiments.outcome import publish, remove_results
from experiments.semantic_drift_report import conclusion, draw, last_stride_line, table

QUESTION = question(__doc__)
SMALL = {"documents": 2, "facts": 16, "sentences": 130, "questions": 4}
FULL = {"documents": 4, "facts": 64, "sentences": 520, "questions": 16}
MOST_TOKENS_OF_A_SENTENCE = 16


def engine(options: argparse.Namespace, *, caching: bool) -> LLM:
    """An engine with room for every state and block of all documents: nothing is evicted."""
    strides = options.documents * (options.sentences * MOST_TOKENS_OF_A_SENTENCE // STRIDE + 4)
    config = EngineConfig(
        enable_prefix_caching=caching,
        chunk_stride=STRIDE,
        checkpoint_every=STRIDE,
        block_size=STRIDE,
        restore="copy",
        max_num_seqs=1,
        num_slots=strides + 10 if caching else 2,
        num_blocks=strides + 10,
    )
    return load(options.model, config)


def measure(warm: LLM, cold: LLM, readings: list[Reading]) -> list[Answer]:
    """All questions cold, then under every fault."""
    answers = []
    with passes(sum(len(reading.asked) for reading in readings)) as start:
        cold_outputs = serve_cold(cold, readings, start("cold"))
        for fault in FAULTS:
            answers += serve(warm, readings, fault, cold_outputs, start(fault.title))
    warm.scheduler.check()
    return answers


def results_of(
    llm: LLM,
    options: argparse.Namespace,
    readings: list[Reading],
    rows: list[dict[str, Any]],
    answers: list[Answer],
) -> dict[str, Any]:
    """The content of the results file."""
    passed = rows[0]["bits_equal"]
    documents = [
        {
            "tokens": len(reading.token_ids),
            "last_saved_boundary": max(reading.slots),
            "boundary": reading.boundary,
            "cut_at": around(llm, reading),
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


# ---- command line


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Options. Bad ones exit with status 2."""
    parser = new_parser("semantic_drift", __doc__, small="two short documents, in seconds")
    add_model(parser)
    parser.add_argument("--documents", type=count, help="at least 2")
    parser.add_argument("--facts", type=count, help="of a document")
    parser.add_argument("--sentences", type=count, help="of a document")
    parser.add_argument("--questions", type=count, help="on a document")
    parser.add_argument("--seed", type=count, default=1, help="of the documents")
    options = parser.parse_args(argv)
    fill_in(options, SMALL, FULL)
    if options.documents < 2:
        parser.error("--documents 1; expected at least 2, to restore one's state for another")
    if options.questions > options.facts:
        parser.error(
            f"--questions {options.questions}; expected at most --facts {options.facts}, one each"
        )
    return options


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    try:
        warm, cold = engine(options, caching=True), engine(options, caching=False)
        readings = read_documents(warm, options)
    except (ValueError, OSError) as error:
        return refused("semantic_drift", error)
    remove_results(options.json)
    answers = measure(warm, cold, readings)
    rows = [summary(fault, [a for a in answers if a.fault == fault.name]) for fault in FAULTS]
    results = results_of(warm, options, readings, rows, answers)
    screen = console()
    screen.print(table(rows))
    screen.print(last_stride_line(rows))
    for example in results["examples"]:
        screen.print(
            "{fault}: {question} {answer} (cold: {cold} right: {expected})".format(**example)
        )
    failures = [] if results["passed"] else ["without a fault, bits differ from the cold run"]
    return publish(options.json, results, failures, draw)


if __name__ == "__main__":
    sys.exit(main())
