"""Prints a comparison: tables that fit the terminal, notes and advice."""

from __future__ import annotations

from collections.abc import Sequence

from ensemblekit.analysis.comparison import Comparison
from ensemblekit.analysis.table_formats import LEGEND, text_table
from ensemblekit.display.console import Printer

PIPE_WIDTH = 120
"""Width of the tables where there is no terminal."""
SEPARATOR = 2


def print_comparison(comparison: Comparison, printer: Printer) -> None:
    """Print the measures of all groups, in as many tables as it takes for each to fit the width."""
    runs = sum(len(group.runs) for group in comparison.groups)
    groups = f"{len(comparison.groups)} group{'s' * (len(comparison.groups) != 1)}"
    printer.heading(f"{groups} of {runs} run{'s' * (runs != 1)}, {comparison.num_samples:,} test samples")
    width = printer.console.width if printer.for_a_person else PIPE_WIDTH
    for columns in fitting(comparison, width):
        titles, rows = text_table(comparison, columns)
        printer.table(titles, rows)
        printer.text()
    if len(comparison.groups) > 1:
        printer.text(LEGEND)
    for note in comparison.notes:
        printer.text(f"note: {note}")
    if comparison.advice:
        printer.text()
        printer.heading("What the numbers say")
        for advice in comparison.advice:
            printer.text(f"- {advice.text}")
            printer.text(f"  Rule: {advice.rule}. Source: {advice.source}.")


def fitting(comparison: Comparison, width: int) -> list[list[str]]:
    """Divide the columns of a comparison into tables that are not wider than a terminal, if each column fits."""
    tables: list[list[str]] = []
    for name in comparison.columns:
        if tables and _width(comparison, [*tables[-1], name]) <= width:
            tables[-1].append(name)
        else:
            tables.append([name])
    return tables


def _width(comparison: Comparison, columns: Sequence[str]) -> int:
    titles, rows = text_table(comparison, columns)
    widths = [max(len(line[index]) for line in (titles, *rows)) for index in range(len(titles))]
    return sum(widths) + SEPARATOR * len(widths)
