"""Augmentation: random changes of training images, different for each image and applied to whole batches.

An augmentation is one class: its parameters in a spec, the random parameters of each image, and the change of a batch.
To add one, write the class and list it in `AUGMENTATIONS`, and in `AugmentationParameters` if it has parameters.

Sampling happens on the CPU from a seeded generator, for a whole epoch at once; `apply` is deterministic and runs on
the device of the images. Images are uint8 or floating, (B, C, H, W), and keep their dtype.
"""

# torch is imported inside the methods: data sets are listed and specs are checked without it.
from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ensemblekit.core.plugin import Section

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Augmentation(ABC):
    """A random change of training images."""

    def __init__(
        self, parameters: AugmentationParameters, stored_size: tuple[int, int], crop_size: tuple[int, int]
    ) -> None:
        """Keep the sizes; a subclass also keeps its own parameters.

        Args:
            parameters: The data set's parameters.
            stored_size: Height and width of the images before any augmentation.
            crop_size: Height and width of the network's input; at most `stored_size`.
        """
        self.stored_size, self.crop_size = stored_size, crop_size

    @abstractmethod
    def sample(self, num_images: int, generator: Generator) -> Tensor:
        """Sample the random parameters of the images, (num_images, …), on the CPU."""

    @abstractmethod
    def apply(self, images: Tensor, sampled: Tensor) -> Tensor:
        """Change images (B, C, H, W) by their sampled parameters (B, …), both on the same device."""


class Crop(Augmentation):
    """Cuts a window of the network's input size out of each image, at a random position."""

    class Parameters(Section):
        """Parameters of `crop` in a spec."""

        padding: int = Field(4, ge=0, description="zeros added on each side before a random crop of the image's size")

    def __init__(
        self, parameters: AugmentationParameters, stored_size: tuple[int, int], crop_size: tuple[int, int]
    ) -> None:
        super().__init__(parameters, stored_size, crop_size)
        # An image that is larger than the crop has room for other positions without padding.
        self.padding = parameters.padding if crop_size == stored_size else 0

    def sample(self, num_images: int, generator: Generator) -> Tensor:
        """Sample the top and left edges of the windows, (num_images, 2), counted from the padding's corner."""
        import torch

        edges = [
            torch.randint(full + 2 * self.padding - part + 1, (num_images,), generator=generator)
            for full, part in zip(self.stored_size, self.crop_size, strict=True)
        ]
        return torch.stack(edges, dim=1)

    def apply(self, images: Tensor, sampled: Tensor) -> Tensor:
        import torch
        from torch.nn import functional

        height, width = self.crop_size
        if self.padding:
            images = functional.pad(images, [self.padding] * 4)
        images = images.contiguous()
        batch, channels, full_height, full_width = images.shape
        # All runs of `width` consecutive pixels in memory, as overlapping rows of one matrix: selecting rows copies
        # memory block by block, which is several times faster than indexing pixels.
        runs = images.as_strided((images.numel() - width + 1, width), (1, 1))
        device = images.device
        planes = torch.arange(batch * channels, device=device).view(batch, channels, 1) * (full_height * full_width)
        lines = torch.arange(height, device=device) * full_width
        top, left = sampled.unbind(dim=1)
        corners = (top * full_width + left).view(batch, 1, 1)
        return runs.index_select(0, (planes + corners + lines).flatten()).view(batch, channels, height, width)


class Flip(Augmentation):
    """Mirrors each image left to right with probability 1/2."""

    def sample(self, num_images: int, generator: Generator) -> Tensor:
        """Sample which images are mirrored, boolean (num_images,)."""
        import torch

        return torch.rand(num_images, generator=generator) < 0.5

    def apply(self, images: Tensor, sampled: Tensor) -> Tensor:
        import torch

        both = torch.cat([images, images.flip(-1)])
        # Selecting whole images copies memory; torch.where with a broadcast mask is several times slower.
        return both.index_select(0, torch.arange(len(images), device=images.device) + len(images) * sampled)


class Rotate(Augmentation):
    """Rotates each image about its centre by a random angle; bilinear, zeros outside the image."""

    class Parameters(Section):
        """Parameters of `rotate` in a spec."""

        degrees: float = Field(15.0, ge=0, le=180, description="largest angle of a random rotation, in degrees")

    def __init__(
        self, parameters: AugmentationParameters, stored_size: tuple[int, int], crop_size: tuple[int, int]
    ) -> None:
        super().__init__(parameters, stored_size, crop_size)
        self.degrees = parameters.degrees

    def sample(self, num_images: int, generator: Generator) -> Tensor:
        """Sample angles (num_images,) uniformly from -degrees to degrees."""
        import torch

        return (2 * torch.rand(num_images, generator=generator) - 1) * self.degrees

    def apply(self, images: Tensor, sampled: Tensor) -> Tensor:
        """Rotate counter-clockwise; with float64 angles it is bit-identical to torchvision's `rotate` without a fill.

        As there, uint8 images are rounded.
        """
        import torch
        from torch.nn import functional

        batch, _, height, width = images.shape
        dtype = images.dtype if images.is_floating_point() else torch.float32
        device = images.device
        radians = torch.deg2rad(sampled)
        cos, sin = torch.cos(radians).to(dtype), torch.sin(radians).to(dtype)
        # The source of each output pixel, in units of half an image with the origin in the centre.
        source_x = torch.stack([cos, -sin], dim=-1) / (width / 2)
        source_y = torch.stack([sin, cos], dim=-1) / (height / 2)
        x = torch.linspace((1 - width) / 2, (width - 1) / 2, width, device=device, dtype=dtype)
        y = torch.linspace((1 - height) / 2, (height - 1) / 2, height, device=device, dtype=dtype)
        pixels = torch.cartesian_prod(y, x).flip(-1).expand(batch, -1, -1)
        grid = pixels.bmm(torch.stack([source_x, source_y], dim=-1)).view(batch, height, width, 2)
        rotated = functional.grid_sample(images.to(dtype), grid, padding_mode="zeros", align_corners=False)
        return rotated if images.is_floating_point() else rotated.round_().to(images.dtype)


AUGMENTATIONS: dict[str, type[Augmentation]] = {"crop": Crop, "flip": Flip, "rotate": Rotate}
"""All augmentations by their names in a spec."""


class AugmentationParameters(Rotate.Parameters, Crop.Parameters):
    """The parameters of all augmentations, which every image data set has."""


if TYPE_CHECKING:
    AugmentationName = str
else:
    AugmentationName = Literal[tuple(AUGMENTATIONS)]

Augmentations = Annotated[
    tuple[AugmentationName, ...],
    Field(description="random changes of training images in the order given, sampled for each image"),
]
"""Type of the field `augment` of an image data set: names of `AUGMENTATIONS`."""
