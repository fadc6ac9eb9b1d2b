"""The built-in augmentations: random changes of training images, different for each image, applied to whole batches.

An augmentation is a plugin of the group `ensemblekit.augmentations`, and anyone can add one: its fields are parameters
in a spec, `sample` gives the random parameters of each image, and `apply` changes a batch.
"""

# torch is imported inside the methods: data sets are listed and specs are checked without it.
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BeforeValidator, Field, PlainSerializer, PrivateAttr

from ensemblekit.core.augmentation import Augmentation
from ensemblekit.core.dataset import Dataset

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Crop(Augmentation):
    """Cuts a window of the network's input size out of each image, at a random position."""

    padding: int | None = Field(
        None, ge=0, description="zeros added on each side before a crop of the image's size (default: data.padding)"
    )

    _padding: int = PrivateAttr(0)
    _stored_size: tuple[int, int] = PrivateAttr((0, 0))
    _crop_size: tuple[int, int] = PrivateAttr((0, 0))

    def for_images(self, dataset: Dataset, stored_size: tuple[int, int], crop_size: tuple[int, int]) -> Self:
        crop = self.model_copy()
        crop._stored_size, crop._crop_size = stored_size, crop_size
        # An image that is larger than the crop has room for other positions without padding.
        padding = getattr(dataset, "padding", 0) if self.padding is None else self.padding
        crop._padding = padding if crop_size == stored_size else 0
        return crop

    def sample(self, num_images: int, generator: Generator) -> Tensor:
        """Sample the top and left edges of the windows, (num_images, 2), counted from the padding's corner."""
        import torch

        edges = [
            torch.randint(full + 2 * self._padding - part + 1, (num_images,), generator=generator)
            for full, part in zip(self._stored_size, self._crop_size, strict=True)
        ]
        return torch.stack(edges, dim=1)

    def apply(self, images: Tensor, sampled: Tensor) -> Tensor:
        import torch
        from torch.nn import functional

        height, width = self._crop_size
        if self._padding:
            images = functional.pad(images, [self._padding] * 4)
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

    degrees: float | None = Field(
        None, ge=0, le=180, description="largest angle of a random rotation, in degrees (default: data.degrees)"
    )

    _degrees: float = PrivateAttr(0.0)

    def for_images(self, dataset: Dataset, stored_size: tuple[int, int], crop_size: tuple[int, int]) -> Self:
        rotate = self.model_copy()
        rotate._degrees = getattr(dataset, "degrees", 0.0) if self.degrees is None else self.degrees
        return rotate

    def sample(self, num_images: int, generator: Generator) -> Tensor:
        """Sample angles (num_images,) uniformly from -degrees to degrees."""
        import torch

        return (2 * torch.rand(num_images, generator=generator) - 1) * self._degrees

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
"""The built-in augmentations by their names in a spec, for data sets that are made in Python, without a registry."""


def distinct(augmentations: Iterable[Any]) -> list[Augmentation]:
    """Return each augmentation once, in order."""
    return list({augmentation.key: augmentation for augmentation in augmentations}.values())


def _read(value: Any) -> Any:
    """Make augmentations of names and tables that were passed in Python; a spec is read before, with its registry."""
    if not isinstance(value, list | tuple):
        return value
    return tuple(_made(item) for item in value)


def _made(item: Any) -> Any:
    table = {"name": item} if isinstance(item, str) else item
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        return item
    from ensemblekit.core.errors import EnsemblekitError
    from ensemblekit.core.registry import discover
    from ensemblekit.spec.reader import build_plugin

    name, parameters = table["name"], {key: value for key, value in table.items() if key != "name"}
    try:
        if name in AUGMENTATIONS:
            return AUGMENTATIONS[name].from_table(parameters).named(name)
        return build_plugin(Augmentation, table, discover())
    except EnsemblekitError as error:
        raise ValueError(error.line) from error


def _written(augmentations: Iterable[Augmentation]) -> list[Any]:
    """Write each by its name alone where that says it all."""
    tables = [augmentation.to_table() for augmentation in augmentations]
    return [table["name"] if len(table) == 1 else table for table in tables]


if TYPE_CHECKING:
    Augmentations = tuple[Augmentation | str | Mapping[str, Any], ...]
else:
    Augmentations = Annotated[
        tuple[Augmentation, ...],
        BeforeValidator(_read),
        PlainSerializer(_written),
        Field(
            description="random changes of training images in the order given, sampled for each image",
            validate_default=True,
        ),
    ]
"""Type of the field `augment` of an image data set: augmentations, by their names or tables."""
