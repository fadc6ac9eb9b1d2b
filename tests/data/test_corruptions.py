"""Corruptions of images: against scipy and pillow, and how they grow with the severity."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from ensemblekit.core.seeds import generator
from ensemblekit.data.corruptions import CORRUPTIONS, SEVERITIES

SIZES = {
    "digits": (1, 8, 8),
    "colour": (3, 32, 24),
    "large": (3, 96, 84),
}  # no centre of a pixel on the edge of a block


def images(size: str, count: int = 4) -> torch.Tensor:
    """Smooth random images, as photographs are."""
    noise = torch.rand(count, *SIZES[size], generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.avg_pool2d(noise, 3, 1, 1)
    return (smooth - smooth.min()) / (smooth.max() - smooth.min())


def corrupted(name: str, severity: int, size: str = "colour") -> torch.Tensor:
    return CORRUPTIONS[name](images(size), severity, generator(0, "test"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_images_stay_images_and_are_changed_more_by_higher_severities(name, size):
    distances = []
    for severity in SEVERITIES:
        changed = corrupted(name, severity, size)
        assert (changed.shape, changed.dtype) == (images(size).shape, torch.float32)
        assert 0 <= float(changed.min()) <= float(changed.max()) <= 1
        torch.testing.assert_close(changed, corrupted(name, severity, size), rtol=0, atol=0)
        distances.append(float((changed - images(size)).square().mean()))
    assert distances[0] > 0
    assert distances[-1] > distances[0]
    if name not in ("jpeg", "pixelate"):  # whose blocks may fit an image better by chance
        assert distances == sorted(distances)


@pytest.mark.parametrize(("name", "has_noise"), [("gaussian_noise", True), ("shot_noise", True), ("jpeg", False)])
def test_noise_depends_on_the_generator_alone(name, has_noise):
    first, second = (CORRUPTIONS[name](images("colour"), 3, generator(0, text)) for text in ("a", "b"))
    assert torch.equal(first, second) is not has_noise


def test_noises_have_the_documented_strength():
    grey = torch.full((1, 1, 64, 64), 0.5).repeat(8, 1, 1, 1)
    noisy = CORRUPTIONS["gaussian_noise"](grey, 5, generator(0, "test"))
    assert float((noisy - grey).std()) == pytest.approx(0.1, rel=0.02)
    shots = CORRUPTIONS["shot_noise"](grey, 5, generator(0, "test"))
    assert float((shots - grey).var()) == pytest.approx(0.5 / 50, rel=0.05)  # a Poisson variable's variance is its mean
    salted = CORRUPTIONS["impulse_noise"](grey, 5, generator(0, "test"))
    assert float((salted == 0).float().mean()) == pytest.approx(0.035, rel=0.1)
    assert float((salted == 1).float().mean()) == pytest.approx(0.035, rel=0.1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("severity", SEVERITIES)
def test_the_blur_is_that_of_scipy(size, severity):
    kind = CORRUPTIONS["gaussian_blur"]
    deviation = (kind.large if size == "large" else kind.small)[severity - 1]
    expected = ndimage.gaussian_filter(
        images(size).double().numpy(), (0, 0, deviation, deviation), mode="nearest", truncate=4
    )
    np.testing.assert_allclose(corrupted("gaussian_blur", severity, size).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("severity", SEVERITIES)
def test_pixels_are_those_of_pillows_box_filter(size, severity):
    kind = CORRUPTIONS["pixelate"]
    factor = (kind.large if size == "large" else kind.small)[severity - 1]
    _, height, width = SIZES[size]
    changed = corrupted("pixelate", severity, size)
    for image, own in zip(images(size).flatten(0, 1), changed.flatten(0, 1), strict=True):
        small = Image.fromarray(image.numpy()).resize((int(width * factor), int(height * factor)), Image.Resampling.BOX)
        expected = np.asarray(small.resize((width, height), Image.Resampling.NEAREST))
        np.testing.assert_allclose(own.numpy(), expected, atol=1e-5)


def test_brightness_adds_to_the_value_of_hsv_and_keeps_the_hue():
    original, changed = images("colour")[0].flatten(1).T, corrupted("brightness", 3)[0].flatten(1).T
    for before, after in zip(original.tolist(), changed.tolist(), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*before)
        assert after == pytest.approx(colorsys.hsv_to_rgb(hue, saturation, min(value + 0.15, 1)), abs=1e-5)
    black = CORRUPTIONS["brightness"](torch.zeros(1, 3, 2, 2), 3, generator(0, "test"))
    torch.testing.assert_close(black, torch.full((1, 3, 2, 2), 0.15))


def test_contrast_keeps_the_mean_of_each_channel():
    original, changed = images("colour"), corrupted("contrast", 5)
    torch.testing.assert_close(changed.mean(dim=(2, 3)), original.mean(dim=(2, 3)))
    torch.testing.assert_close(changed.std(dim=(2, 3)), 0.15 * original.std(dim=(2, 3)))


def test_grey_images_and_other_numbers_of_channels_are_compressed_one_by_one():
    two = images("colour")[:, :2]
    changed = CORRUPTIONS["jpeg"](two, 5, generator(0, "test"))
    for channel in range(2):
        alone = CORRUPTIONS["jpeg"](two[:, channel : channel + 1], 5, generator(0, "test"))
        assert torch.equal(changed[:, channel : channel + 1], alone)
