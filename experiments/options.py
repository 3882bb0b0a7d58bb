"""Which numbers may an option of a script have? Types for argparse; it prints what they refuse."""

import argparse
import os


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
