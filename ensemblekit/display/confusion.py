"""Tables of classes: how well each is recognised, and what it is taken for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ensemblekit.display.console import Printer

MAX_LISTED_CLASSES = 20
"""Of more classes only those with the lowest recall are listed."""
MAX_CONFUSION_CLASSES = 15
"""The confusion matrix of more classes is not shown."""
_MAX_NAME = 12
CLASS_COLUMNS: tuple[str, ...] = ("class", "samples", "recall", "precision", "most often taken for")


def class_rows(classes: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each class, or for those with the lowest recall if there are many."""
    return [
        (
            str(entry["class"]),
            f"{entry['count']:,}",
            _percentage(entry["recall"]),
            _percentage(entry["precision"]),
            "" if entry["confused_with"] is None else f"{entry['confused_with']} ({entry['confused']:,} times)",
        )
        for entry in _listed(classes)
    ]


def _listed(classes: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return sorted(classes, key=_recall)[:MAX_LISTED_CLASSES] if len(classes) > MAX_LISTED_CLASSES else classes


def _coverages(classes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The coverage of the prediction sets of each class that is listed."""
    return [_percentage(entry["coverage"]) for entry in _listed(classes)]


def class_heading(num_classes: int) -> str:
    """Return the heading of the table of `class_rows`."""
    if num_classes <= MAX_LISTED_CLASSES:
        return "classes"
    return f"the {MAX_LISTED_CLASSES} classes with the lowest recall, of {num_classes}"


def confusion_table(
    classes: Sequence[Mapping[str, Any]], confusion: Sequence[Sequence[int]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return columns and rows of a confusion matrix; no rows if there is none, or too many classes to show it."""
    if not confusion or len(classes) > MAX_CONFUSION_CLASSES:
        return (), []
    names = [_short(str(entry["class"])) for entry in classes]
    rows = [
        (name, *(f"{count:,}" if count else "·" for count in row)) for name, row in zip(names, confusion, strict=True)
    ]
    return ("true class", *names), rows


def print_classes(printer: Printer, classes: Sequence[Mapping[str, Any]], confusion: Sequence[Sequence[int]]) -> None:
    """Print the table of classes and the confusion matrix; in place of what is too wide, how to get it."""
    columns, rows = CLASS_COLUMNS, class_rows(classes)
    if classes and "coverage" in classes[0]:
        rows = [(*row[:-1], share, row[-1]) for row, share in zip(rows, _coverages(classes), strict=True)]
        columns = (*columns[:-1], "coverage", columns[-1])
    if not printer.fits(columns, rows):  # without the names of other classes
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    _print_table(printer, class_heading(len(classes)), columns, rows)
    heading = "samples by true class (row) and predicted class (column)"
    _print_table(printer, heading, *confusion_table(classes, confusion))


def print_set_sizes(printer: Printer, set_sizes: Sequence[Mapping[str, Any]]) -> None:
    """Print how often prediction sets of each size hold the true class, if there are any."""
    rows: list[tuple[str, ...]] = [
        (str(row["size"]), f"{row['count']:,}", _percentage(row["coverage"])) for row in set_sizes
    ]
    _print_table(printer, "prediction sets by their number of classes", ("classes", "samples", "coverage"), rows)


def _print_table(printer: Printer, heading: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    if not rows:
        return
    printer.text()
    if printer.fits(columns, rows):
        printer.heading(heading)
        printer.table(columns, rows)
    else:
        printer.text(f"{heading}: too wide for this terminal; widen it, or use --per-class --json")


def _recall(entry: Mapping[str, Any]) -> float:
    return 2.0 if entry["recall"] is None else entry["recall"]  # a class without samples is no worse than any other


def _percentage(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"


def _short(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…"
