"""Inputs of single test samples: small PNG images as data URIs, or the columns of a row."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ensemblekit.analysis.report.charts import number
from ensemblekit.analysis.report.samples import SampleGroup, with_inputs
from ensemblekit.core.dataset import Dataset
from ensemblekit.core.errors import EnsemblekitError, RunError
from ensemblekit.data.hashing import sha256_of_tensors
from ensemblekit.data.loading import load_test_source
from ensemblekit.data.sources import TensorSource

if TYPE_CHECKING:
    from ensemblekit.runs.run import Run

MOST_PIXELS = 64
"""Larger images are scaled down to this side."""
MOST_COLUMNS = 12


def show_inputs(
    groups: Sequence[SampleGroup], run: Run, preparation: Mapping[str, Any] | None
) -> tuple[list[SampleGroup], str]:
    """Add images or rows to samples; returns them with a note if the test data cannot be loaded any more."""
    try:
        source = _source(run)
        return with_inputs(groups, lambda positions: _shown(source, run.spec.data, preparation, positions)), ""
    except Exception as error:  # data sets are plugins, whose files may be gone or changed: the report does without
        reason = error.problem if isinstance(error, EnsemblekitError) else f"{type(error).__name__}: {error}"
        return list(
            groups
        ), f"The samples are shown without their inputs, because the test data cannot be loaded: {reason}."


def _source(run: Run) -> Any:
    """Load the test samples, which nothing is downloaded for, and check that they are the run's."""
    dataset = run.spec.data
    if "download" in type(dataset).model_fields:
        dataset = dataset.model_copy(update={"download": False})
    source = load_test_source(dataset, run.spec.seed)
    recorded = run.environment.get("data")
    known = recorded.get("test", {}).get("targets_sha256") if isinstance(recorded, Mapping) else None
    if known is not None and known != sha256_of_tensors([source.targets]):
        raise RunError("the data is not what the run was started with")
    return source


def _shown(
    source: Any, dataset: Dataset, preparation: Mapping[str, Any] | None, positions: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the picture or the columns of each sample."""
    chosen = source.select(torch.tensor(list(positions)))
    inputs = chosen.inputs if isinstance(chosen, TensorSource) else torch.stack([chosen[i] for i in range(len(chosen))])
    if inputs.dim() == 4 and inputs.shape[1] in (1, 2, 3, 4):
        return [{"picture": data_uri(image)} for image in inputs]
    described = dataset.describe_inputs(inputs, preparation)
    if described is None:
        flat = inputs.flatten(1)[:, :MOST_COLUMNS].tolist()
        described = [{f"input {index}": number(value) for index, value in enumerate(row)} for row in flat]
    return [{"columns": tuple(list(row.items())[:MOST_COLUMNS])} for row in described]


def data_uri(image: Tensor, most: int = MOST_PIXELS) -> str:
    """Encode an image (C, H, W), uint8 or of any range, as a small PNG in a data URI."""
    from PIL import Image

    image = image[:1] if image.shape[0] in (1, 2) else image[:3]
    if image.dtype != torch.uint8:
        low, high = float(image.min()), float(image.max())
        low, high = (0.0, 1.0) if low >= 0 and 0.2 < high <= 1 else (low, max(high, low + 1e-12))
        image = ((image - low) / (high - low) * 255).round().to(torch.uint8)
    pixels = image.permute(1, 2, 0).contiguous().numpy()
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    picture.thumbnail((most, most))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
