"""What do the committed results look like? Redraws every plot from its JSON, measuring nothing.

python -m experiments.figures
python -m experiments.figures build/experiments
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

from experiments.command_line import question
from experiments.outcome import picture_of
from experiments.results_io import RESULTS

SCRIPTS = (
    "warm_start",
    "recall_accuracy",
    "semantic_drift",
    "ttft_vs_prefix",
    "stride_sweep",
    "concurrency",
    "multi_turn",
    "restore_cost",
    "mtp",
    "policies",
    "regression",
)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status: 1 if a result is missing or can't be drawn."""
    parser = argparse.ArgumentParser(description=question(__doc__))
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS, help="of the JSON files")
    folder = parser.parse_args(argv).folder
    failed = 0
    for name in SCRIPTS:
        file = folder / f"{name}.json"
        try:
            results = json.loads(file.read_text())
            draw = importlib.import_module(f"experiments.{name}").draw
            draw(results, picture_of(file))
        except (OSError, ValueError, KeyError) as error:
            print(f"figures: {file}: {type(error).__name__}: {error}", file=sys.stderr)
            failed += 1
        else:
            print(f"{picture_of(file)}: {results['conclusion']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
