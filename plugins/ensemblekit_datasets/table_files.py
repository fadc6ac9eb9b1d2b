"""Raw content of CSV, NPZ and Parquet files, within limits: a file that would exhaust the memory is refused in time."""

from __future__ import annotations

import csv
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import numpy.typing as npt

from ensemblekit import DataError, memory_limit

Array = npt.NDArray[Any]
Declared = Literal["number", "text", "date"]
"""What the type of a column says about it."""
MAX_COLUMNS = 100_000
MAX_LINE = 2**24
"""Longest line of a CSV file in characters."""
SHARE_OF_MEMORY = 0.5
"""Largest part of the memory that the content of a file may take while it is read."""
BYTES_PER_TEXT = 80
"""Size of a short text and of the references to it."""
BYTES_PER_NUMBER = 16
"""Size of a number in the table and in the features."""
CSV_ENDINGS = (".csv", ".tsv", ".txt")
PARQUET_ENDINGS = (".parquet", ".pq")
DELIMITERS = {";": '";"', "\t": r'"\t"', "|": '"|"'}
"""Separators that are suggested, as they are written in TOML."""


@dataclass(frozen=True)
class RawTable:
    """The columns of a file or a frame as they are stored: text of CSV files, arrays of others.

    Arrays of objects have None for missing values.
    """

    source: str
    """The path of the file, or what an error message calls a frame."""
    by_name: dict[str, Array]
    unit: str
    """What a row of the file is: a line or a row."""
    numbers: Sequence[int]
    """Number of each row's line."""
    declared: Mapping[str, Declared] = field(default_factory=dict)
    """What columns are by their types, where the file or frame has types; text is then never taken for numbers."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """The types of columns that cannot be used, such as lists; their values are not read."""

    def __len__(self) -> int:
        return len(self.numbers)


def read_raw(path: Path, delimiter: str, of_run: bool = False) -> RawTable:
    """Read a .csv, .parquet or .npz file; .tsv and .txt are read as CSV, .pq as Parquet.

    Args:
        path: The file.
        delimiter: The separator of the fields of a CSV file.
        of_run: Whether a trained run decides the delimiter, so that the file has to change and not the spec.

    Raises:
        DataError: It cannot be read, is not such a file, or exceeds a limit.
    """
    ending = path.suffix.lower()
    if ending not in (*CSV_ENDINGS, *PARQUET_ENDINGS, ".npz"):
        raise DataError(f'expected a .csv, .parquet or .npz file, got "{path.name}"', str(path), "convert it")
    try:
        if ending in PARQUET_ENDINGS:
            from ensemblekit_datasets.parquet_files import read_parquet

            table = read_parquet(path)
        else:
            table = _read_npz(path) if ending == ".npz" else _read_csv(path, delimiter, of_run)
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        fix = "name a readable table" if of_run else "set data.path to a readable table"
        raise DataError(what, str(path), fix, path=str(path)) from error
    if not len(table):
        raise DataError("expected at least one row, got none", str(path), "use a table with rows")
    return table


def _read_csv(path: Path, delimiter: str, of_run: bool) -> RawTable:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(_lines(file, path, delimiter), delimiter=delimiter, strict=True)
        try:
            names = [name.strip() for name in next(reader, [])]
            _check_header(names, path, delimiter, of_run)
            records = list(_records(reader, len(names), path))
        except UnicodeDecodeError as error:
            where = f"{path}, after line {reader.line_num}"
            raise DataError("expected UTF-8 text", where, "save it as UTF-8") from error
        except csv.Error as error:
            where = f"{path}, after line {reader.line_num}"
            raise DataError(f"not valid CSV: {error}", where, "fix the quotes") from error
    columns = zip(*(record for _, record in records), strict=True) if records else ([] for _ in names)
    by_name = {name: np.array(column, dtype=object) for name, column in zip(names, columns, strict=True)}
    return RawTable(str(path), by_name, "line", [line for line, _ in records])


def _lines(file: TextIO, path: Path, delimiter: str) -> Iterator[str]:
    """Read lines that are not too long to be lines of a table."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise too_much(f"line {number} has more than {MAX_LINE:,} characters", path)
        if line.count(delimiter) >= MAX_COLUMNS:
            raise too_much(f"line {number} has more than {MAX_COLUMNS:,} fields", path)
        yield line


