"""Files of predictions: outputs by split and sample index, in .safetensors, .npz or .csv files."""

from __future__ import annotations

import csv
import math
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ensemblekit import DataError, memory_limit

Array = npt.NDArray[Any]
SPLITS = ("train", "validation", "test")
SHARE_OF_MEMORY = 0.5
"""Largest part of the memory that the content of a file may take while it is read."""
BYTES_PER_CHARACTER = 32
"""Memory that a character of a CSV file takes at most while it is read: a text and a number for each two of them."""
INDEX_COLUMNS = ["split", "index"]


def read_predictions(path: Path) -> dict[str, Tensor]:
    """Read the arrays of a file by the names of their splits: float32 (N, C), nan for samples that a CSV file lacks.

    Raises:
        DataError: The file is missing, cannot be read, is too large, or does not have such arrays.
    """
    readers = {".safetensors": _read_safetensors, ".npz": _read_npz, ".csv": _read_csv}
    if path.suffix.lower() not in readers:
        what = f'expected a .safetensors, .npz or .csv file, got "{path.name}"'
        raise DataError(what, str(path), "convert it", path=str(path))
    try:
        arrays = readers[path.suffix.lower()](path)
    except OSError as error:
        what = f"predictions cannot be read: {error.strerror or error}"
        raise DataError(what, str(path), "set path to a readable file of predictions", path=str(path)) from error
    _check_arrays(arrays, path)
    return {name: array.float() for name, array in arrays.items()}


def _check_arrays(arrays: Mapping[str, Tensor], path: Path) -> None:
    """Raise a `DataError` unless the arrays are those of splits, of numbers, with the same number of columns."""
    names = "arrays called train, test and, if it has its own samples, validation"
    if unknown := sorted(arrays.keys() - set(SPLITS)):
        raise DataError(f'expected {names}, got "{unknown[0]}"', str(path), "rename it", path=str(path))
    if missing := sorted({"train", "test"} - arrays.keys()):
        raise DataError(f'expected {names}, got no "{missing[0]}"', str(path), "add it", path=str(path))
    for name, array in arrays.items():
        if array.ndim != 2 or not array.numel():
            what = f"expected shape (samples, outputs), got {tuple(array.shape)}"
            raise DataError(what, f'{path}, array "{name}"', "reshape it", path=str(path))
        if bool(array.isinf().any()):
            raise DataError("expected finite numbers", f'{path}, array "{name}"', "correct them", path=str(path))
    columns = {name: array.shape[1] for name, array in arrays.items()}
    if len(set(columns.values())) > 1:
        what = f"expected the same number of outputs in all arrays, got {columns}"
        raise DataError(what, str(path), "write all outputs of each sample", path=str(path))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    _check_size(path.stat().st_size, path)
    try:
        return load(path.read_bytes())
    except SafetensorError as error:
        raise _not_a("safetensors file", error, path, "safetensors.torch.save_file") from error


def _read_npz(path: Path) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            _check_size(sum(_declared_size(archive, entry) for entry in archive.infolist()), path)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: _numbers(arrays[name], name, path) for name in arrays.files}
    except (ValueError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        raise _not_a("NPZ file of numbers", error, path, "numpy.savez") from error


def _declared_size(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> int:
    """Return the number of bytes that an array of an archive takes, without reading it."""
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    return max(entry.file_size, math.prod(shape) * max(dtype.itemsize, 8))


def _numbers(array: Array, name: str, path: Path) -> Tensor:
    if array.dtype.kind not in "biuf":
        raise DataError(f"expected numbers, got {array.dtype}", f'{path}, array "{name}"', "convert it", path=str(path))
    return torch.from_numpy(array.astype(np.float32))


def _read_csv(path: Path) -> dict[str, Tensor]:
    """Read rows `split, index, outputs…`, in any order."""
    _check_size(BYTES_PER_CHARACTER * path.stat().st_size, path)
    rows: dict[str, dict[int, list[float]]] = {}
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            if header[:2] != INDEX_COLUMNS or len(header) < 3:
                what = f"expected the columns split, index and one for each output, got {', '.join(header[:5])!r:.80}"
                raise DataError(what, f"{path}, line 1", "name the columns so", path=str(path))
            for row in reader:
                if row:
                    _add_row(rows, row, len(header), f"{path}, line {reader.line_num}")
        except (UnicodeDecodeError, csv.Error) as error:
            raise _not_a(f"CSV file of UTF-8 text after line {reader.line_num}", error, path, "csv.writer") from error
    return {split: _in_order(by_index, path) for split, by_index in rows.items()}


def _add_row(rows: dict[str, dict[int, list[float]]], row: list[str], num_fields: int, where: str) -> None:
    if len(row) != num_fields:
        raise DataError(f"expected {num_fields} fields as in the header, got {len(row)}", where, "complete the row")
    by_index = rows.setdefault(row[0].strip(), {})
    try:
        index, values = int(row[1]), [float(value) for value in row[2:]]
    except ValueError as error:
        raise DataError(f"expected numbers: {error}", where, "correct the row") from error
    if index < 0 or index in by_index:
        reason = "a second row of its sample" if index in by_index else "a negative one"
        raise DataError(f"expected an index of its own, got {reason}: {index}", where, "correct the row")
    by_index[index] = values


def _in_order(by_index: dict[int, list[float]], path: Path) -> Tensor:
    """Make an array of rows with indices; nan for those that are missing."""
    num_columns = len(next(iter(by_index.values())))
    _check_size(8 * (max(by_index) + 1) * num_columns, path)
    array = torch.full((max(by_index) + 1, num_columns), torch.nan)
    array[torch.tensor(list(by_index))] = torch.tensor(list(by_index.values()))
    return array


def _check_size(num_bytes: int, path: Path) -> None:
    limit = SHARE_OF_MEMORY * memory_limit()
    if num_bytes > limit:
        what = f"predictions take {num_bytes / 2**30:.3g} GiB in memory"
        fix = f"stay below half of the memory, {limit / 2**30:.3g} GiB: store fewer samples"
        raise DataError(what, str(path), fix, path=str(path))


def _not_a(form: str, error: Exception, path: Path, writer: str) -> DataError:
    return DataError(f"not a valid {form}: {error}", str(path), f"write it with {writer}", path=str(path))
