"""How does time to first token grow with the shared prefix?

Questions of a fixed length on documents of growing length, one request at a time: with caching off
(cold), and warm with either way to restore, copy and redirect. Below them what no cache can beat:
the model's forward of the question alone at that depth, its state and K/V already there. Every
logit of all four is compared bit for bit.

    python -m experiments.ttft_vs_prefix
    python -m experiments.ttft_vs_prefix --prefixes 1024 4096 --repeats 9

Exit status: 0, 1 if a bit differs or a warm request does not resume at the end of its document, 2
for a refused option.
"""

import argparse
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

from engine import LLM, EngineConfig, RequestOutput, SamplingParams
from experiments.bare_model import BareModel
from experiments.cold_and_warm import first_difference
from experiments.command_line import add_model, fill_in, new_parser, question, refused
from experiments.console import tracked
from experiments.engines import SMALLEST, check_length, load, roomy, same_weights
from experiments.options import count
from experiments.outcome import publish_rows, remove_results
from experiments.plots import COLD, FIRST, TEXT, WARM, log_ms, new_figure, save_figure
from experiments.recall_workload import questioned_document
from experiments.tables import new_table

QUESTION = question(__doc__)
STRIDE = EngineConfig().chunk_stride
PREFIXES = [256, 512, 1024, 2048, 4096, 8192, 16_384]
SMALL = {"prefixes": [256, 512, 1024, 2048], "repeats": 9}
FULL = {"prefixes": PREFIXES, "repeats": 15}
KINDS = ("cold", "copy", "redirect")
FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, return_logits=True)


# ---- measuring


def measure_prefix(
    loaded: LLM, *, prefix: int, suffix: int, repeats: int
) -> tuple[dict[str, Any], list[str]]:
    """One row of the results, and what was not as it must be."""
    known = 2  # the first fills the cache, the second leaves a state where it parts from the first
    prompts = questioned_document(
        loaded.tokenizer, prefix, prefix=prefix, suffix=suffix, questions=known + repeats
    )
    engines = _engines(loaded, len(prompts), prefix + suffix)
    for kind, prompt in product(("copy", "redirect"), prompts[:known]):
        engines[kind].generate([prompt], FIRST_TOKEN)
    bare = BareModel(loaded.worker.model, prompts[known], prefix)
    times: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "suffix_alone")}
    failures: list[str] = []
    for i, prompt in enumerate(prompts[known:]):
        outputs, alone = {}, (torch.empty(0), 0.0)
        for kind in _turned(i):
            if kind == "suffix_alone":
                alone = _suffix_alone(bare, prefix, prefix + suffix)
            else:
                outputs[kind] = engines[kind].generate([prompt], FIRST_TOKEN)[0]
        for kind, values in times.items():
            values.append(outputs[kind].ttft_ms if kind in outputs else alone[1])
        found = _failures(outputs, prefix)
        if i == 0 and not torch.equal(alone[0][0], outputs["cold"].logits[0]):
            found.append("suffix alone: other logits than cold")
        failures += [f"prefix {prefix}, question {i}, {failure}" for failure in found]
    row = {"prefix_tokens": prefix, "suffix_tokens": suffix, "bits_equal": not failures}
    row |= {f"{kind}_cached_tokens": outputs[kind].num_cached_tokens for kind in KINDS}
    return row | _summary(times), failures


def _turned(i: int) -> tuple[str, ...]:
    """Cold, then the short ones, another one first each time: none always follows the same one."""
    short = (*KINDS[1:], "suffix_alone")
    return (KINDS[0], *short[i % len(short) :], *short[: i % len(short)])


