"""How many facts does the built-in model recall, and how far back?

Held-out documents are read by the engine with its cache on, so that a document is prefilled once
for all its questions. An answer counts if it is the fact's sentence to the letter. Counted by
number of facts, by length and by distance.

    python -m experiments.recall_accuracy
    python -m experiments.recall_accuracy --model DIR --documents 2 --small

Exit status: 0; 1 if fewer than `--goal` of the answers on 64 facts in 4,096 tokens are right; 2 for
a refused option.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from engine import LLM, EngineConfig, SamplingParams
from experiments.command_line import add_model, fill_in, new_parser, question, refused
from experiments.console import console, tracked
from experiments.engines import load
from experiments.options import count, share
from experiments.outcome import failed, publish, remove_results
from experiments.plots import COLD, WARM, new_figure, save_figure
from experiments.recall_documents import Document
from experiments.recall_workload import document_tokens, fitting_document, question_prompts
from experiments.tables import new_table

QUESTION = question(__doc__)
SMALL, FULL = {"documents": 2}, {"documents": 8}
GOAL_FACTS, GOAL_TOKENS = 64, 4096
FACTS = (8, 16, 32, 64, 96, 128, 192)
TOKENS = (1024, 2048, 4096, 8192, 16_384)
NUM_DISTANCES = 8  # equal parts of a document
PARAMS = SamplingParams(temperature=0, max_tokens=12)


def sizes(small: bool) -> list[tuple[int, int]]:
    """(facts, tokens) of the documents: the goal's length by facts, its facts by length."""
    if small:
        return [(16, 1024), (GOAL_FACTS, GOAL_TOKENS)]
    by_facts = [(facts, GOAL_TOKENS) for facts in FACTS]
    return by_facts + [(GOAL_FACTS, tokens) for tokens in TOKENS if tokens != GOAL_TOKENS]


def ask_all(llm: LLM, document: Document) -> list[str]:
    """The answers to the questions about all facts of a document."""
    prompts = list(question_prompts(llm.tokenizer, document, list(document.facts)))
    first = llm.generate(prompts[:1], PARAMS)  # saves the document's states
    return [output.text.strip() for output in first + llm.generate(prompts[1:], PARAMS)]


def measure(llm: LLM, num_facts: int, num_tokens: int, num_documents: int) -> dict[str, Any]:
    """One row of the results."""
    asked = [0] * NUM_DISTANCES
    right = [0] * NUM_DISTANCES
    changed = {True: [0, 0], False: [0, 0]}
    for i in range(num_documents):
        name = f"held out {num_facts}/{num_tokens}/{i}"
        document = fitting_document(llm.tokenizer, name, max_tokens=num_tokens, num_facts=num_facts)
        answers = ask_all(llm, document)
        for fact, place, answer in zip(document.facts, document.positions, answers, strict=True):
            back = len(document.sentences) - 1 - place
            part = back * NUM_DISTANCES // len(document.sentences)
            asked[part] += 1
            right[part] += answer == fact.sentence
            is_changed = document.sentences[place] == fact.update
            changed[is_changed][0] += answer == fact.sentence
            changed[is_changed][1] += 1
    return {
        "facts": num_facts,
        "tokens": num_tokens,
        "document_tokens": document_tokens(llm.tokenizer, document),
        "documents": num_documents,
        "asked": sum(asked),
        "exact": sum(right) / sum(asked),
        "exact_of_changed": changed[True][0] / changed[True][1] if changed[True][1] else None,
        "exact_by_distance": [r / a if a else None for r, a in zip(right, asked, strict=True)],
    }


def conclusion(rows: list[dict[str, Any]]) -> str:
    """One sentence with the numbers."""
    goal = goal_row(rows)
    good = [r["facts"] for r in rows if r["tokens"] == GOAL_TOKENS and r["exact"] >= 0.9]
    reach = f"at least 90 % up to {max(good)} facts" if good else "never 90 %"
    return (
        f"Of {goal['asked']} questions about {GOAL_FACTS} facts in {GOAL_TOKENS:,} tokens "
        f"{100 * goal['exact']:.1f} % are answered to the letter; {reach} at that length."
    )


def goal_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row that the goal is about."""
    [row] = [r for r in rows if (r["facts"], r["tokens"]) == (GOAL_FACTS, GOAL_TOKENS)]
    return row


def table(rows: list[dict[str, Any]]) -> Table:
    """One line a size; the distances from the nearest eighth of the document to the farthest."""
    headers = ("facts", "tokens", "asked", "exact", "changed", "by distance")
    out = new_table(headers, "by distance: from the last eighth of the document to the first")
    for row in rows:
        parts = ("-" if x is None else f"{100 * x:.0f}" for x in row["exact_by_distance"])
        changed = row["exact_of_changed"]
        out.add_row(
            str(row["facts"]),
            str(row["tokens"]),
            str(row["asked"]),
            f"{100 * row['exact']:.1f} %",
            "-" if changed is None else f"{100 * changed:.1f} %",
            " ".join(parts),
        )
    return out


def draw(results: dict[str, Any], path: Path) -> None:
    """Exact match by number of facts at the goal's length, and by length at the goal's facts."""
    rows = results["rows"]
    figure, axes = new_figure(results["question"], results["conclusion"])
    for key, other, fixed, color in (
        ("facts", "tokens", GOAL_TOKENS, WARM),
        ("tokens", "facts", GOAL_FACTS, COLD),
    ):
        series = sorted((r[key], r["exact"]) for r in rows if r[other] == fixed)
        label = f"{key}, at {fixed:,} {other}"
        axes.plot(*zip(*series, strict=True), "o-", color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("answers right to the letter")
    axes.legend(frameon=False, loc="lower left")
    save_figure(figure, path)


def too_few(rows: list[dict[str, Any]], goal: float) -> list[str]:
    """What is said when the share of right answers is below the goal."""
    exact = goal_row(rows)["exact"]
    if exact >= goal:
        return []
    return [f"{100 * exact:.1f} % are right, --goal asks for {100 * goal:.1f} %"]


# ---- command line


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Options. Bad ones exit with status 2."""
    parser = new_parser("recall_accuracy", __doc__, small="two sizes and two documents of each")
    add_model(parser)
    parser.add_argument("--documents", type=count, help="of each size (default 8; small: 2)")
    parser.add_argument("--goal", type=share, default=0.95, help="share that must be right")
    options = parser.parse_args(argv)
    fill_in(options, SMALL, FULL)
    return options


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    try:
        llm = load(options.model, EngineConfig())
    except (ValueError, OSError) as error:
        return refused("recall_accuracy", error)
    remove_results(options.json)
    wanted = sizes(options.small)
    rows = [measure(llm, *size, options.documents) for size in tracked(wanted, "sizes")]
    console().print(table(rows))
    results = {"question": QUESTION, "conclusion": conclusion(rows), "rows": rows}
    publish(options.json, results, [], draw)
    missed = too_few(rows, options.goal)
    return failed(missed) if missed else 0


if __name__ == "__main__":
    sys.exit(main())
