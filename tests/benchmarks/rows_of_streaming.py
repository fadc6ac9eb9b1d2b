"""Rows of streaming: a folder of JPEG files that is not kept in memory, against torchvision's ImageFolder."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from measured import Measured, Options, Row, faster
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import ensemblekit as ek
from ensemblekit.bench.subprocesses import SubprocessContestant
from ensemblekit.bench.timing import Timing, interleaved

NUM_IMAGES, DIFFERENT = 20_000, 400
"""Files, and how many of them differ: reading and decoding do not get faster because of equal content."""
SIDES, QUALITY = (200, 300), 85
SIZE, CROP, BATCH = 72, 64, 128
WORKERS = 2
AGAINST = f"torchvision ImageFolder + DataLoader, {WORKERS} workers"
WHOLE = 5
"""Epochs of a training from the start."""
MODEL, MEMBERS, STEPS, EPOCHS = {"name": "resnet", "width": 16}, 2, 8, 2


def streaming(options: Options) -> Iterator[Measured]:
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder, "photos")
        write_photos(photos, 48 if options.smoke else NUM_IMAGES)
        dataset = {
            "name": "image_folder",
            "path": str(photos),
            "storage": "stream",
            "size": SIZE,
            "crop_size": CROP,
            "augment": ["crop", "flip"],
            "normalise": True,
            "validation_fraction": 0,
            "test_fraction": 0.5 if options.smoke else 0.01,
        }
        yield from speeds(photos, dataset, rounds=1 if options.smoke else 2)
        for room in (True, False):
            with cache_in(photos, room):
                yield waiting(dataset, room, options)


def write_photos(folder: Path, number: int) -> None:
    """Write JPEG files of smooth random images with some noise, in two classes."""
    random = np.random.default_rng(0)
    contents = [photo(random) for _ in range(min(number, DIFFERENT))]
    for label in ("a", "b"):
        Path(folder, label).mkdir(parents=True)
    for index in range(number):
        Path(folder, "ab"[index % 2], f"{index}.jpg").write_bytes(contents[index % len(contents)])


def photo(random: np.random.Generator) -> bytes:
    """A JPEG file of 200 to 300 pixels a side."""
    small = Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    smooth = np.asarray(small.resize(tuple(random.integers(*SIDES, 2).tolist()), Image.Resampling.BICUBIC), np.float32)
    noisy = (smooth + random.normal(0, 6, smooth.shape)).clip(0, 255).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


@contextmanager
def cache_in(photos: Path, room: bool) -> Iterator[None]:
    """Use a cache beside the photos, with or without room for decoded copies."""
    cache = photos.with_name("roomy" if room else "small")
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"ENSEMBLEKIT_DATA": str(cache)}))
        if not room:
            stack.enter_context(patch("ensemblekit_datasets.folder_loading.fits_on_disk", lambda *_: False))
        yield


class Epochs:
    """Epochs of batches without training; calling it reads one. With malloc's settings of the command line."""

    def __init__(self, photos: Path, dataset: dict[str, Any], room: bool) -> None:
        ek.keep_freed_memory()
        plugin: Any = ek.datasets()["image_folder"].load()
        parameters = {name: value for name, value in dataset.items() if name != "name"}
        started = time.perf_counter()
        with cache_in(photos, room):
            self.train = ek.load_data(plugin(**parameters), 0).train
        self.seconds = time.perf_counter() - started
        self.epochs = count(1)

    def __call__(self) -> None:
        deque(self.train.training_batches(BATCH, 0, next(self.epochs)), maxlen=1)

    def loaded(self) -> tuple[float, int]:
        """Return how long loading took, and the number of training images."""
        return self.seconds, len(self.train)


