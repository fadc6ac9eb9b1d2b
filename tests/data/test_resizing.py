"""Resizing gives the same pixels for files and for tensors, in training and in prediction."""

from __future__ import annotations

import io

import pytest
import torch
from helpers.images import random_images
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from ensemblekit import Decoding
from ensemblekit.data.resizing import resize_tensor


def as_image(pixels: Tensor) -> Image.Image:
    return Image.fromarray((pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)).numpy())


def as_png(pixels: Tensor) -> bytes:
    buffer = io.BytesIO()
    as_image(pixels).save(buffer, "PNG")
    return buffer.getvalue()


SHAPES = [(40, 30), (31, 47), (8, 100), (16, 16), (3, 5), (28, 28)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_tensor_and_a_file_of_the_same_pixels_are_resized_to_the_same_pixels(
    channels: int, shape: tuple[int, int]
) -> None:
    images = random_images(3, channels, *shape)
    resized = resize_tensor(images, 16)
    decoded = [torch.tensor(Decoding(16, channels)(as_png(image), "file.png")) for image in images]
    assert torch.equal(resized, torch.stack(decoded))
    assert resized.dtype == torch.uint8


@pytest.mark.parametrize("shape", SHAPES)
def test_resizing_equals_torchvisions_resize_of_the_shorter_side_and_centre_crop(shape: tuple[int, int]) -> None:
    image = random_images(3, *shape)
    expected = v2.Compose([v2.Resize(16), v2.CenterCrop(16), v2.PILToTensor()])(as_image(image))
    assert torch.equal(resize_tensor(image, 16), expected)


def test_floating_images_of_any_number_of_channels_are_resized_without_rounding_to_bytes() -> None:
    images = random_images(4, 5, 9, 13, dtype=torch.float32)
    expected = v2.Compose([v2.Resize(6), v2.CenterCrop(6)])(images)
    torch.testing.assert_close(resize_tensor(images, 6), expected, atol=1e-6, rtol=0)
