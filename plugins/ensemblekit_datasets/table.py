"""Tables in files or frames, for classification, multi-label classification or regression."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator

from ensemblekit import DataError, Dataset, Prepared, Problem, Splits

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import InputNetwork
    from ensemblekit_datasets.columns import Kind, NumberFormat
    from ensemblekit_datasets.table_preparation import TablePreparation

Name = Annotated[str, Field(min_length=1)]
ANY_NUMBER = 2**31 - 1


class Table(Dataset):
    """Your table in a CSV, Parquet or NPZ file or in a frame, for classes, labels or real values.

    Numbers are scaled, and missing ones are replaced by the mean or median. Other columns are one-hot encoded, with a
    category for missing values; a category that the training rows do not have is encoded as zeros. The preparation is
    fitted on the training rows only, without validation and test rows, and saved with the run: predictions for new
    files need no training file. In an NPZ file an array (N,) is a column, and an array `x` of shape (N, K) is the
    columns `x[0]`, `x[1]`, … In Python, frames of pandas or polars take the place of the files: `data=frame`.
    """

    source = "your files"

    path: Path | None = Field(
        None,
        description="CSV file with a header, Parquet or NPZ file of the training rows, relative to the current "
        "directory; required unless frames are passed in Python",
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
    group: Name | None = Field(
        None,
        description="column whose groups of rows, such as those of one patient, are never divided between training, "
        "validation and test rows; it is not a feature",
    )
    test_path: Path | None = Field(None, description="file of the test rows, with the same columns")
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
        "rows, 20 if nearly every row has its own",
    )
    scaling: Literal["standard", "quantile", "none"] = Field(
        "standard",
        description="how numbers are scaled: to mean 0 and standard deviation 1, by their quantiles to a normal "
        "distribution, or not at all",
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

    _frames: tuple[Any, ...] = PrivateAttr(())
    _dates_allowed: bool = PrivateAttr(False)

    @field_validator("task")
    @classmethod
    def _one_class_column(cls, task: str, info: ValidationInfo) -> str:
        if task == "classification" and len(_names(info.data.get("target", ""))) != 1:
            raise ValueError("needs exactly one target column: name one, or set task to regression or multilabel")
        if task == "multilabel" and isinstance(info.data.get("target"), str):
            raise ValueError("needs a list of target columns, one for each label")
        return task

    @field_validator("weight", "group", "ignore", "columns", "categorical")
    @classmethod
    def _one_role(cls, names: Any, info: ValidationInfo) -> Any:
        listed = [names] if isinstance(names, str) else names or ()
        both = [name for name in listed if name in _names(info.data.get("target", ""))]
        if both:
            raise ValueError(f'names the target "{both[0]}": leave it out')
        for role in ("weight", "group"):
            if info.field_name != role and info.data.get(role) in listed:
                raise ValueError(f'names the {role} "{info.data[role]}": leave it out')
        return names

    @property
    def known_task(self) -> Literal["classification", "multilabel", "regression"] | None:
        if self.task != "auto":
            return self.task
        return "regression" if len(self.targets) > 1 else None

    @property
    def targets(self) -> tuple[str, ...]:
        """The columns to predict."""
        return _names(self.target)

    @property
    def other_roles(self) -> dict[str, str]:
        """Columns that are used, but neither features nor targets, with their roles."""
        roles = {"weight": self.weight, "group": self.group}
        return {name: role for role, name in roles.items() if name is not None}

    @property
    def frames(self) -> tuple[Any, ...]:
        """The frames that take the place of the files."""
        return self._frames

    @property
    def dates_allowed(self) -> bool:
        """Whether dates are categories like others."""
        return self._dates_allowed

    @property
    def number_format(self) -> NumberFormat:
        """How numbers are written in a CSV file."""
        from ensemblekit_datasets.columns import NumberFormat

        return NumberFormat(self.decimal)

    def kinds(self) -> dict[str, Kind]:
        """Return the kinds of the features that the parameters determine."""
        declared = {name: use for name, use in self.columns.items() if use != "ignore"}
        kinds: dict[str, Kind] = {name: "number" if use == "number" else "text" for name, use in declared.items()}
        return kinds | dict.fromkeys(self.categorical, "text")

    def in_format(self, version: int) -> Self:
        if version > 1:
            return self
        unlimited = {"standardise_targets": False, "max_classes": ANY_NUMBER, "max_categories": ANY_NUMBER}
        old = self.model_copy(update=unlimited)
        old._dates_allowed = True
        return old

    def check_source(self) -> Iterable[Problem]:
        if self.path is None:
            yield Problem("path", "missing", 'write path = "rows.csv"; in Python, frames can be passed with data=…')

    def with_frames(self, frames: Sequence[Any]) -> Self:
        table = self.model_copy(update={"path": None, "test_path": None})
        table._frames = tuple(frames)
        return table

    def load(self, seed: int) -> Splits:
        from ensemblekit_datasets.table_loading import load_table

        return load_table(self, seed)

    def prepare(self, path: Path, preparation: Mapping[str, Any]) -> Prepared:
        from ensemblekit_datasets.table_files import read_raw

        fitted = _fitted(preparation)
        return fitted.prepare(read_raw(path, fitted.delimiter, of_run=True))

    def prepare_frame(self, frame: Any, preparation: Mapping[str, Any]) -> Prepared:
        from ensemblekit_datasets.frames import raw_frame

        return _fitted(preparation).prepare(raw_frame(frame, "the frame"))

    def input_columns(self, preparation: Mapping[str, Any]) -> Mapping[str, float | tuple[str, ...]]:
        return _fitted(preparation).typical_values

    def prepare_columns(self, columns: Mapping[str, Sequence[Any]], preparation: Mapping[str, Any]) -> Prepared:
        return _fitted(preparation).prepare_columns(columns)

    def input_network(self, preparation: Mapping[str, Any]) -> InputNetwork | None:
        from ensemblekit_datasets.table_inputs import table_inputs

        return table_inputs(_fitted(preparation).encoder)

    def describe_inputs(self, inputs: Tensor, preparation: Mapping[str, Any] | None) -> list[dict[str, str]] | None:
        return None if preparation is None else _fitted(preparation).encoder.decode(inputs)

    def read_features(self, path: Path, seed: int) -> Tensor:
        """Read the rows of a file with the same columns, by name, and encode them as fitted on the training rows.

        Only for runs of version 0.1.0, which do not have their preparation.
        """
        from ensemblekit_datasets.columns import typed_columns
        from ensemblekit_datasets.encoding import Encoder
        from ensemblekit_datasets.table_files import read_raw
        from ensemblekit_datasets.table_loading import raw_tables, read_columns, split_rows
        from ensemblekit_datasets.table_targets import target_tensor

        raws = raw_tables(self)
        columns, classes = read_columns(self, raws["train"])
        kinds = {name: kind for name, kind in columns.kinds.items() if name not in self.targets}
        rows = split_rows(self, target_tensor(columns, self.targets, classes), seed, apart=raws)
        new = typed_columns(read_raw(path, self.delimiter), kinds, self.number_format)
        return Encoder.fit(columns, rows["train"], kinds)(new)


def _fitted(preparation: Mapping[str, Any]) -> TablePreparation:
    """Read the preparation that a run has saved."""
    from ensemblekit_datasets.table_preparation import TablePreparation

    try:
        return TablePreparation.from_json(preparation)
    except (KeyError, TypeError, ValueError) as error:
        what = f"the run's preparation of tables has an unexpected structure ({type(error).__name__}: {error})"
        raise DataError(what, "preparation in model.json", "restore the file") from error


def _names(target: str | tuple[str, ...]) -> tuple[str, ...]:
    return (target,) if isinstance(target, str) else target
