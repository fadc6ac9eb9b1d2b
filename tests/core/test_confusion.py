"""Confusion matrix, recall and precision, against scikit-learn's."""

from __future__ import annotations

import pytest
import torch
from sklearn import metrics

from ensemblekit.core.confusion import class_report, confusion_matrix


@pytest.mark.parametrize(("num_classes", "num_samples"), [(2, 50), (7, 300), (30, 40)])
def test_counts_recall_and_precision_are_those_of_scikit_learn(num_classes, num_samples):
    generator = torch.Generator().manual_seed(num_classes)
    classes, predicted = torch.randint(num_classes, (2, num_samples), generator=generator)
    confusion = confusion_matrix(predicted, classes, num_classes)
    labels = list(range(num_classes))
    assert confusion.tolist() == metrics.confusion_matrix(classes, predicted, labels=labels).tolist()
    precision, recall, _, count = metrics.precision_recall_fscore_support(
        classes, predicted, labels=labels, zero_division=float("nan")
    )
    report = class_report(confusion)
    assert [entry["count"] for entry in report] == count.tolist()
    for name, expected in (("recall", recall), ("precision", precision)):
        values = [float("nan") if entry[name] is None else entry[name] for entry in report]
        assert values == pytest.approx(expected.tolist(), nan_ok=True)


def test_a_class_is_named_with_the_one_that_it_is_most_often_taken_for():
    report = class_report(torch.tensor([[5, 1, 3], [0, 2, 0], [0, 0, 0]]), ("ant", "bee", "cow"))
    assert [(entry["class"], entry["confused_with"], entry["confused"]) for entry in report] == [
        ("ant", "cow", 3),
        ("bee", None, 0),
        ("cow", None, 0),
    ]
    assert (report[2]["recall"], report[2]["precision"]) == (None, 0.0)
