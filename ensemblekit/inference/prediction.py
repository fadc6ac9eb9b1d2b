"""Predictions for files of new data, with the uncertainty of the ensemble."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ensemblekit.core.errors import DataError
from ensemblekit.core.metrics import uncertainty
from ensemblekit.data.decoding import Decoding
from ensemblekit.data.transforms import ImageTransform
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.inference.tables import prepare_file

BATCH_SIZE = 256


@dataclass(frozen=True)
class Prediction:
    """The prediction for one sample."""

    file: str
    row: int | None
    """The row of a table, counted from 1 below the header; None for an image."""
    answer: dict[str, str | int | float]
    """Class, probability, agreement, entropy and mutual_information; or value and standard_deviation."""

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as one flat record."""
        location = {"file": self.file} if self.row is None else {"file": self.file, "row": self.row}
        return {**location, **self.answer}


def predict_files(ensemble: Ensemble, files: Sequence[str | Path]) -> list[Prediction]:
    """Predict image files, or the rows of CSV files if the run was not trained on images.

    Args:
        ensemble: the trained ensemble of a run.
        files: images, which are resized, cropped and normalised like the run's test data; or CSV files, whose rows the
            run's data set prepares. If it has nothing to prepare, the columns are the features in their order.

    Raises:
        DataError: a file cannot be read or does not fit the run.
    """
    paths = [Path(file) for file in files]
    reader = _read_tables(paths, ensemble) if ensemble.transform is None else _read_images(paths, ensemble.transform)
    ensemble.eval()
    device = next(ensemble.parameters()).device
    predictions: list[Prediction] = []
    with torch.inference_mode():
        for locations, inputs in reader:
            outputs = ensemble.member_outputs(inputs.to(device)).cpu()
            outputs = outputs if ensemble.target_scaling is not None else outputs.float()
            combined = ensemble.combine(outputs)
            answers = _classes(ensemble, outputs, combined) if _is_classifier(ensemble) else _values(outputs, combined)
            predictions += [
                Prediction(file, row, answer) for (file, row), answer in zip(locations, answers, strict=True)
            ]
    return predictions


def format_predictions(predictions: Sequence[Prediction], file_format: Literal["csv", "json"]) -> str:
    """Format predictions as a CSV table with a header, or as a JSON list of objects."""
    records = [prediction.to_dict() for prediction in predictions]
    if file_format == "json":
        return json.dumps(records, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    text = io.StringIO()
    if records:
        writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    return text.getvalue()


Batches = Iterator[tuple[list[tuple[str, int | None]], Tensor]]


def _read_images(paths: Sequence[Path], transform: ImageTransform) -> Batches:
    """Batches of images (B, *output_shape) as the network sees them, with their places."""
    channels, height, width = transform.stored_shape
    if channels not in (1, 3):
        what = f"the run's images have {channels} channels, image files only 1 or 3"
        raise DataError(what, str(paths[0]), "call the ensemble from Python: ensemblekit.load")
    decoding = Decoding(height if height == width else None, cast("Literal[1, 3]", channels))
    cpu_transform = transform.to("cpu")
    for start in range(0, len(paths), BATCH_SIZE):
        batch = paths[start : start + BATCH_SIZE]
        images = [_decoded(path, decoding, (height, width)) for path in batch]
        yield [(str(path), None) for path in batch], cpu_transform.plain(torch.stack(images))


def _decoded(path: Path, decoding: Decoding, size: tuple[int, int]) -> Tensor:
    image = torch.tensor(decoding(_bytes(path), str(path)))
    if image.shape[1:] != size:
        height, width = size
        got = "×".join(map(str, image.shape[1:]))
        raise DataError(f"expected an image of {height}×{width} pixels, got {got}", str(path), "resize it")
    return image


def _read_tables(paths: Sequence[Path], ensemble: Ensemble) -> Batches:
    """Batches of rows (B, *input_shape) of CSV files, with their places."""
    shape = ensemble.info.input_shape
    for path in paths:
        prepared = prepare_file(ensemble, path)
        rows = _numbers(path, math.prod(shape)).view(-1, *shape) if prepared is None else prepared.inputs
        for start in range(0, len(rows), BATCH_SIZE):
            batch = rows[start : start + BATCH_SIZE]
            yield [(str(path), start + offset + 1) for offset in range(len(batch))], batch


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


def _is_classifier(ensemble: Ensemble) -> bool:
    return ensemble.info.task == "classification"


def _classes(ensemble: Ensemble, outputs: Tensor, combined: Tensor) -> Iterator[dict[str, str | int | float]]:
    """The answers for outputs (M, B, C) and what they combine to (B, C)."""
    probabilities = ensemble.loss.probabilities(combined)
    member_probabilities = ensemble.loss.probabilities(outputs)
    confidence, predicted = probabilities.max(dim=-1)
    agreement = (member_probabilities.argmax(dim=-1) == predicted).float().mean(dim=0)
    uncertain = uncertainty(member_probabilities.double())
    names = ensemble.classes
    measures = (confidence, agreement, uncertain.entropy, uncertain.mutual_information)
    for index, *numbers in zip(predicted.tolist(), *(measure.tolist() for measure in measures), strict=True):
        labels = ("probability", "agreement", "entropy", "mutual_information")
        yield {"class": names[index] if names else index, **dict(zip(labels, numbers, strict=True))}


def _values(outputs: Tensor, combined: Tensor) -> Iterator[dict[str, str | int | float]]:
    """The answers for outputs (M, B, C) and what they combine to (B, C); of several values each has its number."""
    deviations = outputs.std(dim=0, correction=0)
    for values, spreads in zip(combined.tolist(), deviations.tolist(), strict=True):
        ends = [""] if len(values) == 1 else [f"_{index}" for index in range(len(values))]
        named = zip(ends, values, spreads, strict=True)
        yield {
            name: number
            for end, value, spread in named
            for name, number in ((f"value{end}", value), (f"standard_deviation{end}", spread))
        }
