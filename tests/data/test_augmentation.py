"""Batched augmentation is torchvision's, image by image."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as torchvision_functional

from ensemblekit.data import augmentation

MEAN, STD = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.25, 0.3])


def random_images(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    images = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return images if dtype == torch.uint8 else images.to(dtype) / 255


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("size", "padding"), [((32, 20), 4), ((16, 9), 0), ((40, 28), 4)])
def test_crop_equals_torchvisions_pad_and_crop(dtype: torch.dtype, size: tuple[int, int], padding: int) -> None:
    images = random_images(50, 3, 32, 20, dtype=dtype)
    top = augmentation.draw_offsets(50, 32 + 2 * padding - size[0], generator())
    left = augmentation.draw_offsets(50, 20 + 2 * padding - size[1], generator())
    expected = torch.stack(
        [
            torchvision_functional.crop(torchvision_functional.pad(image, [padding]), int(t), int(x), *size)
            for image, t, x in zip(images, top, left, strict=True)
        ]
    )
    assert torch.equal(augmentation.crop(images, top, left, size, padding), expected)


def test_crop_takes_images_that_are_not_contiguous() -> None:
    images = random_images(8, 3, 16, 16).to(memory_format=torch.channels_last)
    offsets = augmentation.draw_offsets(8, 4, generator())
    expected = augmentation.crop(images.contiguous(), offsets, offsets, (12, 12))
    assert torch.equal(augmentation.crop(images, offsets, offsets, (12, 12)), expected)


def test_flip_mirrors_only_the_chosen_images() -> None:
    images, mask = random_images(20, 3, 8, 6), augmentation.draw_flips(20, generator())
    expected = [
        torchvision_functional.horizontal_flip(image) if chosen else image
        for image, chosen in zip(images, mask, strict=True)
    ]
    assert torch.equal(augmentation.flip(images, mask), torch.stack(expected))


@pytest.mark.parametrize("shape", [(20, 3, 32, 32), (20, 1, 9, 14)])
def test_rotate_equals_torchvisions_bilinear_rotation_with_zeros_outside(shape: tuple[int, ...]) -> None:
    images, angles = random_images(*shape), augmentation.draw_angles(shape[0], 180, generator()).double()
    expected = [
        torchvision_functional.rotate(image, float(angle), InterpolationMode.BILINEAR)
        for image, angle in zip(images, angles, strict=True)
    ]
    assert torch.equal(augmentation.rotate(images, angles), torch.stack(expected))


def test_rotate_by_a_right_angle_turns_counter_clockwise() -> None:
    images = random_images(3, 1, 8, 8, dtype=torch.float32)
    turned = augmentation.rotate(images, torch.full((3,), 90.0, dtype=torch.float64))
    torch.testing.assert_close(turned, images.rot90(dims=(-2, -1)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [(5, 5), (8, 3), (9, 6)])
def test_centre_crop_equals_torchvisions(size: tuple[int, int]) -> None:
    images = random_images(4, 3, 9, 8)
    assert torch.equal(augmentation.centre_crop(images, size), torchvision_functional.center_crop(images, list(size)))


@pytest.mark.parametrize("size", [6, 20])
def test_resize_equals_torchvisions_resize_of_the_shorter_side_and_centre_crop(size: int) -> None:
    images = random_images(4, 3, 9, 13)
    expected = v2.Compose([v2.Resize(size), v2.CenterCrop(size)])(images)
    assert torch.equal(augmentation.resize(images, size), expected)


def test_normalise_equals_torchvisions_up_to_rounding() -> None:
    images = random_images(10, 3, 8, 8)
    scaled = torchvision_functional.to_dtype(images, torch.float32, scale=True)
    expected = torchvision_functional.normalize(scaled, MEAN.tolist(), STD.tolist())
    torch.testing.assert_close(augmentation.normalise(images, MEAN, STD), expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(augmentation.normalise(scaled, MEAN, STD), expected, atol=2e-6, rtol=0)


def test_normalise_by_zero_and_one_is_exactly_the_scaling_to_unit_interval_and_leaves_its_input_alone() -> None:
    images = random_images(10, 3, 8, 8)
    scaled = torchvision_functional.to_dtype(images, torch.float32, scale=True)
    before = scaled.clone()
    assert torch.equal(augmentation.normalise(images, torch.zeros(3), torch.ones(3)), scaled)
    augmentation.normalise(scaled, MEAN, STD)
    assert torch.equal(scaled, before)


def counts_are_alike(ours: Tensor, theirs: Tensor) -> bool:
    """Chi-square of two samples of the same size against the same distribution, at about five deviations."""
    freedom = len(ours) - 1
    statistic = ((ours - theirs).square() / (ours + theirs)).sum()
    return bool(statistic < freedom + 5 * (2 * freedom) ** 0.5)


def test_offsets_of_crops_are_distributed_as_torchvisions() -> None:
    torch.manual_seed(0)
    # the middle of the crop tells its offsets: a pixel's value is five times its row plus its column
    image = (5 * torch.arange(5).unsqueeze(1) + torch.arange(5)).unsqueeze(0)
    random_crop = v2.RandomCrop(5, padding=2)
    theirs = torch.tensor([int(random_crop(image)[0, 2, 2]) for _ in range(2000)])
    draws = generator()
    top, left = augmentation.draw_offsets(2000, 4, draws), augmentation.draw_offsets(2000, 4, draws)
    ours = augmentation.crop(image.expand(2000, 1, 5, 5), top, left, (5, 5), padding=2)[:, 0, 2, 2]
    assert counts_are_alike(ours.bincount(minlength=25), theirs.bincount(minlength=25))


def test_flips_are_distributed_as_torchvisions() -> None:
    torch.manual_seed(0)
    image = torch.tensor([[[0, 1]]])
    theirs = torch.tensor([int(v2.RandomHorizontalFlip()(image)[0, 0, 0]) for _ in range(2000)])
    ours = augmentation.draw_flips(2000, generator()).long()
    assert counts_are_alike(ours.bincount(minlength=2), theirs.bincount(minlength=2))


def test_angles_are_distributed_as_torchvisions() -> None:
    torch.manual_seed(0)
    transform = v2.RandomRotation(30)
    theirs = torch.tensor([transform.make_params([])["angle"] for _ in range(2000)])
    ours = augmentation.draw_angles(2000, 30, generator())
    assert counts_are_alike(ours.histc(12, -30, 30), theirs.histc(12, -30, 30))


def test_everything_runs_on_the_meta_device() -> None:
    images = torch.empty(4, 3, 16, 16, dtype=torch.uint8, device="meta")
    offsets = torch.empty(4, dtype=torch.int64, device="meta")
    cropped = augmentation.crop(images, offsets, offsets, (8, 8), 2)
    flipped = augmentation.flip(cropped, offsets.bool())
    turned = augmentation.rotate(flipped, offsets.double())
    normalised = augmentation.normalise(turned, MEAN.to("meta"), STD.to("meta"))
    assert (normalised.shape, normalised.dtype, normalised.is_meta) == ((4, 3, 8, 8), torch.float32, True)
