"""The inputs of a graph where the data set prepares nothing itself: images, bytes and plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.input_network import GraphInput, InputNetwork
from ensemblekit.data.transforms import ImageTransform, centre_crop, normalise
from ensemblekit.export.formats import InputType
from ensemblekit.inference.ensemble import Ensemble

DTYPES: Mapping[InputType, torch.dtype] = {"uint8": torch.uint8, "float32": torch.float32}
_RANGES: Mapping[InputType, str] = {"uint8": "from 0 to 255", "float32": "from 0 to 1"}


class ImageInputs(InputNetwork):
    """Images of the stored size: cropped, scaled and normalised inside the graph."""

    mean: Tensor
    std: Tensor

    def __init__(self, transform: ImageTransform, input_type: InputType) -> None:
        super().__init__()
        self.crop_size, self.input_type = transform.crop_size, input_type
        self.register_buffer("mean", transform.mean)
        self.register_buffer("std", transform.std)
        channels, height, width = transform.stored_shape
        description = f"images of {channels} × {height} × {width} (channels, height, width), {_RANGES[input_type]}"
        self.inputs = (GraphInput("images", DTYPES[input_type], transform.stored_shape, description),)

    def forward(self, *raw: Tensor) -> Tensor:
        (images,) = raw
        return normalise(centre_crop(images, self.crop_size), self.mean, self.std)

    def raw(self, stored: Tensor) -> tuple[Tensor, ...]:
        return (as_type(stored, self.input_type),)


class NumberInputs(InputNetwork):
    """Numbers that the members take as they are; bytes are scaled to [0, 1] inside the graph."""

    def __init__(self, shape: tuple[int, ...], input_type: InputType) -> None:
        super().__init__()
        self.input_type = input_type
        sizes = " × ".join(map(str, shape))
        description = f"{sizes} numbers as the training data has them"
        if input_type == "uint8":
            description = f"{sizes} bytes from 0 to 255"
        self.inputs = (GraphInput("inputs", DTYPES[input_type], shape, description),)

    def forward(self, *raw: Tensor) -> Tensor:
        (inputs,) = raw
        return inputs.to(torch.float32).div(255) if self.input_type == "uint8" else inputs

    def raw(self, stored: Tensor) -> tuple[Tensor, ...]:
        return (as_type(stored, self.input_type),)


def as_type(values: Tensor, input_type: InputType) -> Tensor:
    """Return values in [0, 1], or bytes, as values of an input type; others stay as they are in float32."""
    if values.dtype == DTYPES[input_type]:
        return values
    if input_type == "float32":
        return values.float().div(255) if values.dtype == torch.uint8 else values.float()
    return values.mul(255).round().clamp(0, 255).to(torch.uint8)


def input_network(ensemble: Ensemble, input_type: InputType) -> InputNetwork:
    """Return the network that prepares the inputs of an ensemble's graph."""
    if ensemble.transform is not None:
        return ImageInputs(ensemble.transform.to("cpu"), input_type)
    preparation: Mapping[str, Any] | None = ensemble.preparation
    own = None if preparation is None else ensemble.spec.data.input_network(preparation)
    return own or NumberInputs(ensemble.info.input_shape, input_type)
