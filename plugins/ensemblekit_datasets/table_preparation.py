"""The fitted preparation of a table: everything that a run needs to read a new file, as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ensemblekit import DataError, Prepared
from ensemblekit_datasets.columns import Kind, NumberFormat, check_exist, typed_columns
from ensemblekit_datasets.encoding import Category, Encoder, feature_from_json
from ensemblekit_datasets.table_columns import ColumnSummary
from ensemblekit_datasets.table_files import RawTable
from ensemblekit_datasets.table_targets import target_tensor

OF_THE_RUN = " of the run's training table"


@dataclass(frozen=True)
class TablePreparation:
    """How rows become inputs and targets."""

    encoder: Encoder
    targets: tuple[str, ...]
    """Names of the target columns."""
    classes: tuple[str, ...] | None
    delimiter: str
    number_format: NumberFormat

    @property
    def kinds(self) -> dict[str, Kind]:
        """The features by name, with their kinds."""
        return {f.name: "text" if isinstance(f, Category) else "number" for f in self.encoder.features}

    def prepare(self, raw: RawTable) -> Prepared:
        """Prepare the rows of a file or a frame; columns may be in any order, and other columns are left out."""
        inputs = self.encoder(typed_columns(raw, self.kinds, self.number_format, OF_THE_RUN))
        try:
            check_exist(raw, self.targets, " to predict")
            kinds: dict[str, Kind] = dict.fromkeys(self.targets, "text" if self.classes else "number")
            columns = typed_columns(raw, kinds, self.number_format)
            return Prepared(inputs, target_tensor(columns, self.targets, self.classes))
        except DataError as error:
            return Prepared(inputs, no_targets=error)

    @property
    def typical_values(self) -> dict[str, float | tuple[str, ...]]:
        """The features by name: the fill value of numbers, or the categories."""
        return {f.name: f.categories if isinstance(f, Category) else f.fill for f in self.encoder.features}

    def prepare_columns(self, columns: Mapping[str, Sequence[Any]]) -> Prepared:
        """Prepare rows that are in memory: a number or a text per row and feature, None where it is missing."""
        arrays = {
            name: np.array(columns[name], dtype=np.float64 if kind == "number" else object)
            for name, kind in self.kinds.items()
        }
        num_rows = len(next(iter(arrays.values()), ()))
        raw = RawTable("rows", arrays, "row", range(1, num_rows + 1))
        return Prepared(self.encoder(typed_columns(raw, self.kinds, self.number_format)))

    def to_json(self, described: list[ColumnSummary]) -> dict[str, Any]:
        """Return plain values; `described` are the columns of the training file."""
        fitted = {feature.name: feature.to_json() for feature in self.encoder.features}
        columns = [
            {"name": c.name, "role": c.role, "missing": c.missing, **fitted.get(c.name, {"kind": c.kind or None})}
            for c in described
        ]
        return {
            "columns": columns,
            "targets": list(self.targets),
            "classes": None if self.classes is None else list(self.classes),
            "delimiter": self.delimiter,
            "decimal": self.number_format.decimal,
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> TablePreparation:
        """Make a preparation from the result of `to_json`."""
        features = tuple(feature_from_json(column) for column in saved["columns"] if column["role"] == "feature")
        classes = None if saved["classes"] is None else tuple(map(str, saved["classes"]))
        number_format = NumberFormat(saved["decimal"])
        if number_format.decimal not in (".", ","):
            raise ValueError(f"decimal = {number_format.decimal!r}")
        return cls(Encoder(features), tuple(saved["targets"]), classes, saved["delimiter"], number_format)
