"""Which numbers may an option of a script have? Types for argparse; it prints what they refuse."""

import argparse
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
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}; expected a positive number of seconds")
    return value


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