def _check_header(names: list[str], path: Path, delimiter: str, of_run: bool) -> None:
    where = f"{path}, line 1"
    if len(names) == 1:
        for other, written in DELIMITERS.items():
            if other != delimiter and other in names[0]:
                what = f'expected columns separated by "{delimiter}", got one column {names[0]!r:.80}'
                of_table = f'save the file with the delimiter of the training table, "{delimiter}"'
                raise DataError(what, where, of_table if of_run else f"set data.delimiter = {written}")
    unnamed = [index for index, name in enumerate(names, start=1) if not name]
    if unnamed == [1] and len(names) > 1:
        what = "the first column has no name (pandas writes its index)"
        raise DataError(what, where, "give it a name, or write the file with to_csv(index=False)")
    if unnamed and len(names) > 1:
        listed = ", ".join(map(str, unnamed[:20]))
        raise DataError(f"expected a name of every column, got none of column {listed}", where, "name it in the header")
    check_distinct(names, where)


def check_distinct(names: list[str], where: str) -> None:
    """Raise a `DataError` unless columns have names, each its own."""
    repeated = sorted(_repeated(names))
    if repeated or not any(names):
        what = f"expected a header of distinct names, got {repeated or 'nothing'}"
        raise DataError(what, where, "give every column its own name")


def _repeated(names: list[str]) -> set[str]:
    seen: set[str] = set()
    return {name for name in names if name in seen or seen.add(name)}  # type: ignore[func-returns-value]


def _records(reader: Any, num_fields: int, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Read the rows with the numbers of their lines, without empty lines."""
    limit = memory_share()
    needed = 0
    for record in reader:
        if not record:
            continue
        if len(record) != num_fields:
            what = f"expected {num_fields} fields as in the header, got {len(record)}"
            raise DataError(what, f"{path}, line {reader.line_num}", "quote fields that contain the delimiter")
        fields = [field.strip() for field in record]
        needed += BYTES_PER_TEXT * num_fields + sum(map(len, fields))
        if needed > limit:
            raise too_much(f"the first {reader.line_num:,} lines take {memory_size(needed)} in memory", path)
        yield reader.line_num, fields


def _read_npz(path: Path) -> RawTable:
    by_name: dict[str, Array] = {}
    try:
        _check_npz_sizes(path)
        with np.load(path, allow_pickle=False) as arrays:
            for name in arrays.files:
                by_name |= _columns_of(arrays[name], name, path)
    except (ValueError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        what = f"not an NPZ file of numbers and text: {error}"
        raise DataError(what, str(path), "write it with numpy.savez, without objects") from error
    lengths = {name: len(column) for name, column in by_name.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"expected arrays of equal length, got {lengths}", str(path), "give every array one entry per row"
        )
    return RawTable(str(path), by_name, "row", range(max(lengths.values(), default=0)))


def _check_npz_sizes(path: Path) -> None:
    """Refuse a file by the sizes that it declares, before any array is allocated."""
    needed, num_columns = 0.0, 0
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if not entry.filename.endswith(".npy"):
                continue
            with archive.open(entry) as file:
                shape, dtype = _npy_header(file)
            count = abs(math.prod(shape))
            text_bytes = 0 if dtype.kind in "biuf" else BYTES_PER_TEXT + dtype.itemsize
            needed += max(entry.file_size, count * dtype.itemsize) + count * (BYTES_PER_NUMBER + text_bytes)
            num_columns += shape[1] if len(shape) == 2 else 1
    if needed > memory_share():
        raise too_much(f"its arrays take {memory_size(needed)} in memory", path)
    if num_columns > MAX_COLUMNS:
        raise too_much(f"it has {num_columns:,} columns", path)


def _npy_header(file: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    return shape, dtype


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


def too_much(what: str, path: Path) -> DataError:
    """Return the error about a table that exceeds a limit."""
    memory = memory_size(memory_share())
    limits = f"{MAX_COLUMNS:,} columns, {MAX_LINE:,} characters in a line, {memory} in memory (half of it)"
    return DataError(f"too large for a table: {what}", str(path), f"stay below the limits: {limits}")


def memory_share() -> float:
    """Return how many bytes a table may take."""
    return SHARE_OF_MEMORY * memory_limit()


def memory_size(num_bytes: float) -> str:
    """Write a number of bytes for people."""
    return f"{num_bytes / 2**30:.3g} GiB"
