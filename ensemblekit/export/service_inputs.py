"""Requests become inputs of the ensemble: rows of a table, arrays of numbers, or images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from ensemblekit.core.dataset import Dataset
from ensemblekit.core.errors import DataError, PluginError, RunError
from ensemblekit.data.decoding import Decoding
from ensemblekit.data.transforms import ImageTransform
from ensemblekit.export.service_limits import Refused
from ensemblekit.inference.ensemble import Ensemble

Schema = dict[str, Any]
File = tuple[str, bytes]
"""The name of an uploaded file and its content."""
MAX_EXAMPLE = 30
"""Most numbers of an example of a row."""


class Rows(Protocol):
    """What the rows of a run's requests are, and how they become inputs."""

    def prepare(self, rows: Sequence[Any]) -> Tensor:
        """Turn rows of JSON values into inputs (N, *input_shape); a `DataError` if they do not fit the run."""

    @property
    def schema(self) -> Schema:
        """The JSON Schema of a row."""

    @property
    def example(self) -> Any:
        """A row that the service takes; None if it would be too long to show."""

    @property
    def description(self) -> dict[str, Any]:
        """What a row is, for clients that ask."""


def rows_of(ensemble: Ensemble) -> Rows:
    """Return what the rows of a run are.

    Raises:
        PluginError: its data set can prepare only files.
        RunError: the run saved no preparation of its table.
    """
    data, preparation = ensemble.spec.data, ensemble.preparation
    if ensemble.transform is not None:
        return ImageRows(ensemble.transform)
    if preparation is not None:
        columns = data.input_columns(preparation)
        if columns is None:
            fix = "implement input_columns and prepare_columns, or use ensemblekit predict"
            raise PluginError("it prepares files only", f'data set "{data.name}"', fix, plugin=data.name)
        return TableRows(data, preparation, columns)
    if type(data).read_features is not Dataset.read_features:
        what = "runs of version 0.1.0 on tables cannot be served: they did not save how the table was prepared"
        raise RunError(what, str(ensemble.source or ""), "train it again")
    return NumberRows(ensemble.info.input_shape)


class TableRows:
    """Rows of a table: objects by the names of columns, or arrays in the order of the training file.

    Args:
        data: the data set, which prepares them.
        preparation: the preparation that the run has saved.
        columns: the features: a typical value of numbers, or categories.
    """

    def __init__(
        self, data: Dataset, preparation: Mapping[str, Any], columns: Mapping[str, float | tuple[str, ...]]
    ) -> None:
        self.data, self.preparation, self.columns = data, preparation, columns

    def prepare(self, rows: Sequence[Any]) -> Tensor:
        """Turn rows into inputs (N, *input_shape)."""
        values = [self._values(row, number) for number, row in enumerate(rows, start=1)]
        by_name = dict(zip(self.columns, zip(*values, strict=True), strict=True))
        return self.data.prepare_columns(by_name, self.preparation).inputs

    def _values(self, row: Any, number: int) -> list[str | float | None]:
        """The values of a row in the order of the columns."""
        where = f"row {number}"
        if isinstance(row, dict):
            missing = [name for name in self.columns if name not in row]
            if missing:
                listed, got = ", ".join(map(_quoted, missing[:20])), ", ".join(map(_quoted, list(row)[:20])) or "none"
                fix = "add the columns of the training table; null stands for a missing value"
                noun = "a column" if len(missing) == 1 else "columns"
                raise DataError(f"expected {noun} {listed}, got {got}", where, fix)
            row = [row[name] for name in self.columns]
        elif not isinstance(row, list) or len(row) != len(self.columns):
            got = f"{len(row)} values" if isinstance(row, list) else f"a value of type {json_type(row)}"
            fix = f"send an object by column name, or an array: {', '.join(map(_quoted, list(self.columns)[:20]))}"
            raise DataError(f"expected an object, or an array of {len(self.columns)} values, got {got}", where, fix)
        columns = zip(self.columns.items(), row, strict=True)
        return [_field(value, kind, f"{where}, column {_quoted(name)}") for (name, kind), value in columns]

    @property
    def schema(self) -> Schema:
        """The JSON Schema of a row."""
        by_name = {name: _column_schema(kind) for name, kind in self.columns.items()}
        length = len(by_name)
        return {
            "anyOf": [
                {"type": "object", "properties": by_name, "required": list(by_name)},
                {"type": "array", "prefixItems": list(by_name.values()), "minItems": length, "maxItems": length},
            ]
        }

    @property
    def example(self) -> Any:
        """A row of typical values."""
        if len(self.columns) > MAX_EXAMPLE:
            return None
        return {
            name: next(iter(kind), "") if isinstance(kind, tuple) else float(f"{kind:.4g}")
            for name, kind in self.columns.items()
        }

    @property
    def description(self) -> dict[str, Any]:
        """The columns with their kinds."""
        columns = [
            {"name": name, "kind": "category", "categories": list(kind)}
            if isinstance(kind, tuple)
            else {"name": name, "kind": "number"}
            for name, kind in self.columns.items()
        ]
        return {"kind": "rows", "columns": columns}


