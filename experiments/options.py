"""Which numbers may an option of a script have? Types for argparse; it prints what they refuse."""

import argparse
import math
import os
from pathlib import Path


def count(text: str) -> int:
    """An integer of at least 1."""
    value = int(text) if text.lstrip("-").isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected an integer of at least 1")
    return value


def thread_count(text: str) -> int:
    """From 1 to the number of this machine's cores."""
    most = os.cpu_count() or 1
    value = int(text) if text.lstrip("-").isdecimal() else 0
    if not 1 <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r}; expected 1 to {most}, the cores there are")
    return value


def seconds(text: str) -> float:
    """A positive, finite number of seconds."""
    value = _number(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a positive number of seconds")
    return value


def share(text: str) -> float:
    """A part of a whole: from 0 to 1."""
    value = _number(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a share from 0 to 1")
    return value


def _number(text: str) -> float:
    """NaN, which lies in no range, for what is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def results_file(text: str) -> Path:
    """A .json file that can be written: found out before the work and not after it."""
    path = Path(text)
    if path.suffix != ".json" or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}; expected a file name that ends in .json")
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise argparse.ArgumentTypeError(f"{text!r}; {folder} can't be written")
    return path
