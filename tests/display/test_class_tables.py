"""Tables of classes stay readable however many there are."""

from __future__ import annotations

import torch

from ensemblekit.core.confusion import class_report
from ensemblekit.display.confusion import class_heading, class_rows, confusion_table


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
