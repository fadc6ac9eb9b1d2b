"""Tables in CSV or NPZ files, for classification or regression."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from ensemblekit import DataError, DataInfo, Dataset, Splits

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit_datasets.columns import Columns, Kind


class Table(Dataset):
    """Your table in a CSV or NPZ file, for classification or regression.

    Numbers are standardised, and a missing number is replaced by the mean. Other columns are one-hot encoded, with a
    category for missing values; a category that the training rows do not have is encoded as zeros. The preprocessing
    is fitted on the training rows only, without validation and test rows. Targets keep their units.
    In an NPZ file an array (N,) is a column, and an array `x` of shape (N, K) is the columns `x[0]`, `x[1]`, …
    """

    source = "your files"

    path: Path = Field(description="CSV file with a header, or NPZ file, of the training rows")
    target: Annotated[str, Field(min_length=1)] | tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        description="column to predict; a list of columns for regression of several values"
    )
    task: Literal["classification", "regression"] = Field(
        "classification", description="whether to predict a class or real values"
    )
    test_path: Path | None = Field(None, description="file of the test rows, in the same format")
    test_fraction: float = Field(
        0.2, gt=0, lt=1, description="share of the rows held out for testing, by the seed, if there is no test_path"
    )
    categorical: tuple[str, ...] = Field((), description="columns of numbers that are categories")
    delimiter: str = Field(",", min_length=1, max_length=1, description="separator of the fields of a CSV file")

    @field_validator("task")
    @classmethod
    def _one_class_column(cls, task: str, info: ValidationInfo) -> str:
        if task == "classification" and len(_names(info.data.get("target", ""))) != 1:
            raise ValueError("needs exactly one target column: name one, or set task to regression")
        return task

    def load(self, seed: int) -> Splits:
        import torch

        from ensemblekit_datasets.columns import read_columns
        from ensemblekit_datasets.encoding import Encoder

        columns = read_columns(self.path, self.delimiter, self._kinds())
        features = self._features(columns)
        classes = self._classes(columns)
        targets = self._targets(columns, classes)
        rows, validation_rows, test_rows = self._split_rows(targets, seed)
        test_columns, test_targets = columns, targets[test_rows]
        if self.test_path is not None:
            test_columns = read_columns(self.test_path, self.delimiter, columns.kinds)
            test_rows = torch.arange(len(test_columns))
            test_targets = self._targets(test_columns, classes)
        encoder = Encoder.fit(columns, rows, features)
        num_outputs = len(classes) if classes else len(_names(self.target))
        return Splits(
            train=(encoder(columns, rows), targets[rows]),
            validation=(encoder(columns, validation_rows), targets[validation_rows]) if len(validation_rows) else None,
            test=(encoder(test_columns, test_rows), test_targets),
            info=DataInfo(self.task, (encoder.num_features,), num_outputs),
            classes=classes,
        )

    def read_features(self, path: Path, seed: int) -> Tensor:
        """Read the rows of a file with the same columns, by name, and encode them as fitted on the training rows."""
        import torch

        from ensemblekit_datasets.columns import read_columns
        from ensemblekit_datasets.encoding import Encoder

        columns = read_columns(self.path, self.delimiter, self._kinds())
        features = self._features(columns)
        rows, _, _ = self._split_rows(self._targets(columns, self._classes(columns)), seed)
        kinds = columns.kinds
        new_rows = read_columns(path, self.delimiter, {name: kinds[name] for name in features})
        return Encoder.fit(columns, rows, features)(new_rows, torch.arange(len(new_rows)))

    def _features(self, columns: Columns) -> list[str]:
        features = [name for name in columns.by_name if name not in _names(self.target)]
        if not features:
            raise DataError("expected columns besides the target, got none", str(columns.path), "add features")
        return features

    def _split_rows(self, targets: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Split the rows into training, validation and, without a `test_path`, test rows."""
        import torch

        from ensemblekit import generator, hold_out

        random = generator(seed, "table")
        rows = torch.arange(len(targets))
        validation_rows = test_rows = rows[:0]
        if self.test_path is None:
            rows, test_rows = hold_out(targets, self.test_fraction, random)
        if self.validation_fraction > 0:
            kept, held_out = hold_out(targets[rows], self.validation_fraction, random)
            rows, validation_rows = rows[kept], rows[held_out]
        return rows, validation_rows, test_rows

    def _kinds(self) -> dict[str, Kind]:
        """Kinds of the columns that the parameters determine."""
        kinds: dict[str, Kind] = dict.fromkeys(self.categorical, "text")
        for name in _names(self.target):
            kinds[name] = "text" if self.task == "classification" else "number"
        return kinds

    def _classes(self, train: Columns) -> tuple[str, ...] | None:
        """Names of the classes, sorted; as numbers if all are integers."""
        if self.task == "regression":
            return None
        names = {str(name) for name in train.by_name[_names(self.target)[0]] if name is not None}
        if len(names) < 2:
            what = f"expected at least 2 classes, got {sorted(names)}"
            raise DataError(
                what, f'{train.path}, column "{_names(self.target)[0]}"', "set target to the column of classes"
            )
        integers = all(name.removeprefix("-").isdecimal() for name in names)
        return tuple(sorted(names, key=int) if integers else sorted(names))

    def _targets(self, columns: Columns, classes: tuple[str, ...] | None) -> Tensor:
        """Class indices (N,) or real values (N, number of target columns)."""
        import numpy as np
        import torch

        values = [columns.by_name[name] for name in _names(self.target)]
        expected = f"one of {', '.join(classes)}" if classes else "a number"
        for name, column in zip(_names(self.target), values, strict=True):
            for row, value in enumerate(column):
                missing = value is None or value != value
                if missing or (classes and value not in classes):
                    what = f"expected {expected:.200}, got {'nothing' if missing else value}"
                    raise DataError(what, columns.where(row, name), "correct it, or remove the row")
        if classes is None:
            return torch.from_numpy(np.stack(values, axis=1)).float()
        index = {name: number for number, name in enumerate(classes)}
        return torch.tensor([index[value] for value in values[0]])


def _names(target: str | tuple[str, ...]) -> tuple[str, ...]:
    return (target,) if isinstance(target, str) else target
