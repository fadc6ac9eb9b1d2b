"""Reading of CSV and NPZ files as named columns, with errors that name line and column."""

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
    """A table of float64 columns, in which nan is a missing value, and of text columns, in which None is."""

    path: Path
    by_name: dict[str, Array]
    row_labels: Sequence[str]
    """Location of each row in the file: `line 7`."""

    def __len__(self) -> int:
        return len(self.row_labels)

    @property
    def kinds(self) -> dict[str, Kind]:
        """Whether each column holds numbers or text."""
        return {name: "number" if column.dtype.kind == "f" else "text" for name, column in self.by_name.items()}

    def where(self, row: int, column: str) -> str:
        """Describe the location of a field for error messages."""
        return f'{self.path}, {self.row_labels[row]}, column "{column}"'


def read_columns(path: Path, delimiter: str, kinds: Mapping[str, Kind]) -> Columns:
    """Read the columns of a .csv or .npz file.

    Args:
        path: The file; .tsv and .txt are read as CSV.
        delimiter: Separator of the fields of a CSV file.
        kinds: Columns that must exist and whether they are numbers or text; the kind of others is inferred.

    Raises:
        DataError: The file cannot be read, a column is missing, there are no rows, or a field is not of its kind.
    """
    if path.suffix.lower() not in (".csv", ".tsv", ".txt", ".npz"):
        raise DataError(f'expected a .csv or .npz file, got "{path.name}"', str(path), "convert it")
    try:
        columns = _read_npz(path) if path.suffix.lower() == ".npz" else _read_csv(path, delimiter)
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror or error}", str(path), "set the path of a readable table"
        ) from error
    for name in kinds:
        if name not in columns.by_name:
            what = f'expected a column "{name}", got {", ".join(columns.by_name)}'
            raise DataError(what, str(path), "name an existing column")
    if not len(columns):
        raise DataError("expected at least one row, got none", str(path), "use a table with rows")
    typed = {name: _typed(columns, name, kinds.get(name)) for name in columns.by_name}
    return Columns(path, typed, columns.row_labels)


def _read_csv(path: Path, delimiter: str) -> Columns:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            lines = [(reader.line_num, record) for record in reader]
        except UnicodeDecodeError as error:
            where = f"{path}, after line {reader.line_num}"
            raise DataError("expected UTF-8 text", where, "save it as UTF-8") from error
        except csv.Error as error:
            where = f"{path}, after line {reader.line_num}"
            raise DataError(f"not valid CSV: {error}", where, "fix the quotes") from error
    header, *records = lines or [(1, [])]
    names = [name.strip() for name in header[1]]
    repeated = sorted({name for name in names if names.count(name) > 1 or not name})
    if repeated or not names:
        what = f"expected a header of distinct names, got {repeated or 'nothing'}"
        raise DataError(what, f"{path}, line 1", "give every column its own name")
    records = [(line, record) for line, record in records if record]  # without empty lines
    for line, record in records:
        if len(record) != len(names):
            what = f"expected {len(names)} fields as in the header, got {len(record)}"
            raise DataError(what, f"{path}, line {line}", "quote fields that contain the delimiter")
    by_name = {
        name: np.array([record[i].strip() for _, record in records], dtype=object) for i, name in enumerate(names)
    }
    return Columns(path, by_name, [f"line {line}" for line, _ in records])


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
        raise DataError(
            f"expected arrays of equal length, got {lengths}", str(path), "give every array one entry per row"
        )
    return Columns(path, by_name, [f"row {row}" for row in range(max(lengths.values(), default=0))])


def _columns_of(array: Array, name: str, path: Path) -> dict[str, Array]:
    """Split an array into columns: (N,) is one column, (N, K) is K columns called `name[0]`, `name[1]`, …"""
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
    # A few words among numbers are mistakes; a few numbers among words are names.
    is_text = len(bad) > len(present) / 2 or not present
    if kind == "text" or (kind is None and is_text):
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
