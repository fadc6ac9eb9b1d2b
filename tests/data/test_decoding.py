"""Decoded images: 16 bits are rounded to 8, and too many pixels are refused before they are decoded."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.image_files import encoded, png
from PIL import Image

from ensemblekit import DataError, Decoding
from ensemblekit.data import decoding as decoding_module


def deep(channels: int) -> np.ndarray:
    """Every value of 16 bits, in another order in each channel."""
    values = np.arange(65536, dtype=np.uint16)
    return np.stack([np.roll(values, 7 * channel) for channel in range(channels)], -1).reshape(256, 256, channels)


@pytest.mark.parametrize("channels", [3, 4])
def test_16_bit_colours_are_scaled_and_rounded(channels: int) -> None:
    values = deep(channels)
    decoded = Decoding(None, 3)(png(values), "deep.png")
    assert np.array_equal(decoded.transpose(1, 2, 0), np.rint(values[..., :3] / 257).astype(np.uint8))


@pytest.mark.parametrize("channels", [1, 3])
def test_16_bit_grey_is_scaled_and_rounded(channels: int) -> None:
    values = deep(1)[..., 0]
    decoded = Decoding(None, channels)(png(values), "deep.png")
    assert np.array_equal(decoded, np.rint(values / 257).astype(np.uint8)[None].repeat(channels, 0))


def test_what_was_8_bits_survives_16_bits() -> None:
    values = np.arange(3 * 256, dtype=np.uint8).reshape(16, 16, 3)
    assert np.array_equal(
        Decoding(4, 1)(png(values), "8.png"), Decoding(4, 1)(png(values.astype(np.uint16) * 257), "16.png")
    )


def test_16_bit_grey_with_alpha_is_refused_rather_than_cut() -> None:
    with pytest.raises(DataError, match=r"grey and alpha channels cannot be converted(.|\n)*file\.png"):
        Decoding(None, 3)(png(deep(2)), "file.png")


def test_a_cut_16_bit_image_is_an_error() -> None:
    whole = png(deep(3)[:8])
    for length in range(0, len(whole) - 16, 37):
        with pytest.raises(DataError, match="cannot decode image"):
            Decoding(None, 3)(whole[:length], "file.png")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [9_460, 13_000, 60_000])
def test_the_limit_of_pixels_is_stated_and_holds_before_decoding(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", None)
    with pytest.raises(DataError, match=r"too many pixels: .*89,?478,?485|too many pixels: .*178956970") as raised:
        Decoding(8, 3)(png(np.zeros((1, 1), np.uint8), width=side, height=side), "file.png")
    assert raised.value.exit_code == 3


def test_an_image_that_needs_too_much_of_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(decoding_module, "fits_in_memory", lambda num_bytes: bool(asked.append(num_bytes)))
    small = encoded(np.zeros((8, 8, 3), np.uint8))
    Decoding(None, 3)(small, "small.png")
    assert asked == []
    with pytest.raises(DataError, match="takes 103 MiB, more than a quarter of the memory"):
        Decoding(None, 3)(png(np.zeros((1, 1), np.uint8), width=3_000, height=3_000), "large.png")
    assert asked == [12 * 3_000 * 3_000]
