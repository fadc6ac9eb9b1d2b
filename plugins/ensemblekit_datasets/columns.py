"""Reads CSV and NPZ files as named columns, and says where they are not what they should be."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ensemblekit import DataError

Array = npt.NDArray[Any]
Kind = Literal["number", "text"]
MISSING = frozenset({"", "?", "NA", "N/A", "NaN", "nan", "NULL", "null", "None"})


@dataclass(frozen=True)
class Columns:
    """A table: float64 columns with nan for what is missing, and columns of text with None for it."""

    path: Path
    by_name: dict[str, Array]
    row_labels: Sequence[str]
    """Where each row is in the file: `line 7`."""

    def __len__(self) -> int:
        return len(self.row_labels)

    @property
    def kinds(self) -> dict[str, Kind]:
        return {name: "number" if column.dtype.kind == "f" else "text" for name, column in self.by_name.items()}

    def where(self, row: int, column: str) -> str:
        return f'{self.path}, {self.row_labels[row]}, column "{column}"'


def read_columns(path: Path, delimiter: str, kinds: Mapping[str, Kind]) -> Columns:
    """The columns of a .csv or .npz file; those in `kinds` must be there, the kind of others is seen from the rows."""
    if path.suffix.lower() not in (".csv", ".tsv", ".txt", ".npz"):
        raise DataError(f'expected a .csv or .npz file, got "{path.name}"', str(path), "convert it")
    try:
        columns = _read_npz(path) if path.suffix.lower() == ".npz" else _read_csv(path, delimiter)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", str(path), "give the path of a table") from error
    for name in kinds:
        if name not in columns.by_name:
            what = f'expected a column "{name}", got {", ".join(columns.by_name)}'
            raise DataError(what, str(path), "name a column that there is")
    if not len(columns):
        raise DataError("expected at least one row, got none", str(path), "give a table with rows")
    typed = {name: _typed(columns, name, kinds.get(name)) for name in columns.by_name}
    return Columns(path, typed, columns.row_labels)


def _read_csv(path: Path, delimiter: str) -> Columns:
    records: list[list[str]] = []
    row_labels: list[str] = []
    line = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            names = [name.strip() for name in next(reader, [])]
            for record in reader:
                line = reader.line_num
                if len(record) not in (0, len(names)):
                    what = f"expected {len(names)} fields as in the header, got {len(record)}"
                    raise DataError(what, f"{path}, line {line}", "quote fields that contain the delimiter")
                if record:
                    records.append([field.strip() for field in record])
                    row_labels.append(f"line {line}")
    except UnicodeDecodeError as error:
        raise DataError("expected UTF-8 text", f"{path}, after line {line}", "save it as UTF-8") from error
    except csv.Error as error:
        raise DataError(f"not CSV: {error}", f"{path}, after line {line}", "mend the quotes") from error
    doubled = sorted({name for name in names if names.count(name) > 1 or not name})
    if doubled or not names:
        what = f"expected a header of distinct names, got {doubled or 'nothing'}"
        raise DataError(what, f"{path}, line 1", "name every column once")
    by_name = {name: np.array([record[i] for record in records], dtype=object) for i, name in enumerate(names)}
    return Columns(path, by_name, row_labels)


def _read_npz(path: Path) -> Columns:
    by_name: dict[str, Array] = {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for name in arrays.files:
                by_name |= _columns_of(arrays[name], name, path)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        what = f"not an NPZ file of numbers and text: {error}"
        raise DataError(what, str(path), "write it with numpy.savez, without objects") from error
    lengths = {name: len(column) for name, column in by_name.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"expected arrays of one length, got {lengths}", str(path), "give each row one entry")
    return Columns(path, by_name, [f"row {row}" for row in range(max(lengths.values(), default=0))])


def _columns_of(array: Array, name: str, path: Path) -> dict[str, Array]:
    """An array (N,) is a column, an array (N, K) is K columns called `name[0]`, `name[1]`, …"""
    if array.ndim not in (1, 2):
        what = f"expected shape (rows,) or (rows, columns), got {array.shape}"
        raise DataError(what, f'{path}, array "{name}"', "reshape it")
    if array.dtype.kind == "S":
        array = np.char.decode(array, "utf-8")
    if array.ndim == 1:
        return {name: array}
    return {f"{name}[{column}]": array[:, column] for column in range(array.shape[1])}


def _typed(columns: Columns, name: str, kind: Kind | None) -> Array:
    column = columns.by_name[name]
    if column.dtype.kind in "biuf" and kind != "text":
        return _finite(columns, name, column.astype(np.float64))
    values = [None if str(value) in MISSING else str(value) for value in column]
    numbers = [_number(value) for value in values]
    present = [row for row, value in enumerate(values) if value is not None]
    bad = [row for row in present if numbers[row] is None]
    # a few words among numbers are slips; a few numbers among words are names
    mostly_words = len(bad) > len(present) / 2 or not present
    if kind == "text" or (kind is None and mostly_words):
        return np.array(values, dtype=object)
    if bad:
        expected = "a number" if kind else "a number as in most rows"
        fix = "correct it" if kind else f'correct it, or set categorical = ["{name}"]'
        raise DataError(f"expected {expected}, got {values[bad[0]]!r:.60}", columns.where(bad[0], name), fix)
    return _finite(columns, name, np.array([np.nan if number is None else number for number in numbers]))


def _finite(columns: Columns, name: str, numbers: Array) -> Array:
    infinite = np.flatnonzero(np.isinf(numbers))
    if len(infinite):
        what = f"expected a finite number, got {numbers[infinite[0]]}"
        raise DataError(what, columns.where(int(infinite[0]), name), "correct it, or leave the field empty")
    return numbers


def _number(value: str | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return None
