"""Which numbers may the options of the regression and the soak have? A type for argparse."""

import argparse
import math


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number above 0")
    return value
