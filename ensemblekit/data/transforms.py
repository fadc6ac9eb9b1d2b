"""What happens to a batch of stored images before a network sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Generator, Tensor

from ensemblekit.core.errors import DataError
from ensemblekit.core.plugin import ImageDataset
from ensemblekit.data.augmentation import (
    centre_crop,
    crop,
    draw_angles,
    draw_flips,
    draw_offsets,
    flip,
    normalise,
    rotate,
)


@dataclass(frozen=True)
class ImageTransform:
    """From stored images (B, C, H, W) to what a network sees: float32 (B, *output_shape)."""

    stored_shape: tuple[int, int, int]
    augment: tuple[str, ...]
    """What is random in training, in the order in which it is done."""
    crop_size: tuple[int, int]
    padding: int
    degrees: float
    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, dataset: ImageDataset, stored_shape: tuple[int, ...]) -> Self:
        """The transform that a data set's parameters ask for, as yet without normalisation."""
        if len(stored_shape) != 3:
            what = f"an image has to be (channels, height, width), got {stored_shape}"
            raise DataError(what, f'data set "{dataset.name}"', "add a dimension for the channel")
        channels, height, width = stored_shape
        side = dataset.crop_size
        if side is not None and side > min(height, width):
            what = f"crop_size is {side}, but images are only {height}×{width}"
            raise DataError(what, f'data set "{dataset.name}"', f"set crop_size to {min(height, width)} or less")
        crop_size = (height, width) if side is None else (side, side)
        padding = dataset.padding if crop_size == (height, width) else 0
        changes = tuple(dict.fromkeys(dataset.augment))
        neutral = {"mean": torch.zeros(channels), "std": torch.ones(channels)}
        return cls((channels, height, width), changes, crop_size, padding, dataset.degrees, **neutral)

    def normalised_by(self, mean: Tensor, std: Tensor) -> Self:
        """The same transform with these channel means and deviations (C,); a channel without any is only centred."""
        channels = self.stored_shape[0]
        if mean.shape != (channels,) or std.shape != (channels,):
            got = f"{len(mean)} means and {len(std)} deviations"
            raise DataError(f"expected a mean and a deviation for each of {channels} channels, got {got}")
        return replace(self, mean=mean.float(), std=std.where(std > 0, 1).float())

    def to_json(self) -> dict[str, Any]:
        """What predictions need of it, as plain values; `from_json` reads it."""
        return {
            "stored_shape": list(self.stored_shape),
            "crop_size": list(self.crop_size),
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """A transform without augmentation, from what `to_json` gave."""
        channels, height, width = values["stored_shape"]
        top, left = values["crop_size"]
        mean, std = torch.tensor(values["mean"]), torch.tensor(values["std"])
        return cls((channels, height, width), (), (top, left), 0, 0.0, mean, std)

    @property
    def output_shape(self) -> tuple[int, int, int]:
        return (self.stored_shape[0], *self.crop_size)

    def to(self, device: torch.device | str) -> Self:
        return replace(self, mean=self.mean.to(device), std=self.std.to(device))

    def plain(self, images: Tensor) -> Tensor:
        """Without anything random: the centre of each image, as float32."""
        return normalise(centre_crop(images, self.crop_size), self.mean, self.std)

    def draw(self, count: int, generator: Generator) -> dict[str, Tensor]:
        """What is random about `count` images: one number each, (count,), by what it is for."""
        drawn: dict[str, Tensor] = {}
        for change in self.augment:
            if change == "crop":
                for edge, full, part in zip(("top", "left"), self.stored_shape[1:], self.crop_size, strict=True):
                    drawn[edge] = draw_offsets(count, full + 2 * self.padding - part, generator)
            elif change == "flip":
                drawn["flip"] = draw_flips(count, generator)
            elif change == "rotate":
                drawn["angle"] = draw_angles(count, self.degrees, generator)
        return drawn

    def augmented(self, images: Tensor, drawn: Mapping[str, Tensor]) -> Tensor:
        """With the changes that were drawn for these images, as float32."""
        for change in self.augment:
            if change == "crop":
                images = crop(images, drawn["top"], drawn["left"], self.crop_size, self.padding)
            elif change == "flip":
                images = flip(images, drawn["flip"])
            elif change == "rotate":
                images = rotate(images, drawn["angle"])
        return self.plain(images)
