"""How many tokens does a step give with the draft head, and is any of them another one?

Questions about documents, one request at a time, answered with 0 to several guesses a step, greedy
and drawn. Every token, every row of logits and the boundary that each prompt and its repetition
resume from are compared with plain decoding.

    python -m experiments.mtp
    python -m experiments.mtp --guesses 1 2 --questions 8

Exit status: 0, 1 if a token, a bit or a boundary differs, 2 for a refused option.
"""

import argparse
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.table import Table

from engine import LLM, EngineConfig, RequestOutput, SamplingParams
from experiments.cold_and_warm import first_difference
from experiments.command_line import add_model, fill_in, new_parser, question, refused
from experiments.console import tracked
from experiments.engines import SMALLEST, check_length, load, roomy
from experiments.options import count
from experiments.outcome import publish_rows, remove_results
from experiments.plots import FIRST, WARM, new_figure, save_figure
from experiments.recall_workload import fitting_document, question_prompts, spread_facts
from experiments.tables import new_table

QUESTION = question(__doc__)
SMALL = {"questions": 8, "document_tokens": 512}
FULL = {"questions": 48, "document_tokens": 2048}
MAX_TOKENS = 12
SETTINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=MAX_TOKENS, return_logits=True),
    "drawn": SamplingParams(temperature=0.7, seed=1, max_tokens=MAX_TOKENS, return_logits=True),
}


# ---- measuring


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[list, list, dict]:
    """(outputs, those of the first prompt again at the end, counts of the decoding alone)."""
    outputs, steps, seconds = [], 0, 0.0
    for prompt in [*prompts, prompts[0]]:
        request_id = llm.add_request(prompt, params)
        decoding = 0
        while llm.has_unfinished():
            began = time.perf_counter()
            told = llm.step()
            if any(len(output.token_ids) > 1 for output in told):
                decoding += 1
                seconds += time.perf_counter() - began
            outputs += [o for o in told if o.finished and o.request_id == request_id]
        steps += decoding
    decoded = sum(len(output.token_ids) - 1 for output in outputs)
    counts = {"decode_steps": steps, "decoded_tokens": decoded, "decode_s": seconds}
    return outputs[:-1], outputs[-1:], counts


def measure(
    options: argparse.Namespace, plain: LLM, guesses: int, how: str, prompts: list[list[int]]
) -> tuple[dict[str, Any], list[str]]:
    """One row, and what was not as in plain decoding."""
    base = replace(
        roomy(len(prompts) + 1, max(map(len, prompts)), 1), num_slots=80, checkpoint_every=512
    )
    reference = LLM.from_model(plain.worker.model, base, plain.tokenizer)
    drafting = LLM(options.model, **asdict(replace(base, num_speculative_tokens=guesses)))
    results = {}
    for name, llm in (("plain", reference), ("drafts", drafting)):
        llm.generate([prompts[0][:70]], SETTINGS[how])  # warm-up
        results[name] = answers(llm, prompts, SETTINGS[how])
    failures = []
    for i, (want, got) in enumerate(
        zip(*([*results[name][0], *results[name][1]] for name in results), strict=True)
    ):
        failures += [f"{how}, {guesses} guesses, prompt {i}: {why}" for why in _differs(want, got)]
    stats, counts = drafting.stats(), results["drafts"][2]
    before = results["plain"][2]
    row = {
        "sampling": how,
        "guesses": guesses,
        "answers": len(prompts) + 1,
        "drafted": stats.tokens_drafted,
        "accepted": stats.tokens_accepted,
        "acceptance": stats.tokens_accepted / max(1, stats.tokens_drafted),
        "tokens_per_step": counts["decoded_tokens"] / counts["decode_steps"],
        "ms_per_token": 1e3 * counts["decode_s"] / counts["decoded_tokens"],
        "plain_ms_per_token": 1e3 * before["decode_s"] / before["decoded_tokens"],
        "bits_equal": not failures,
    }
    return row, failures


