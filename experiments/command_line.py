"""Which options do the experiments share, and how is a bad one refused? Their command line."""

import argparse
import sys
from pathlib import Path
from typing import Any

from engine.builtin import BUILTIN_MODEL_DIR
from experiments.options import results_file, thread_count
from experiments.results_io import RESULTS


def question(doc: str | None) -> str:
    """What a script asks: the first line of its docstring."""
    return (doc or "").split("\n", 1)[0]


def new_parser(
    name: str, doc: str | None, *, small: str | None = "smaller sizes: under a minute"
) -> argparse.ArgumentParser:
    """The options that all experiments have. small: what --small does; None: there is none."""
    parser = argparse.ArgumentParser(prog=name, description=question(doc), allow_abbrev=False)
    if small is not None:
        parser.add_argument("--small", action="store_true", help=small)
    parser.add_argument("--threads", type=thread_count, default=1, help="of torch (%(default)s)")
    parser.add_argument(
        "--json", type=results_file, default=RESULTS / f"{name}.json", help="results (%(default)s)"
    )
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    """Whose answers: the built-in model's unless another directory is given."""
    parser.add_argument(
        "--model", type=Path, default=BUILTIN_MODEL_DIR, help="model directory (the built-in one)"
    )


def fill_in(options: argparse.Namespace, small: dict[str, Any], full: dict[str, Any]) -> None:
    """Give the options that were not given their values: --small decides which."""
    for name, value in (small if options.small else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def refused(name: str, error: Exception) -> int:
    """Say what the parser could not see yet, in the parser's words; the exit status."""
    print(f"{name}: error: {error}", file=sys.stderr)
    return 2
