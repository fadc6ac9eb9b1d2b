"""Named columns of numbers and text, with errors that name line and column."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ensemblekit import DataError
from ensemblekit_datasets.table_files import Array, RawTable

Kind = Literal["number", "text"]
MISSING = frozenset({"", "?", "NA", "N/A", "NaN", "nan", "NULL", "null", "None"})
_BOOLEANS = {"true": 1.0, "false": 0.0}
_DECIMAL_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d*),\d+")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(\.\d{3})+(,\d*)?")


@dataclass(frozen=True)
class Columns:
    """A table of float64 columns, in which nan is a missing value, and of text columns, in which None is."""

    source: str
    """The path of the file, or what error messages call the frame."""
    by_name: dict[str, Array]
    unit: str
    numbers: Sequence[int]
    """Number of each row in the file, in units of `unit`: `line 7`."""
    dates: frozenset[str] = frozenset()
    """Columns whose type says that they are dates or times; they are text here."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def kinds(self) -> dict[str, Kind]:
        """Whether each column holds numbers or text."""
        return {name: "number" if column.dtype.kind == "f" else "text" for name, column in self.by_name.items()}

    def where(self, row: int, column: str) -> str:
        """Describe the location of a field for error messages."""
        return f'{self.source}, {self.unit} {self.numbers[row]}, column "{column}"'

    def num_missing(self, name: str) -> int:
        """Count the rows without a value in a column."""
        column = self.by_name[name]
        return int(np.isnan(column).sum()) if column.dtype.kind == "f" else sum(value is None for value in column)


@dataclass(frozen=True)
class NumberFormat:
    """How numbers are written in text."""

    decimal: Literal[".", ","] = "."

    def number(self, value: str) -> float | None:
        """Read a number; None if the text is not one."""
        if "_" in value:  # Python's own notation for large numbers, which no table means
            return None
        if self.decimal == ",":
            if "." in value and not _THOUSANDS.fullmatch(value):
                return None
            value = value.replace(".", "").replace(",", ".")
        try:
            return float(value)
        except ValueError:
            return None


def typed_columns(
    raw: RawTable, kinds: Mapping[str, Kind | None], number_format: NumberFormat, named_in: str = ""
) -> Columns:
    """Turn columns of a file into numbers or text.

    Args:
        raw: The content of the file.
        kinds: The columns, which must exist, and their kinds; None: inferred.
        number_format: How numbers are written.
        named_in: Who names the columns, for error messages.

    Raises:
        DataError: Columns are missing, or a field is not of its kind.
    """
    check_exist(raw, kinds, named_in)
    typed = {name: _typed(raw, name, kind, number_format) for name, kind in kinds.items()}
    dates = frozenset(name for name in typed if raw.declared.get(name) == "date")
    return Columns(raw.source, typed, raw.unit, raw.numbers, dates)


def check_exist(raw: RawTable, names: Iterable[str], named_in: str = "") -> None:
    """Raise a `DataError` that lists every column that a file does not have."""
    wanted = list(names)
    missing = [name for name in wanted if name not in raw.by_name]
    if missing:
        quoted = ", ".join(f'"{name}"' for name in missing[:20])
        unknown = [name for name in raw.by_name if name not in wanted] if named_in else list(raw.by_name)
        what = f"expected {'a column' if len(missing) == 1 else 'columns'} {quoted}{named_in}"
        got = f"{what}, got {', '.join(unknown) or 'no other columns'}"
        fix = "add it, or correct its name in the header" if named_in else "name an existing column"
        raise DataError(f"{got:.1000}", raw.source, fix)


def without_values(raw: RawTable) -> Columns:
    """The rows of a file without their values, to describe locations in it."""
    return Columns(raw.source, {}, raw.unit, raw.numbers)


def text_values(column: Array) -> list[str | None]:
    """The values of a raw column as text, None where one is missing."""
    return [None if str(value) in MISSING else str(value) for value in column]


def _typed(raw: RawTable, name: str, kind: Kind | None, number_format: NumberFormat) -> Array:
    column, declared = raw.by_name[name], raw.declared.get(name)
    here = without_values(raw)
    if name in raw.refused:
        what = f"expected numbers, text, categories or booleans, got {raw.refused[name]:.200}"
        fix = f'make columns of its parts, or set data.ignore = ["{name}"]'
        raise DataError(what, f'{raw.source}, column "{name}"', fix)
    if kind != "text" and (column.dtype.kind in "biuf" or declared == "number"):
        return _finite(here, name, _floats(column))
    values = text_values(column)
    if kind == "text" or (kind is None and declared is not None):
        return _objects(values)
    numbers = [None if value is None else number_format.number(value) for value in values]
    if kind == "number":  # booleans, where the training table had them as such
        words = zip(values, numbers, strict=True)
        numbers = [_BOOLEANS.get(str(value).lower()) if number is None else number for value, number in words]
    present = [row for row, value in enumerate(values) if value is not None]
    bad = [row for row in present if numbers[row] is None]
    check_decimal_point(here, name, {row: str(values[row]) for row in bad}, number_format)
    # A few words among numbers are mistakes; a few numbers among words are names.
    is_text = len(bad) > len(present) / 2 or not present
    if kind is None and is_text:
        return _objects(values)
    if bad:
        expected = "a number" if kind else "a number as in most rows"
        fix = "correct it" if kind else f'correct it, or set data.categorical = ["{name}"]'
        raise DataError(f"expected {expected}, got {values[bad[0]]!r:.60}", here.where(bad[0], name), fix)
    return _finite(here, name, np.array([np.nan if number is None else number for number in numbers]))


def _objects(values: list[str | None]) -> Array:
    return np.array(values, dtype=object)


def _floats(column: Array) -> Array:
    """Numbers as float64; objects are Python's numbers, or None where one is missing."""
    if column.dtype.kind != "O":
        return column.astype(np.float64)
    return np.array([np.nan if value is None else _float(value) for value in column], dtype=np.float64)


def _float(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf


def check_decimal_point(columns: Columns, name: str, words: Mapping[int, str], number_format: NumberFormat) -> None:
    """Raise a `DataError` if most of the texts that are not numbers, by row, are numbers with a decimal comma."""
    commas = [row for row, value in words.items() if _DECIMAL_COMMA.fullmatch(value)]
    if number_format.decimal == "." and len(commas) > len(words) / 2:
        what = f"expected a number with a decimal point, got {words[commas[0]]!r:.60}"
        raise DataError(what, columns.where(commas[0], name), 'set data.decimal = ","')


def _finite(columns: Columns, name: str, numbers: Array) -> Array:
    infinite = np.flatnonzero(np.isinf(numbers))
    if len(infinite):
        what = f"expected a finite number, got {numbers[infinite[0]]}"
        raise DataError(what, columns.where(int(infinite[0]), name), "correct it, or leave the field empty")
    return numbers
