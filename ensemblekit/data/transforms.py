"""The transform of stored images into network inputs: augmentation, centre crop, normalisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Generator, Tensor

from ensemblekit.core.augmentation import Augmentation
from ensemblekit.core.errors import DataError
from ensemblekit.data.augmentation import distinct
from ensemblekit.data.image_dataset import ImageDataset
from ensemblekit.data.resizing import centre_offset


@dataclass(frozen=True)
class ImageTransform:
    """Turns stored images (B, C, H, W), uint8 or floating, into network inputs, float32 (B, *output_shape)."""

    stored_shape: tuple[int, int, int]
    crop_size: tuple[int, int]
    """Height and width of the network's input."""
    mean: Tensor
    """Channel means (C,) that are subtracted from images in [0, 1]."""
    std: Tensor
    """Channel standard deviations (C,) that the difference is divided by."""
    augmentations: tuple[Augmentation, ...] = ()
    """Random changes in training, in the order in which they are applied."""

    @classmethod
    def of(cls, dataset: ImageDataset, stored_shape: tuple[int, ...]) -> Self:
        """Make the transform for a data set's parameters, without normalisation.

        Args:
            dataset: Data set whose `augment` and `crop_size` are used, with the parameters of the augmentations.
            stored_shape: Shape of its images after resizing, (channels, height, width).

        Raises:
            DataError: The shape is not that of an image, or `crop_size` is larger than the images.
        """
        if len(stored_shape) != 3:
            what = f"expected images of shape (channels, height, width), got {stored_shape}"
            raise DataError(what, f'data set "{dataset.name}"', "add a dimension for the channel")
        channels, height, width = stored_shape
        side = dataset.crop_size
        if side is not None and side > min(height, width):
            what = f"crop_size is {side}, but images are only {height}×{width}"
            raise DataError(what, f'data set "{dataset.name}"', f"set crop_size to {min(height, width)} or less")
        crop_size = (height, width) if side is None else (side, side)
        augmentations = tuple(
            augmentation.for_images(dataset, (height, width), crop_size) for augmentation in distinct(dataset.augment)
        )
        return cls(
            (channels, height, width),
            crop_size,
            torch.zeros(channels),
            torch.ones(channels),
            augmentations=augmentations,
        )

    def normalised_by(self, mean: Tensor, std: Tensor) -> Self:
        """Return the same transform with these channel means and standard deviations (C,).

        A channel whose standard deviation is 0 is only centred.
        """
        channels = self.stored_shape[0]
        if mean.shape != (channels,) or std.shape != (channels,):
            got = f"{len(mean)} means and {len(std)} standard deviations"
            raise DataError(f"expected a mean and a standard deviation for each of {channels} channels, got {got}")
        return replace(self, mean=mean.float(), std=std.where(std > 0, 1).float())

    def to_json(self) -> dict[str, Any]:
        """Return the part that predictions need as plain values, for `from_json`."""
        return {
            "stored_shape": list(self.stored_shape),
            "crop_size": list(self.crop_size),
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Make a transform without augmentation from the values of `to_json`."""
        channels, height, width = values["stored_shape"]
        crop_height, crop_width = values["crop_size"]
        mean, std = torch.tensor(values["mean"]), torch.tensor(values["std"])
        return cls((channels, height, width), (crop_height, crop_width), mean, std)

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """Shape of the network's input, (channels, height, width)."""
        return (self.stored_shape[0], *self.crop_size)

    def to(self, device: torch.device | str) -> Self:
        """Return the same transform for images on a device."""
        return replace(self, mean=self.mean.to(device), std=self.std.to(device))

    def plain(self, images: Tensor) -> Tensor:
        """Transform images without augmentation: centre crop and normalisation."""
        return normalise(centre_crop(images, self.crop_size), self.mean, self.std)

    def sample(self, num_images: int, generator: Generator) -> list[Tensor]:
        """Sample the random parameters of each augmentation, (num_images, …) each, on the CPU."""
        return [augmentation.sample(num_images, generator) for augmentation in self.augmentations]

    def augmented(self, images: Tensor, sampled: Sequence[Tensor]) -> Tensor:
        """Transform images with the augmentations that were sampled for them."""
        for augmentation, parameters in zip(self.augmentations, sampled, strict=True):
            images = augmentation.apply(images, parameters)
        return self.plain(images)


def centre_crop(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the central (…, *size) of images (…, H, W) that are at least as large."""
    top, left = (centre_offset(full, part) for full, part in zip(images.shape[-2:], size, strict=True))
    return images[..., top : top + size[0], left : left + size[1]]


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Compute (x - mean) / std as float32, with x scaled to [0, 1] if images are uint8; `mean` and `std` are (C,)."""
    unit = 255 if images.dtype == torch.uint8 else 1
    scale, shift = 1 / (unit * std), -mean / std
    return images.mul(scale[:, None, None]).add_(shift[:, None, None])
