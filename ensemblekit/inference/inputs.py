"""Inputs of a trained ensemble: arrays of any kind, of the right shape, on the members' device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.dataset import Dataset, Prepared
from ensemblekit.core.errors import DataError
from ensemblekit.data.arrays import as_features, is_frame
from ensemblekit.data.transforms import ImageTransform

_WHERE = "the inputs"


def as_inputs(
    value: Any, shape: tuple[int, ...], transform: ImageTransform | None, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Convert a batch to the members' inputs (B, *shape).

    Args:
        value: a tensor, an array, a frame or a list of numbers. uint8 values are as stored: they are scaled to [0, 1],
            and images cropped and normalised, as in training. Others are used as they are.
        shape: shape of one input of a member.
        transform: the preparation of images, if the run has one.
        device: device of the members.
        dtype: floating-point type of the members.

    Raises:
        DataError: the values are not numbers, or the shape is another one.
    """
    inputs = as_features(value, _WHERE)
    is_stored = inputs.dtype == torch.uint8
    expected = transform.stored_shape if is_stored and transform is not None else shape
    if inputs.dim() == 1 and expected == (1,):
        inputs = inputs.unsqueeze(1)
    if tuple(inputs.shape[1:]) != expected:
        sizes = ", ".join(map(str, expected))
        what = f"expected inputs of shape (batch, {sizes}), got {tuple(inputs.shape)}"
        raise DataError(what, _WHERE, _hint(tuple(inputs.shape), expected))
    inputs = inputs.to(device)
    if is_stored:
        inputs = inputs.to(torch.float32).div(255) if transform is None else transform.to(device).plain(inputs)
    return inputs.to(dtype)


def prepared_frame(dataset: Dataset, preparation: Mapping[str, Any] | None, frame: Any) -> Prepared | None:
    """Prepare the rows of a frame as a run's training rows were; None if its data set has nothing to prepare frames by.

    Raises:
        DataError: the frame does not have the columns of the training data.
    """
    return None if preparation is None or not is_frame(frame) else dataset.prepare_frame(frame, preparation)


def _hint(shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    if shape == expected:
        return "add a dimension for the batch: inputs[None]"
    if len(expected) == 3 and len(shape) == 4 and (shape[3], *shape[1:3]) == expected:
        return "move the channels in front of height and width: inputs.transpose(0, 3, 1, 2) in numpy"
    if torch.Size(shape[1:]).numel() == torch.Size(expected).numel():
        return f"reshape them: inputs.reshape({', '.join(map(str, (-1, *expected)))})"
    return "give the features that the run was trained on, in their order"
