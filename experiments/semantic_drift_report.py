"""What came out of restoring wrong states? Table, chart and the sentence at the end."""

from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.plots import COLD, FIRST, LINE, TEXT, WARM, new_figure, save_figure
from experiments.tables import new_table

ROUNDED = ("bfloat16", "int8")


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
    out = new_table(_HEADERS, _LEGEND, left=_HEADERS[:1])
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


def last_stride_line(rows: list[dict[str, Any]]) -> str:
    """What a state of a stride earlier costs the facts that it lacks."""
    near = {row["fault"]: _percent(row["exact_by_region"]["last_stride"]) for row in rows}
    return (
        f"Facts in the stride before the boundary: right {near['none']} with the right state, "
        f"{near['stride_earlier']} with that of a stride earlier."
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """One bar a fault: answers that are right, fluent but wrong, and neither."""
    rows = results["rows"][::-1]
    outcome = f"{rows[-1]['answers']} answers under each fault; no error is raised"
    figure, axes = new_figure(results["question"], outcome)
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
