"""Predictions for files of new data, with the uncertainty of the ensemble."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ensemblekit.core.errors import DataError
from ensemblekit.data.decoding import Decoding
from ensemblekit.data.transforms import ImageTransform
from ensemblekit.inference.answers import Answer, answers
from ensemblekit.inference.anytime import Anytime
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.inference.files import IMAGE_EXTENSIONS, TABLE_EXTENSIONS, InputFile
from ensemblekit.inference.outputs import check_finite
from ensemblekit.inference.tables import prepare_file
from ensemblekit.inference.writing import format_records

BATCH_SIZE = 256


@dataclass(frozen=True)
class Prediction:
    """The prediction for one sample."""

    file: str
    row: int | None
    """The row of a table, counted from 1 below the header; None for an image."""
    answer: Answer
    """Class, probability, agreement, entropy and mutual_information; or value and standard_deviation."""

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as one flat record."""
        location = {"file": self.file} if self.row is None else {"file": self.file, "row": self.row}
        return {**location, **self.answer}


def predict_files(
    ensemble: Ensemble, files: Sequence[str | Path], probabilities: bool = False, members: bool = False
) -> list[Prediction]:
    """Predict image files, or the rows of tables if the run was not trained on images.

    Args:
        ensemble: the trained ensemble of a run.
        files: images, which are resized, cropped and normalised like the run's test data; or files whose rows the run's
            data set prepares. If it has nothing to prepare: CSV files whose columns are the features in their order.
        probabilities: whether to add the probability of every class.
        members: whether to add what each member predicts.

    Raises:
        DataError: a file cannot be read or does not fit the run.
        NumericError: an output is not finite.
    """
    failures: list[DataError] = []
    predicted: list[Prediction] = []
    for batch in predictions(ensemble, [InputFile.of(file) for file in files], failures, probabilities, members):
        predicted += batch
        if failures:
            break
    if failures:
        raise failures[0]
    return predicted


def predictions(
    ensemble: Ensemble,
    files: Sequence[InputFile],
    failures: list[DataError],
    probabilities: bool = False,
    members: bool = False,
    anytime: Anytime | None = None,
) -> Iterator[list[Prediction]]:
    """Yield the predictions for files, a batch at a time; files that cannot be read are added to `failures`.

    With `anytime`, members are asked only until an answer is sure, and answers have `members_asked`.

    Raises:
        NumericError: an output is not finite.
    """
    ensemble.eval()
    for locations, inputs in input_batches(ensemble, files, failures):
        if anytime is not None:
            answered = anytime.answers(inputs, partial(_place, locations), probabilities)
            yield [Prediction(file, row, answer) for (file, row), answer in zip(locations, answered, strict=True)]
            continue
        with torch.inference_mode():
            outputs = ensemble.network_outputs(inputs).cpu()
            outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
            check_finite(outputs, partial(_place, locations))
            uniform = None if ensemble.conformal is None else ensemble.set_randomness(inputs)
            answered = list(answers(ensemble, outputs, probabilities, members, uniform))
        yield [Prediction(file, row, answer) for (file, row), answer in zip(locations, answered, strict=True)]


def extensions(ensemble: Ensemble) -> tuple[str, ...]:
    """Return the extensions of the files that an ensemble can predict."""
    if ensemble.transform is not None:
        return IMAGE_EXTENSIONS
    return TABLE_EXTENSIONS if ensemble.preparation is not None else TABLE_EXTENSIONS[:1]


def format_predictions(predictions: Sequence[Prediction], file_format: Literal["csv", "json"]) -> str:
    """Format predictions as a CSV table with a header, or as a JSON list of objects."""
    return format_records([prediction.to_dict() for prediction in predictions], file_format)


Location = tuple[str, int | None]
"""The name of a file, and the row of a table."""
Batches = Iterator[tuple[list[Location], Tensor]]


def input_batches(ensemble: Ensemble, files: Sequence[InputFile], failures: list[DataError]) -> Batches:
    """Yield the inputs (B, *input_shape) of files, a batch at a time; errors of files are added to `failures`."""
    transform = ensemble.transform
    reader = _read_tables if transform is None else partial(_read_images, transform=transform)
    return reader(files, ensemble=ensemble, failures=failures)


