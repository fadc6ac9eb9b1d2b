"""Targets of a table: what a column predicts, and a question where that is not clear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ensemblekit import DataError
from ensemblekit_datasets.columns import Columns, NumberFormat, check_decimal_point, text_values, without_values
from ensemblekit_datasets.dates import ADVICE, are_dates
from ensemblekit_datasets.table_files import RawTable

Task = Literal["classification", "regression"]
FEW_VALUES = 20
"""Up to so many different integers are classes; more different decimal fractions are real values."""
MAX_CLASSES = 100
"""Larger numbers of classes have to be confirmed."""


def infer_task(raw: RawTable, name: str, number_format: NumberFormat) -> Task:
    """Decide by the values of the target column; a `DataError` asks where both tasks make sense.

    Text is classes, and so are integers with few different values, each repeated. Decimal fractions with many
    different values are real values.
    """
    declared = raw.declared.get(name)
    if raw.by_name[name].dtype.kind in "biuf" or declared == "number":
        number_format = NumberFormat()  # an array of numbers, whatever the notation in text
    by_row = {row: value for row, value in enumerate(text_values(raw.by_name[name])) if value is not None}
    values = list(by_row.values())
    where = f'{raw.source}, column "{name}"'
    if declared == "date" or are_dates(values):
        fix = f'{ADVICE}; or set data.task = "classification"'
        raise DataError("expected classes or numbers to predict, got dates or times", where, fix)
    if declared == "text":
        return "classification"
    numbers = [number_format.number(value) for value in values]
    words = {row: value for (row, value), number in zip(by_row.items(), numbers, strict=True) if number is None}
    check_decimal_point(without_values(raw), name, words, number_format)
    if not values or any(number is None or not math.isfinite(number) for number in numbers):
        return "classification"
    different = len(set(numbers))
    if any(number != round(number) for number in numbers if number is not None):
        if different > FEW_VALUES:
            return "regression"
        what = f"the target has decimal fractions, but only {different} different values"
    elif different <= min(FEW_VALUES, max(2, len(values) // 2)):
        return "classification"
    else:
        what = f"the target has {different} different integers in {len(values):,} rows"
    raise DataError(what, where, 'choose: data.task = "classification", or data.task = "regression"')


def class_names(columns: Columns, name: str, number_format: NumberFormat, max_classes: int | None) -> tuple[str, ...]:
    """Return the names of the classes, sorted; as numbers if all are integers.

    Raises:
        DataError: There are fewer than two classes, or so many that this may be a mistake.
    """
    values = [value for value in columns.by_name[name] if value is not None]
    names = set(values)
    where = f'{columns.source}, column "{name}"'
    if len(names) < 2:
        raise DataError(
            f"expected at least 2 classes, got {sorted(names)}", where, "set target to the column of classes"
        )
    numbers = [number_format.number(value) for value in names]
    are_numbers = all(number is not None for number in numbers)
    are_fractions = are_numbers and any(number != round(number) for number in numbers if number is not None)
    if max_classes is None:
        max_classes = FEW_VALUES if are_fractions or len(names) > len(values) / 2 else MAX_CLASSES
    if len(names) > max_classes:
        what = f"{len(names):,} classes in {len(values):,} rows, such as {', '.join(sorted(names)[:3])}"
        regression = 'data.task = "regression", ' if are_numbers else ""
        fix = f"choose: {regression}another data.target, or data.max_classes = {len(names)}"
        raise DataError(f"{what:.300}", where, fix)
    integers = all(name.removeprefix("-").isdecimal() for name in names)
    return tuple(sorted(names, key=int) if integers else sorted(names))


def target_tensor(
    columns: Columns, names: Sequence[str], classes: tuple[str, ...] | None, are_labels: bool = False
) -> Tensor:
    """Return class indices (N,), or labels or real values in float64 (N, number of target columns).

    Raises:
        DataError: A target is missing, is not one of the classes, or is a label other than 0 and 1.
    """
    expected = f"one of {', '.join(classes)}" if classes else "0 or 1" if are_labels else "a number"
    known: set[str | float] = {0.0, 1.0} if are_labels else set(classes or ())
    for name in names:
        for row, value in enumerate(columns.by_name[name]):
            missing = value is None or value != value
            if missing or (known and value not in known):
                what = f"expected {expected:.200}, got {'nothing' if missing else value}"
                raise DataError(what, columns.where(row, name), "correct it, or remove the row")
    values = [columns.by_name[name] for name in names]
    if classes is None:
        return torch.from_numpy(np.stack(values, axis=1))
    index = {name: number for number, name in enumerate(classes)}
    return torch.tensor([index[value] for value in values[0]])


def group_tensor(columns: Columns, name: str) -> Tensor:
    """Return the numbers of the rows' groups, int64 (N,), in the order in which groups appear.

    Raises:
        DataError: A row has no group.
    """
    numbers: dict[str, int] = {}
    for row, value in enumerate(columns.by_name[name]):
        if value is None:
            raise DataError("expected a group, got nothing", columns.where(row, name), "correct it, or remove the row")
        numbers.setdefault(value, len(numbers))
    return torch.tensor([numbers[value] for value in columns.by_name[name]])


def weight_tensor(columns: Columns, name: str) -> Tensor:
    """Return the weights of the rows, float64 (N,).

    Raises:
        DataError: A weight is missing or less than 0.
    """
    for row, value in enumerate(columns.by_name[name]):
        if not value >= 0:
            what = f"expected a weight of at least 0, got {'nothing' if value != value else value}"
            raise DataError(what, columns.where(row, name), "correct it, or remove the row")
    return torch.from_numpy(columns.by_name[name])