def _summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, all times, and the median of the ratios within a round: a drift hits both parts."""
    rounds = zip(times["redirect"], times["suffix_alone"], strict=True)
    row: dict[str, Any] = {f"{kind}_ms": median(values) for kind, values in times.items()}
    row["redirect_over_alone"] = median(warm / alone for warm, alone in rounds)
    return row | {f"{kind}_all_ms": values for kind, values in times.items()}


def _suffix_alone(bare: BareModel, start: int, end: int) -> tuple[torch.Tensor, float]:
    """Logits of the last token and the milliseconds of one forward."""
    began = time.perf_counter()
    logits = bare.prefill(start, end)
    return logits, 1e3 * (time.perf_counter() - began)


def _engines(loaded: LLM, num_prompts: int, prompt_tokens: int) -> dict[str, LLM]:
    """One engine a kind on the same weights, warmed up, with room for all prompts."""
    room = roomy(num_prompts, prompt_tokens, 1)
    room = replace(room, placement="prompt_end+branch")  # at the document's very end
    engines = {}
    for kind in KINDS:
        restore = "redirect" if kind == "cold" else kind
        config = replace(room, enable_prefix_caching=kind != "cold", restore=restore)
        engines[kind] = same_weights(loaded, config, prompt_tokens)
    return engines


def _failures(outputs: dict[str, RequestOutput], prefix: int) -> list[str]:
    """Logits that are not those of cold, and requests that resumed elsewhere than they must."""
    found = []
    for kind, output in outputs.items():
        difference = first_difference(outputs["cold"], output)
        if difference is not None:
            found.append(f"{kind}: {difference}")
        due = 0 if kind == "cold" else prefix
        if output.num_cached_tokens != due:
            found.append(f"{kind}: reused {output.num_cached_tokens} tokens, not {due}")
    return found


# ---- reporting


def table(rows: list[dict[str, Any]]) -> Table:
    """One line a prefix length."""
    caption = (
        "ms are medians. cold, copy, redirect: time to first token with caching off, and warm by "
        "kind of restore. suffix alone: the model's forward of the suffix at that depth; the ratio "
        "to it is the median of the ratios within a round."
    )
    headers = ("prefix\ntokens", "suffix\ntokens", "cold\nms", "copy\nms", "redirect\nms")
    headers += ("suffix\nalone, ms", "cold /\nredirect", "redirect /\nalone", "bits\nequal")
    out = new_table(headers, caption)
    for row in rows:
        times = [row[f"{kind}_ms"] for kind in (*KINDS, "suffix_alone")]
        ratios = times[0] / times[2], row["redirect_over_alone"]
        out.add_row(
            f"{row['prefix_tokens']:,}",
            str(row["suffix_tokens"]),
            *(f"{time:.1f}" for time in times),
            *(f"{ratio:.2f}" for ratio in ratios),
            "yes" if row["bits_equal"] else "NO",
        )
    return out


def conclusion(rows: list[dict[str, Any]]) -> str:
    """One sentence that answers the question; only for rows with equal bits."""
    first, last = rows[0], rows[-1]
    over = [row["redirect_over_alone"] for row in rows]
    return (
        f"From {first['prefix_tokens']:,} to {last['prefix_tokens']:,} shared tokens the cold "
        f"first token goes from {first['cold_ms']:.1f} to {last['cold_ms']:.1f} ms, the warm one "
        f"from {first['redirect_ms']:.1f} to {last['redirect_ms']:.1f} ms with redirect and from "
        f"{first['copy_ms']:.1f} to {last['copy_ms']:.1f} ms with copy: "
        f"{first['cold_ms'] / first['redirect_ms']:.1f} to "
        f"{last['cold_ms'] / last['redirect_ms']:.1f} times sooner, at {min(over):.2f} to "
        f"{max(over):.2f} times the forward of the {last['suffix_tokens']} new tokens alone, "
        "with equal bits."
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """Time to first token by prefix length, both on log scales, from the results file alone."""
    rows = results["rows"]
    last = rows[-1]
    outcome = (
        f"{last['cold_ms'] / last['redirect_ms']:.0f} times sooner on a known prefix of "
        f"{last['prefix_tokens']:,} tokens ({last['suffix_tokens']} new ones); logits bit-equal"
    )
    figure, axes = new_figure(results["question"], outcome)
    looks = (
        ("cold", "o-", COLD, "caching off"),
        ("copy", "s-", FIRST, "warm, restore by copy"),
        ("redirect", "D-", WARM, "warm, restore by redirect"),
        ("suffix_alone", "--", TEXT, "forward of the suffix alone"),
    )
    places = [row["prefix_tokens"] for row in rows]
    for kind, look, color, label in looks:
        axes.plot(places, [row[f"{kind}_ms"] for row in rows], look, color=color, label=label)
    axes.set_xscale("log", base=2)
    log_ms(axes)
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.set_xlabel("shared prefix, tokens (log scale)")
    axes.set_ylabel("time to first token, ms (log scale)")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    save_figure(figure, path)


# ---- command line


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Options. Bad ones exit with status 2."""
    parser = new_parser("ttft_vs_prefix", __doc__)
    add_model(parser)
    parser.add_argument("--prefixes", type=count, nargs="+", help="shared tokens, each a row")
    parser.add_argument("--suffix-tokens", type=count, default=STRIDE, help="new (%(default)s)")
    parser.add_argument("--repeats", type=count, help="of each time; their median counts")
    options = parser.parse_args(argv)
    fill_in(options, SMALL, FULL)
    options.prefixes = sorted(set(options.prefixes))
    if any(prefix % STRIDE for prefix in options.prefixes):
        parser.error(f"--prefixes {options.prefixes}: each must be a multiple of {STRIDE}")
    if options.suffix_tokens < STRIDE:
        parser.error(f"--suffix-tokens {options.suffix_tokens}: must be at least {STRIDE}")
    return options


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    try:
        loaded = load(options.model, SMALLEST)
        check_length(loaded, options.prefixes[-1] + options.suffix_tokens)
    except (ValueError, OSError) as error:
        return refused("ttft_vs_prefix", error)
    remove_results(options.json)
    rows, failures = [], []
    for prefix in tracked(options.prefixes, "prefixes"):
        row, found = measure_prefix(
            loaded, prefix=prefix, suffix=options.suffix_tokens, repeats=options.repeats
        )
        rows.append(row)
        failures += found
    return publish_rows(
        options, QUESTION, rows, failures, table=table, conclusion=conclusion, draw=draw
    )


if __name__ == "__main__":
    sys.exit(main())