def speeds(photos: Path, dataset: dict[str, Any], rounds: int) -> Iterator[Measured]:
    """Epochs of batches without training, from decoded copies and from the files."""
    pipeline = [transforms.Resize(SIZE), transforms.RandomCrop(CROP), transforms.RandomHorizontalFlip()]
    pipeline += [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.25] * 3)]
    theirs = ImageFolder(str(photos), transforms.Compose(pipeline))
    loader = DataLoader(theirs, BATCH, shuffle=True, num_workers=WORKERS)
    contestants: dict[str, Callable[[], object]] = {"torchvision": lambda: deque(loader, maxlen=1)}
    loaded = {}
    with ExitStack() as stack:
        for room in (True, False):
            ours = stack.enter_context(SubprocessContestant(partial(Epochs, photos, dataset, room)))
            loaded[room] = ours.call("loaded")  # waits, so that nobody loads at the same time
            contestants[storage(room)] = ours
        timings = interleaved(contestants, rounds)
    slow = timings["torchvision"].divided_by(len(theirs))
    size = f"{SIDES[0]} to {SIDES[1]} pixels a side, resized to {SIZE}, crop {CROP}, flip, normalise, B={BATCH}"
    for room, (seconds, number) in loaded.items():
        fast = timings[storage(room)].divided_by(number)
        note = (
            f"{size}; {1 / fast.median:,.0f} images/s against {1 / slow.median:,.0f}; loaded in {seconds:.1f} s before"
        )
        yield faster(f"epoch over {len(theirs):,} JPEGs, {storage(room)}", AGAINST, "≥ 1.5×", slow, fast, note)
        if room:
            yield from_the_start(slow, fast, seconds / number, len(theirs))


def from_the_start(slow: Timing, fast: Timing, first: float, number: int) -> Measured:
    """A whole training's worth of batches: the pass that decodes all images and writes the copies counts, too."""
    pairs = zip(slow.seconds, fast.seconds, strict=True)
    ratios = sorted(theirs * WHOLE / (first + ours * WHOLE) for theirs, ours in pairs)
    ratio = slow.median * WHOLE / (first + fast.median * WHOLE)
    work = f"{WHOLE} epochs over {number:,} JPEGs, with the pass that writes decoded copies"
    return Measured(work, AGAINST, "≥ 1.5×", ratio, ratios[0], ratios[-1], "computed from the two rows' timings")


def storage(room: bool) -> str:
    return "streamed from decoded copies" if room else "decoded in each epoch, without room for copies"


def waiting(dataset: dict[str, Any], room: bool, options: Options) -> Measured:
    """The share of a training epoch in which the next batch is waited for, and its time against data in memory."""
    members, steps = (1, 1) if options.smoke else (MEMBERS, STEPS)
    spec = {
        "data": {**dataset, "limit_train": min(steps * BATCH, 24 if options.smoke else 10**6), "limit_test": 16},
        "model": MODEL,
        "ensemble": {"members": members},
        "training": {"epochs": EPOCHS, "batch_size": BATCH},
        "engine": {"name": "threaded"},
    }
    ek.keep_freed_memory()  # as the command line does
    timed_run(spec)  # warms up
    streamed = timed_run(spec)
    in_memory = timed_run({**spec, "data": {**spec["data"], "storage": "memory"}})
    shares = [100 * waited / total for waited, total in streamed]
    slower = statistics.median(total for _, total in streamed) / statistics.median(total for _, total in in_memory)
    note = f"{members} ResNets of width {MODEL['width']}, {CROP}×{CROP}, B={BATCH}, {steps} steps an epoch; "
    note += f"an epoch takes {slower:.2f}× its time with data in memory"
    work = f"share of training in which a batch is waited for, {storage(room)}"
    return Measured(work, "the time of an epoch", "≤ 10 %", statistics.median(shares), min(shares), max(shares), note)


def timed_run(spec: dict[str, Any]) -> list[tuple[float, float]]:
    """Train; returns the seconds in which batches were waited for and all seconds, for each epoch."""
    epochs: list[tuple[float, float]] = []
    original = ek.Split.training_batches

    def timed(split: ek.Split, *arguments: Any, **named: Any) -> Iterator[ek.Batch]:
        batches, waited, started = original(split, *arguments, **named), 0.0, time.perf_counter()
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            waited += time.perf_counter() - asked
            if batch is None:
                break
            yield batch
        epochs.append((waited, time.perf_counter() - started))

    with tempfile.TemporaryDirectory() as folder, patch.object(ek.Split, "training_batches", timed):
        ek.train(spec, out=Path(folder, "run"), progress=False)
    return epochs


ROWS_OF_STREAMING: dict[str, Row] = {"streaming": streaming}