def _place(locations: Sequence[Location], index: int) -> str:
    file, row = locations[index]
    return file if row is None else f"{file}, row {row}"


def _attempt(read: Callable[[Path], Tensor], file: InputFile, failures: list[DataError]) -> Tensor | None:
    """Read a file; if that fails, the error is added to the failures."""
    try:
        return read(file.path)
    except DataError as error:
        failures.append(file.renamed(error))
        return None


def _read_images(
    files: Sequence[InputFile], ensemble: Ensemble, failures: list[DataError], transform: ImageTransform
) -> Batches:
    """Batches of images (B, *output_shape) as the network sees them, with their places."""
    channels, height, width = transform.stored_shape
    if channels not in (1, 3):
        what = f"the run's images have {channels} channels, image files only 1 or 3"
        raise DataError(what, files[0].name, "call the ensemble from Python: ensemblekit.load")
    decoding = Decoding(height if height == width else None, cast("Literal[1, 3]", channels))
    decode = partial(_decoded, decoding=decoding, size=(height, width))
    cpu_transform = transform.to("cpu")
    for start in range(0, len(files), BATCH_SIZE):
        read = [(file, _attempt(decode, file, failures)) for file in files[start : start + BATCH_SIZE]]
        images = [image for _, image in read if image is not None]
        if images:
            locations: list[Location] = [(file.name, None) for file, image in read if image is not None]
            yield locations, cpu_transform.plain(torch.stack(images))


def _decoded(path: Path, decoding: Decoding, size: tuple[int, int]) -> Tensor:
    image = torch.tensor(decoding(_bytes(path), str(path)))
    if image.shape[1:] != size:
        height, width = size
        got = "×".join(map(str, image.shape[1:]))
        raise DataError(f"expected an image of {height}×{width} pixels, got {got}", str(path), "resize it")
    return image


def _read_tables(files: Sequence[InputFile], ensemble: Ensemble, failures: list[DataError]) -> Batches:
    """Batches of rows (B, *input_shape) of CSV files, with their places."""
    for file in files:
        rows = _attempt(partial(_table_rows, ensemble=ensemble), file, failures)
        for start in range(0, 0 if rows is None else len(rows), BATCH_SIZE):
            assert rows is not None
            batch = rows[start : start + BATCH_SIZE]
            yield [(file.name, start + offset + 1) for offset in range(len(batch))], batch


def _table_rows(path: Path, ensemble: Ensemble) -> Tensor:
    """The rows (N, *input_shape) of a CSV file."""
    prepared = prepare_file(ensemble, path)
    if prepared is not None:
        return prepared.inputs
    shape = ensemble.info.input_shape
    return _numbers(path, math.prod(shape)).view(-1, *shape)


def _numbers(path: Path, num_features: int) -> Tensor:
    """The rows of a CSV file as float32 (N, num_features)."""
    try:
        text = _bytes(path).decode("utf-8-sig")
        header, *records = [record for record in csv.reader(io.StringIO(text, newline=""), strict=True) if record] or [
            []
        ]
    except (UnicodeDecodeError, csv.Error) as error:
        fix = "give CSV files: this run was not trained on images"
        raise DataError(f"not a CSV file in UTF-8: {error}", str(path), fix) from error
    if header and all(_number(field) is not None for field in header):
        raise DataError("expected a header, got numbers", f"{path}, line 1", "name the columns in the first line")
    for row, record in enumerate([header, *records]):
        if len(record) != num_features:
            where = f"{path}, row {row}" if row else f"{path}, header"
            what = f"expected {num_features} columns, the features of the run, got {len(record)}"
            raise DataError(what, where, "give the features alone, in the order of the training data")
    if not records:
        raise DataError("expected at least one row, got none", str(path), "give a table with rows")
    values: list[list[float]] = []
    for row, record in enumerate(records, start=1):
        values.append([])
        for column, field in zip(header, record, strict=True):
            value = _number(field)
            if value is None or not math.isfinite(value):
                where = f'{path}, row {row}, column "{column}"'
                raise DataError(f"expected a finite number, got {field!r:.60}", where, "correct it")
            values[-1].append(value)
    return torch.tensor(values, dtype=torch.float32)


def _number(field: str) -> float | None:
    try:
        return float(field)
    except ValueError:
        return None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", str(path), "give the path of a file") from error
