"""How do this project's figures look? One style, drawn without a display."""

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

COLD, FIRST, WARM = "#6b7280", "#f2a154", "#d9480f"
TEXT, LINE = "#374151", "#e5e7eb"

_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LINE,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}


def new_figure(question: str, outcome: str) -> tuple[Figure, Axes]:
    """A figure with one chart: the question above it in bold, the outcome on the next line."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(question, loc="left", fontsize=11.5, fontweight="bold", pad=24)
        axes.text(0, 1.03, outcome, transform=axes.transAxes, fontsize=9.5, color=TEXT)
    return figure, axes


def log_ms(axes: Axes) -> None:
    """A vertical log scale with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:,.4g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG whose bytes depend only on what is drawn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(_STYLE):
        figure.savefig(path, format="png", metadata={"Software": None})
