"""Decoding in threads: the order is kept, and the memory is bounded whatever the number of images and threads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ensemblekit_datasets import parallel_decoding
from ensemblekit_datasets.parallel_decoding import WrongSize, decode_all
from helpers.image_files import encoded, pixels

from ensemblekit import DataError, Decoding

SHAPE = (3, 1000, 1000)
BYTES = 3_000_000


class Counted:
    """Images that count how many of them are decoded, and being decoded, at a time."""

    def __init__(self, working_bytes: int = 1) -> None:
        self.shape, self.working_bytes = SHAPE, working_bytes
        self.lock = threading.Lock()
        self.alive = self.most_alive = self.working = self.most_working = 0

    def open(self, content: bytes, path: str) -> Counted:
        return self

    def decode(self) -> np.ndarray:
        with self.lock:
            self.working += 1
            self.most_working = max(self.most_working, self.working)
            self.alive += 1
            self.most_alive = max(self.most_alive, self.alive)
        decoded = np.empty(SHAPE, np.uint8)
        weakref.finalize(decoded, self.release)
        with self.lock:
            self.working -= 1
        return decoded

    def release(self) -> None:
        with self.lock:
            self.alive -= 1


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_decoding.os, "cpu_count", lambda: 16)


def test_only_a_few_large_images_are_decoded_at_a_time(many_cores) -> None:
    counted = Counted()
    files = ((str(i), b"?") for i in range(300))
    names = [name for name, _ in decode_all(files, counted, Path("folder"), SHAPE)]
    assert names == [str(i) for i in range(300)]
    assert counted.most_alive <= parallel_decoding.BYTES_IN_FLIGHT / BYTES + 3


def test_only_a_few_files_are_read_ahead(many_cores) -> None:
    """Of large files with small images."""
    ahead = most_ahead = 0

    def files() -> Iterator[tuple[str, bytes]]:
        nonlocal ahead, most_ahead
        for i in range(60):
            ahead += 1
            most_ahead = max(most_ahead, ahead)
            yield str(i), bytes(2**23)

    for _, error in decode_all(files(), Decoding(4, 3), Path("folder"), (3, 4, 4)):
        assert isinstance(error, DataError)
        ahead -= 1
    assert most_ahead <= parallel_decoding.BYTES_IN_FLIGHT / 2**23 + 2


def test_images_that_take_much_memory_are_decoded_one_by_one(many_cores) -> None:
    counted = Counted(working_bytes=parallel_decoding.WORKING_BYTES + 1)
    for _ in decode_all(((str(i), b"?") for i in range(50)), counted, Path("folder"), SHAPE):
        pass
    assert counted.most_working == 1


def test_an_image_of_another_size_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    [(_, error)] = decode_all([("a.png", b"?")], counted, Path("folder"), (3, 8, 8))
    assert isinstance(error, WrongSize)
    assert counted.most_alive == 0


def test_the_order_of_the_files_is_kept_and_errors_are_passed_on() -> None:
    images = [pixels(i) for i in range(200)]
    files: list[tuple[str, bytes | DataError]] = [(str(i), encoded(image)) for i, image in enumerate(images)]
    files[70] = ("70", DataError("cannot read", "70", "make it readable"))
    files[99] = ("99", b"no image")
    results = dict(decode_all(files, Decoding(None, 3), Path("folder"), (3, 6, 5)))
    assert list(results) == [str(i) for i in range(200)]
    for i, image in enumerate(images):
        if i not in (70, 99):
            assert np.array_equal(results[str(i)].transpose(1, 2, 0), image)
    assert results["70"].what == "cannot read"
    assert results["99"].what == "cannot decode image"
