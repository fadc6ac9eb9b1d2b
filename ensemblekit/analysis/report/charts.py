"""Charts: a figure with its title, its text alternative and the table of the numbers that it shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.figure import Figure

Layout = Literal["rows", "matrix"]


@dataclass(frozen=True)
class DataTable:
    """The numbers of a chart as text, a cell for each."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    layout: Layout = "rows"
    """"matrix": the first column has the labels of the rows, and every other cell is a cell of the figure."""

    @classmethod
    def of(cls, columns: Sequence[str], rows: Iterable[Sequence[object]], layout: Layout = "rows") -> DataTable:
        """Make a table of values; see `cell_text`."""
        return cls(tuple(columns), tuple(tuple(map(cell_text, row)) for row in rows), layout)


@dataclass(frozen=True)
class Chart:
    """A figure of the page and everything that stands around it."""

    name: str
    """Identifies the chart on the page: lower-case letters and hyphens."""
    title: str
    caption: str
    """How to read it, in one or two sentences."""
    description: str
    """The text alternative: what a reader would see, with numbers."""
    figure: Figure
    table: DataTable
    wide: bool = False
    """Whether it needs the whole width of the page."""


def cell_text(value: object) -> str:
    """Format a value for a cell: numbers with four digits, "–" for a value that does not exist."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def number(value: float) -> str:
    """Format a number with four significant digits; "–" for nan."""
    if math.isnan(value):
        return "–"
    if value == 0 or (1e-3 <= abs(value) < 1e5):
        text = f"{value:.4g}"
        return text if "e" not in text else f"{value:.0f}"
    return f"{value:.3g}"


def percent(share: float, digits: int = 2) -> str:
    """Format a share as a percentage, which is never broken into two lines."""
    return f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%"
