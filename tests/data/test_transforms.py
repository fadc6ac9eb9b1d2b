"""Transforms of images: centre crop and normalisation equal torchvision's."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.images import random_images
from torchvision.transforms.v2 import functional as torchvision_functional

from ensemblekit.data.transforms import ImageTransform, centre_crop, normalise

MEAN, STD = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.25, 0.3])


@pytest.mark.parametrize("size", [(5, 5), (8, 3), (9, 6)])
def test_centre_crop_equals_torchvisions(size: tuple[int, int]) -> None:
    images = random_images(4, 3, 9, 8)
    assert torch.equal(centre_crop(images, size), torchvision_functional.center_crop(images, list(size)))


def test_normalise_equals_torchvisions_up_to_rounding() -> None:
    images = random_images(10, 3, 8, 8)
    scaled = torchvision_functional.to_dtype(images, torch.float32, scale=True)
    expected = torchvision_functional.normalize(scaled, MEAN.tolist(), STD.tolist())
    torch.testing.assert_close(normalise(images, MEAN, STD), expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(normalise(scaled, MEAN, STD), expected, atol=2e-6, rtol=0)


def test_normalise_by_zero_and_one_is_exactly_the_scaling_to_unit_interval_and_keeps_its_input() -> None:
    images = random_images(10, 3, 8, 8)
    scaled = torchvision_functional.to_dtype(images, torch.float32, scale=True)
    before = scaled.clone()
    assert torch.equal(normalise(images, torch.zeros(3), torch.ones(3)), scaled)
    normalise(scaled, MEAN, STD)
    assert torch.equal(scaled, before)


def test_a_transform_survives_json_with_height_and_width_in_their_order() -> None:
    transform = ImageTransform((3, 9, 8), (6, 5), MEAN, STD)
    again = ImageTransform.from_json(json.loads(json.dumps(transform.to_json())))
    images = random_images(4, 3, 9, 8)
    assert again.output_shape == transform.output_shape == (3, 6, 5)
    assert torch.equal(again.plain(images), transform.plain(images))
