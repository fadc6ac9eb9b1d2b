"""Prints a comparison: tables that fit the terminal, notes and advice."""

from __future__ import annotations

from collections.abc import Sequence

from ensemblekit.analysis.budget import Choice
from ensemblekit.analysis.comparison import Comparison
from ensemblekit.analysis.measures import MEASURES
from ensemblekit.analysis.table_formats import LEGEND, cell_text, text_table, title_of, value_text
from ensemblekit.display.console import Printer

PIPE_WIDTH = 120
"""Width of the tables where there is no terminal."""
SEPARATOR = 2
OF_A_CHOICE = ("accuracy", "mse", "nll", "ece", "training_seconds", "milliseconds_per_1000")
"""The test metrics and times of a group that was chosen."""


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


def print_choice(choice: Choice, printer: Printer) -> None:
    """Print the best group within limits, and the commands that make it ready to use."""
    printer.text()
    printer.heading("Best within the limits, by validation data")
    groups = f"{choice.considered} group{'s' * (choice.considered != 1)}"
    printer.text(f"{choice.group.label}, the best of {groups} within the limits")
    shown = [(name, choice.group.cells[name]) for name in OF_A_CHOICE if name in choice.group.cells]
    titles = [title_of(name) for name, _ in shown]
    primary = MEASURES[choice.metric.removeprefix("validation_")]
    values = [cell_text(cell, MEASURES[name], sign=False) for name, cell in shown]
    printer.table([f"validation {primary.title}", *titles], [[value_text(choice.value, primary), *values]])
    printer.text()
    printer.text("To train it, calibrate it, add prediction sets or intervals, and export it:")
    for command in choice.commands:
        printer.verbatim(command)


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
