"""How do this project's tables look? Plain lines, numbers to the right, the legend below."""

from collections.abc import Container, Iterable

from rich.box import SIMPLE_HEAD
from rich.table import Table


def new_table(
    headers: Iterable[str], caption: str, *, left: Container[str] = (), narrow: bool = False
) -> Table:
    """A table without rows. left: headers of columns of words. narrow: no space to the left."""
    padding = (0, 1, 0, 0) if narrow else (0, 1)
    out = Table(box=SIMPLE_HEAD, padding=padding, caption=caption, caption_justify="left")
    for header in headers:
        out.add_column(header, justify="left" if header in left else "right", no_wrap=True)
    return out
