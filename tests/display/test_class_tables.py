"""Tables of classes stay readable however many there are."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from ensemblekit.core.confusion import class_report
from ensemblekit.display.confusion import class_heading, class_rows, confusion_table, print_classes
from ensemblekit.display.console import Printer


def test_of_many_classes_the_worst_are_listed_and_no_matrix():
    confusion = torch.diag(torch.arange(100))  # class 0 has no samples, and class 50 is never recognised
    confusion[50] = torch.roll(confusion[50], 1)
    report = class_report(confusion)
    rows = class_rows(report)
    assert (len(rows), rows[0]) == (20, ("50", "50", "0.00 %", "", "51 (50 times)"))
    assert "0" not in [row[0] for row in rows]
    assert class_heading(100) == "the 20 classes with the lowest recall, of 100"
    assert confusion_table(report, confusion.tolist()) == ((), [])


def test_few_classes_are_listed_in_their_order_with_a_matrix():
    confusion = torch.tensor([[1, 2], [0, 3000]])
    report = class_report(confusion, ("a name that is too long", "b"))
    assert [row[0] for row in class_rows(report)] == ["a name that is too long", "b"]
    columns, rows = confusion_table(report, confusion.tolist())
    assert columns == ("true class", "a name that…", "b")
    assert rows == [("a name that…", "1", "2"), ("b", "·", "3,000")]


def shown(width: int, classes: int = 10) -> str:
    """What a terminal of this width shows of a confusion matrix with counts of four digits."""
    screen, printer = io.StringIO(), Printer()
    printer.console = Console(file=screen, force_terminal=True, width=width, color_system=None, highlight=False)
    printer.for_a_person = True
    confusion = torch.full((classes, classes), 1234)
    print_classes(printer, class_report(confusion, tuple(f"class {i}" for i in range(classes))), confusion.tolist())
    return screen.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 200])
def test_a_confusion_matrix_is_shown_whole_or_not_at_all(width):
    text = shown(width)
    assert text.count(" 1,234") >= 100 or "--per-class --json" in " ".join(text.split())
    assert all(len(line) <= width for line in text.splitlines())


def test_a_narrow_terminal_keeps_the_table_of_classes_and_says_how_to_get_the_matrix():
    text = " ".join(shown(50).split())
    assert "recall precision" in text
    assert "most often taken for" not in text
    assert "(column): too wide for this terminal; widen it, or use --per-class --json" in text
    assert shown(200).count("1,234") == 110
