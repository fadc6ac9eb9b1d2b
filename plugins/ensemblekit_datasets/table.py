"""Tables in CSV or NPZ files, for classification, multi-label classification or regression."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator

from ensemblekit import DataError, DataInfo, Dataset, Prepared, Splits

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import InputNetwork
    from ensemblekit_datasets.columns import Columns, Kind, NumberFormat
    from ensemblekit_datasets.table_files import RawTable
    from ensemblekit_datasets.table_preparation import TablePreparation

Name = Annotated[str, Field(min_length=1)]
ANY_NUMBER = 2**31 - 1


class Table(Dataset):
    """Your table in a CSV or NPZ file, for classification, multi-label classification or regression.

    Numbers are standardised, and a missing number is replaced by the mean. Other columns are one-hot encoded, with a
    category for missing values; a category that the training rows do not have is encoded as zeros. The preparation is
    fitted on the training rows only, without validation and test rows, and saved with the run: predictions for new
    files need no training file. In an NPZ file an array (N,) is a column, and an array `x` of shape (N, K) is the
    columns `x[0]`, `x[1]`, …
    """

    source = "your files"

    path: Path = Field(
        description="CSV file with a header, or NPZ file, of the training rows; relative to the current directory"
    )
    target: Name | Annotated[tuple[Name, ...], Field(min_length=1)] = Field(
        description="column to predict; a list of columns for regression of several values, or of labels of 0 and 1 if "
        "the task is multilabel"
    )
    task: Literal["auto", "classification", "multilabel", "regression"] = Field(
        "auto",
        description="whether to predict a class, labels or real values; auto: a class if the target is text or has few "
        "different integers, real values if it has many different decimal fractions, else an error that asks",
    )
    weight: Name | None = Field(
        None,
        description="column of numbers of at least 0 that says how much each training row counts in the objective; it "
        "is not a feature, and metrics are not weighted",
    )
    test_path: Path | None = Field(None, description="file of the test rows, in the same format")
    test_fraction: float = Field(
        0.2, gt=0, lt=1, description="share of the rows held out for testing, by the seed, if there is no test_path"
    )
    ignore: tuple[Name, ...] = Field((), description="columns that are not used")
    columns: dict[Name, Literal["number", "category", "ignore"]] = Field(
        {}, description="how to use single columns, by name; others are numbers if most of their values are"
    )
    categorical: tuple[str, ...] = Field((), description='columns of numbers that are categories; short for "columns"')
    max_categories: int | None = Field(
        None,
        ge=1,
        description="most categories of a column that is not in columns; default: 1000, 50 if they are a fifth of the "
        "rows, 20 if nearly every row has its own, and no dates",
    )
    max_classes: int | None = Field(
        None,
        ge=2,
        description="most classes; default: 100, and 20 if the target has decimal fractions or half as many classes "
        "as rows",
    )
    standardise_targets: bool = Field(
        True, description="standardise real targets for training; predictions are in the original units in any case"
    )
    delimiter: str = Field(",", min_length=1, max_length=1, description="separator of the fields of a CSV file")
    decimal: Literal[".", ","] = Field(".", description="decimal separator of numbers in a CSV file")

    @field_validator("task")
    @classmethod
    def _one_class_column(cls, task: str, info: ValidationInfo) -> str:
        if task == "classification" and len(_names(info.data.get("target", ""))) != 1:
            raise ValueError("needs exactly one target column: name one, or set task to regression or multilabel")
        if task == "multilabel" and isinstance(info.data.get("target"), str):
            raise ValueError("needs a list of target columns, one for each label")
        return task

    @field_validator("weight", "ignore", "columns", "categorical")
    @classmethod
    def _not_the_target(cls, names: Any, info: ValidationInfo) -> Any:
        listed = [names] if isinstance(names, str) else names or ()
        both = [name for name in listed if name in _names(info.data.get("target", ""))]
        if both:
            raise ValueError(f'names the target "{both[0]}": leave it out')
        if info.field_name != "weight" and info.data.get("weight") in listed:
            raise ValueError(f'names the weight "{info.data["weight"]}": leave it out')
        return names

    @property
    def known_task(self) -> Literal["classification", "multilabel", "regression"] | None:
        if self.task != "auto":
            return self.task
        return "regression" if len(_names(self.target)) > 1 else None

    def in_format(self, version: int) -> Self:
        unlimited = {"standardise_targets": False, "max_classes": ANY_NUMBER, "max_categories": ANY_NUMBER}
        return self if version > 1 else self.model_copy(update=unlimited)

    def load(self, seed: int) -> Splits:
        from ensemblekit_datasets.columns import typed_columns
        from ensemblekit_datasets.encoding import Encoder
        from ensemblekit_datasets.table_columns import check_categories, plan_rows, summaries
        from ensemblekit_datasets.table_files import read_raw
        from ensemblekit_datasets.table_preparation import TablePreparation
        from ensemblekit_datasets.table_targets import target_tensor, weight_tensor

        raw = read_raw(self.path.absolute(), self.delimiter)
        columns, classes = self._read(raw)
        task = self.known_task or ("classification" if classes else "regression")
        features = [name for name in columns.by_name if name not in (*_names(self.target), self.weight)]
        undeclared = (name for name in features if name not in self._kinds())
        check_categories(columns, undeclared, self.max_categories, self.ignore)
        are_labels = task == "multilabel"
        targets = target_tensor(columns, _names(self.target), classes, are_labels)
        rows, validation_rows, test_rows = self._split_rows(targets, seed)
        encoder = Encoder.fit(columns, rows, features, self.ignore)
        test = (encoder(columns, test_rows), targets[test_rows])
        indices = {"train": rows, "validation": validation_rows, "test": test_rows}
        if self.test_path is not None:
            test_raw = read_raw(self.test_path.absolute(), self.delimiter)
            kinds = {name: kind for name, kind in columns.kinds.items() if name != self.weight}
            test_columns = typed_columns(test_raw, kinds, self._number_format())
            test = (encoder(test_columns), target_tensor(test_columns, _names(self.target), classes, are_labels))
            del indices["test"]  # all rows of their own file
        described = summaries(raw.by_name, columns, encoder, _names(self.target), classes, self.weight)
        preparation = TablePreparation(encoder, _names(self.target), classes, self.delimiter, self._number_format())
        num_outputs = len(classes) if classes else len(_names(self.target))
        return Splits(
            train=(encoder(columns, rows), targets[rows]),
            validation=(encoder(columns, validation_rows), targets[validation_rows]) if len(validation_rows) else None,
            test=test,
            info=DataInfo(task, (encoder.num_features,), num_outputs),
            classes=_names(self.target) if are_labels else classes,
            notes=plan_rows(described, encoder.num_features),
            standardise_targets=self.standardise_targets and task == "regression",
            preparation=preparation.to_json(described),
            indices=indices,
            weights=None if self.weight is None else weight_tensor(columns, self.weight)[rows],
        )

    def prepare(self, path: Path, preparation: Mapping[str, Any]) -> Prepared:
        return _fitted(preparation).prepare(path)

    def input_network(self, preparation: Mapping[str, Any]) -> InputNetwork | None:
        from ensemblekit_datasets.table_inputs import table_inputs

        return table_inputs(_fitted(preparation).encoder)

    def describe_inputs(self, inputs: Tensor, preparation: Mapping[str, Any] | None) -> list[dict[str, str]] | None:
        from ensemblekit_datasets.table_preparation import TablePreparation

        if preparation is None:
            return None
        return TablePreparation.from_json(preparation).encoder.decode(inputs)

    def read_features(self, path: Path, seed: int) -> Tensor:
        """Read the rows of a file with the same columns, by name, and encode them as fitted on the training rows.

        Only for runs of version 0.1.0, which do not have their preparation.
        """
        from ensemblekit_datasets.columns import typed_columns
        from ensemblekit_datasets.encoding import Encoder
        from ensemblekit_datasets.table_files import read_raw
        from ensemblekit_datasets.table_targets import target_tensor

        columns, classes = self._read(read_raw(self.path.absolute(), self.delimiter))
        kinds = {name: kind for name, kind in columns.kinds.items() if name not in _names(self.target)}
        rows, _, _ = self._split_rows(target_tensor(columns, _names(self.target), classes), seed)
        new = typed_columns(read_raw(path, self.delimiter), kinds, self._number_format())
        return Encoder.fit(columns, rows, kinds)(new)

    def _read(self, raw: RawTable) -> tuple[Columns, tuple[str, ...] | None]:
        """Return the columns that are used, and the names of the classes, None for labels and real values."""
        from ensemblekit_datasets.columns import check_exist, typed_columns
        from ensemblekit_datasets.table_targets import class_names, infer_task

        ignored = {*self.ignore, *(name for name, use in self.columns.items() if use == "ignore")}
        given = self._kinds()
        weight = () if self.weight is None else (self.weight,)
        check_exist(raw, [*_names(self.target), *weight, *given, *ignored])
        if set(raw.by_name) <= {*_names(self.target), *weight, *ignored}:
            raise DataError("expected columns besides the target, got none", str(raw.path), "add features")
        task = self.known_task or infer_task(raw, _names(self.target)[0], self._number_format())
        given |= dict.fromkeys(_names(self.target), "text" if task == "classification" else "number")
        given |= dict.fromkeys(weight, "number")
        used = {name: given.get(name) for name in raw.by_name if name not in ignored}
        columns = typed_columns(raw, used, self._number_format())
        if task != "classification":
            return columns, None
        return columns, class_names(columns, _names(self.target)[0], self._number_format(), self.max_classes)

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
        """Kinds of the features that the parameters determine."""
        declared = {name: use for name, use in self.columns.items() if use != "ignore"}
        kinds: dict[str, Kind] = {name: "number" if use == "number" else "text" for name, use in declared.items()}
        return kinds | dict.fromkeys(self.categorical, "text")

    def _number_format(self) -> NumberFormat:
        from ensemblekit_datasets.columns import NumberFormat

        return NumberFormat(self.decimal)


def _fitted(preparation: Mapping[str, Any]) -> TablePreparation:
    from ensemblekit_datasets.table_preparation import TablePreparation

    try:
        return TablePreparation.from_json(preparation)
    except (KeyError, TypeError, ValueError) as error:
        what = f"the run's preparation of tables has an unexpected structure ({type(error).__name__}: {error})"
        raise DataError(what, "preparation in model.json", "restore the file") from error


def _names(target: str | tuple[str, ...]) -> tuple[str, ...]:
    return (target,) if isinstance(target, str) else target
