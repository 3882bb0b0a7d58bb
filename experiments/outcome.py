"""How does a run end? With its results, its picture and an exit status, or with none of them."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.console import console
from experiments.results_io import write_json

Rows = list[dict[str, Any]]
Draw = Callable[[dict[str, Any], Path], None]


def picture_of(path: Path) -> Path:
    """The plot beside a results file."""
    return path.with_suffix(".png")


def remove_results(path: Path) -> None:
    """Remove what an older run left: whatever happens, nothing of it passes for this one's.

    To be called when the options are accepted and before the work.
    """
    path.unlink(missing_ok=True)
    picture_of(path).unlink(missing_ok=True)


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """The options for the results file: no folders of this machine, the model by its name."""
    return {
        name: value.name if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in ("json", "traces")
    }


def failed(failures: list[str]) -> int:
    """Say what is wrong; the exit status."""
    print("\n".join(["FAILED", *failures]), file=sys.stderr)
    return 1


def publish(path: Path, results: dict[str, Any], failures: list[str], draw: Draw) -> int:
    """Write the results and, if nothing failed, draw them and print the answer; the exit status."""
    write_json(path, results)
    if failures:
        picture_of(path).unlink(missing_ok=True)
        return failed(failures)
    draw(json.loads(path.read_text()), picture_of(path))
    console().print(f"Written: {path}, and {picture_of(path).name} beside it.")
    console().print(results["conclusion"])
    return 0


def publish_rows(
    options: argparse.Namespace,
    question: str,
    rows: Rows,
    failures: list[str],
    *,
    table: Callable[[Rows], Table],
    conclusion: Callable[[Rows], str],
    draw: Draw,
) -> int:
    """`publish` for results that are rows of times, which say nothing of wrong answers."""
    if not failures:
        console().print(table(rows))
    results = {
        "question": question,
        "conclusion": None if failures else conclusion(rows),
        "rows": rows,
        "options": asked(options),
        "passed": not failures,
        "failures": failures,
    }
    return publish(options.json, results, failures, draw)
