"""What does a run show? Text without colours in a file, and bars beside it on stderr."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    track,
)

Item = TypeVar("Item")
Advance = Callable[[], None]


def console() -> Console:
    """As wide as the terminal; 100 columns into a file."""
    width = None if sys.stdout.isatty() else 100
    return Console(width=width, highlight=False, markup=False, emoji=False)


def tracked(items: Sequence[Item], name: str) -> Iterator[Item]:
    """The items, with a bar that is gone at the end."""
    yield from track(items, name, console=Console(stderr=True), transient=True)


@contextmanager
def passes(total: int) -> Iterator[Callable[[str], Advance]]:
    """Gives what starts the bar of a pass, given its name, and returns what moves it by one."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:

        def start(name: str) -> Advance:
            return partial(progress.advance, progress.add_task(name, total=total))

        yield start