def _differs(want: RequestOutput, got: RequestOutput) -> list[str]:
    difference = first_difference(want, got)
    found = [] if difference is None else [difference]
    if got.boundary != want.boundary:
        found.append(f"resumed at {got.boundary}, plain decoding at {want.boundary}")
    return found


# ---- reporting


def table(rows: list[dict[str, Any]]) -> Table:
    """One line a setting."""
    caption = (
        "accepted: share of the guesses; tokens a step: of decoding steps; ms a token: decoding "
        "alone, the head and the verifying included, beside plain decoding in the same run."
    )
    headers = ("sampling", "guesses", "accepted", "tokens\na step", "ms a\ntoken", "plain", "equal")
    out = new_table(headers, caption)
    for row in rows:
        out.add_row(
            row["sampling"],
            str(row["guesses"]),
            f"{row['acceptance']:.0%}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['ms_per_token']:.2f}",
            f"{row['plain_ms_per_token']:.2f}",
            "yes" if row["bits_equal"] else "NO",
        )
    return out


def conclusion(rows: list[dict[str, Any]]) -> str:
    """One sentence that answers the question; only for rows with equal bits."""
    greedy = [row for row in rows if row["sampling"] == "greedy"]
    best = max(greedy, key=lambda row: row["tokens_per_step"])
    ratio = mean(row["ms_per_token"] / row["plain_ms_per_token"] for row in greedy)
    return (
        f"Up to {best['tokens_per_step']:.2f} tokens a step ({best['guesses']} guesses, "
        f"{best['acceptance']:.0%} of them right), on this CPU at {ratio:.2f} times the time of "
        f"plain decoding a token on average; all {sum(row['answers'] for row in rows)} answers, "
        "greedy and drawn, have its tokens and bits and resume where it does."
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """Tokens a step by guesses, from the results file alone."""
    rows = results["rows"]
    best = max(rows, key=lambda row: row["tokens_per_step"])
    outcome = f"up to {best['tokens_per_step']:.2f} tokens a step; every logit as without guesses"
    figure, axes = new_figure(results["question"], outcome)
    for how, look, color in (("greedy", "o-", WARM), ("drawn", "s-", FIRST)):
        its = [row for row in rows if row["sampling"] == how]
        places = [row["guesses"] for row in its]
        axes.plot(places, [r["tokens_per_step"] for r in its], look, color=color, label=how)
    axes.set_xticks(sorted({row["guesses"] for row in rows}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("guesses a step")
    axes.set_ylabel("tokens a decoding step")
    axes.legend(frameon=False)
    save_figure(figure, path)


# ---- command line


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Options. Bad ones exit with status 2."""
    parser = new_parser("mtp", __doc__)
    add_model(parser)
    parser.add_argument("--guesses", type=count, nargs="+", default=[1, 2, 3, 5], help="a step")
    parser.add_argument("--questions", type=count, help="asked, in order through the document")
    parser.add_argument("--document-tokens", type=count, help="of the document")
    options = parser.parse_args(argv)
    fill_in(options, SMALL, FULL)
    return options


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    try:
        plain = load(options.model, SMALLEST)
        for guesses in options.guesses:  # the settings and the head
            LLM(options.model, **asdict(replace(EngineConfig(), num_speculative_tokens=guesses)))
        document = fitting_document(plain.tokenizer, "mtp", max_tokens=options.document_tokens)
        facts = spread_facts(document, options.questions)
        prompts = list(question_prompts(plain.tokenizer, document, facts))
        check_length(plain, max(map(len, prompts)) + MAX_TOKENS)
    except (ValueError, OSError) as error:
        return refused("mtp", error)
    remove_results(options.json)
    rows, failures = [], []
    wanted = [(how, guesses) for how in SETTINGS for guesses in options.guesses]
    for how, guesses in tracked(wanted, "settings"):
        row, found = measure(options, plain, guesses, how, prompts)
        rows.append(row)
        failures += found
    return publish_rows(
        options, QUESTION, rows, failures, table=table, conclusion=conclusion, draw=draw
    )


if __name__ == "__main__":
    sys.exit(main())
