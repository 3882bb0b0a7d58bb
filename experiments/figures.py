"""What do the committed results look like? Redraws every plot from its JSON, measuring nothing.

python -m experiments.figures
python -m experiments.figures build/experiments
"""

import argparse
import importlib
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from experiments import warm_start_report
from experiments.results_io import RESULTS

SCRIPTS = (
    "recall_accuracy",
    "semantic_drift",
    "ttft_vs_prefix",
    "stride_sweep",
    "concurrency",
    "multi_turn",
    "restore_cost",
)


def draw_warm_start(results: dict[str, Any], path: Path) -> None:
    """The demo's chart."""
    names = [field.name for field in fields(warm_start_report.RequestRow)]
    rows = [
        warm_start_report.RequestRow(**{name: request[name] for name in names})
        for request in results["requests"]
    ]
    warm_start_report.draw(rows, path)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status: 1 if a result is missing or can't be drawn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS, help="of the JSON files")
    folder = parser.parse_args(argv).folder
    failed = 0
    for name in ("warm_start", *SCRIPTS):
        file = folder / f"{name}.json"
        try:
            results = json.loads(file.read_text())
            if name == "warm_start":
                draw_warm_start(results, file.with_suffix(".png"))
            else:
                importlib.import_module(f"experiments.{name}").draw(
                    results, file.with_suffix(".png")
                )
        except (OSError, ValueError, KeyError) as error:
            print(f"figures: {file}: {type(error).__name__}: {error}", file=sys.stderr)
            failed += 1
        else:
            print(f"{file.with_suffix('.png')}: {results['conclusion']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