class NumberRows:
    """Arrays of numbers of one shape, used as they are.

    Args:
        shape: the shape of an input.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def prepare(self, rows: Sequence[Any]) -> Tensor:
        """Turn rows into inputs (N, *input_shape)."""
        arrays = [_array(row, self.shape, f"row {number}") for number, row in enumerate(rows, start=1)]
        inputs = torch.from_numpy(np.stack(arrays).astype(np.float64)).float()
        infinite = inputs.flatten(1).isfinite().all(dim=1).logical_not().nonzero().flatten().tolist()
        if infinite:
            raise DataError("expected finite numbers", f"row {infinite[0] + 1}", "correct the row")
        return inputs

    @property
    def schema(self) -> Schema:
        """The JSON Schema of a row."""
        return _array_schema({"type": "number"}, self.shape)

    @property
    def example(self) -> Any:
        """A row of zeros."""
        return np.zeros(self.shape).tolist() if math.prod(self.shape) <= MAX_EXAMPLE else None

    @property
    def description(self) -> dict[str, Any]:
        """The shape of a row."""
        return {"kind": "numbers", "shape": list(self.shape)}


class ImageRows:
    """Images: uploaded files, or arrays of pixels (channels, height, width) from 0 to 255.

    Args:
        transform: the preparation of images as the run uses it.
    """

    def __init__(self, transform: ImageTransform) -> None:
        self.transform = transform.to("cpu")

    @property
    def takes_files(self) -> bool:
        """Whether images can be uploaded: files have 1 or 3 channels."""
        return self.transform.stored_shape[0] in (1, 3)

    def prepare(self, rows: Sequence[Any]) -> Tensor:
        """Turn arrays of pixels into inputs (N, *input_shape)."""
        shape = self.transform.stored_shape
        arrays = [_array(row, shape, f"row {number}") for number, row in enumerate(rows, start=1)]
        for number, array in enumerate(arrays, start=1):
            if array.min() < 0 or array.max() > 255 or bool((array != np.round(array)).any()):
                fix = "send the pixels as they are stored, or upload image files"
                raise DataError("expected integers from 0 to 255", f"row {number}", fix)
        return self.transform.plain(torch.from_numpy(np.stack(arrays).astype(np.uint8)))

    def decode(self, files: Sequence[File], max_pixels: int) -> Tensor:
        """Turn image files into inputs (N, *input_shape); all headers are checked before any pixel is decoded.

        Raises:
            DataError: a file is no image, is damaged, or has another size than images without resizing must have.
            Refused: the images have too many pixels together.
        """
        channels, height, width = self.transform.stored_shape
        decoding = Decoding(height if height == width else None, cast("Literal[1, 3]", channels))
        images = [decoding.open(content, f'file "{name}"') for name, content in files]
        num_pixels = sum(image.image.width * image.image.height for image in images)
        if num_pixels > max_pixels:
            fix = "make the images smaller, or send fewer in a request"
            raise Refused(422, f"too many pixels: {num_pixels:,}, but at most {max_pixels:,} are allowed", fix)
        for image in images:
            if image.shape[1:] != (height, width):
                got = "×".join(map(str, image.shape[1:]))
                what = f"expected an image of {height}×{width} pixels, got {got}"
                raise DataError(what, image.path, "resize it")
        return self.transform.plain(torch.stack([torch.tensor(image.decode()) for image in images]))

    @property
    def schema(self) -> Schema:
        """The JSON Schema of a row."""
        return _array_schema({"type": "integer", "minimum": 0, "maximum": 255}, self.transform.stored_shape)

    @property
    def example(self) -> Any:
        """No row: it would be long."""
        return None

    @property
    def description(self) -> dict[str, Any]:
        """The size of the images."""
        shape = list(self.transform.stored_shape)
        resized = "files of another size are resized and cropped" if shape[1] == shape[2] else "of exactly this size"
        files = f"PNG, JPEG, WebP or BMP; {resized}" if self.takes_files else "none: files have 1 or 3 channels"
        return {"kind": "images", "shape": shape, "files": files}


def _field(value: Any, kind: float | tuple[str, ...], where: str) -> str | float | None:
    """The value of a column of numbers, or the text of a category; None where it is missing."""
    if value is None:
        return None
    if isinstance(kind, tuple):
        if isinstance(value, list | dict):
            raise DataError(f"expected a text, got a value of type {json_type(value)}", where, "send a text or null")
        return _category(value, kind)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"expected a number, got {value!r:.60}", where, "send a number, or null if it is missing")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise DataError("expected a finite number", where, "correct it, or send null if it is missing")
    return number


def _category(value: str | float | bool, known: Sequence[str]) -> str:
    """The text that a value has in a CSV file; of several ways to write it, one that the training table has."""
    if isinstance(value, str):
        return value.strip()
    written = [str(value)]
    if isinstance(value, bool):
        written += [str(value).lower(), str(value).upper(), str(int(value))]
    elif isinstance(value, float) and value.is_integer():
        written.append(str(int(value)))
    return next((text for text in written if text in known), written[0])


def _array(row: Any, shape: tuple[int, ...], where: str) -> np.ndarray[Any, Any]:
    fix = f"send nested arrays of the shape {'×'.join(map(str, shape))}"
    try:
        array = np.array(row)
    except (ValueError, OverflowError) as error:
        raise DataError("expected arrays of equal length", where, fix) from error
    if array.dtype.kind not in "iuf":
        raise DataError("expected numbers only", where, fix)
    if array.shape != shape:
        raise DataError(f"expected shape {shape}, got {array.shape}", where, fix)
    return array


def _array_schema(number: Schema, shape: tuple[int, ...]) -> Schema:
    def nested(items: Schema, length: int) -> Schema:
        return {"type": "array", "items": items, "minItems": length, "maxItems": length}

    return reduce(nested, reversed(shape), number)


def _column_schema(kind: float | tuple[str, ...]) -> Schema:
    if not isinstance(kind, tuple):
        return {"type": ["number", "null"]}
    return {"type": ["string", "number", "boolean", "null"], "examples": list(kind[:5])}


def json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _quoted(name: str) -> str:
    return f'"{name}"'
