"""Rows of streaming: a folder of JPEG files that is larger than the memory, against torchvision's ImageFolder.

The limit of memory is one of address space, as of ``ulimit -v``, in the processes that stream: the data set is streamed
because it does not fit, not because it is told to be. torchvision has no limit.
"""

from __future__ import annotations

import os
import resource
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
SIDES, QUALITY = (400, 600), 85
SIZE, CROP, BATCH = 288, 256, 64
DECODED_BYTES = NUM_IMAGES * 3 * SIZE**2
MEMORY_LIMIT = int(0.9 * DECODED_BYTES)
"""4.5 GB: torch with CUDA takes 3.6 GB of address space before anything is computed."""
WORKERS = 2
AGAINST = f"torchvision ImageFolder + DataLoader, {WORKERS} workers"
WHOLE = 5
"""Epochs of a training from the start."""
ROOMS = {1.0: "from decoded copies", 0.5: "with room for half of the copies", 0.0: "without room for copies"}
"""Share of the decoded copies that the disk has room for."""
MODEL, MEMBERS, TRAINING_BATCH, STEPS, EPOCHS = {"name": "resnet", "width": 4}, 2, 8, 16, 2


def streaming(options: Options) -> Iterator[Measured]:
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder, "photos")
        write_photos(photos, 48 if options.smoke else NUM_IMAGES)
        dataset = {
            "name": "image_folder",
            "path": str(photos),
            "storage": "stream" if options.smoke else "auto",
            "size": SIZE,
            "crop_size": CROP,
            "augment": ["crop", "flip"],
            "normalise": True,
            "validation_fraction": 0,
            "test_fraction": 0.5 if options.smoke else 0.01,
        }
        limit = None if options.smoke else MEMORY_LIMIT
        yield from speeds(photos, dataset, limit)
        for room in (max(ROOMS), min(ROOMS)):
            with SubprocessContestant(partial(Trainings, photos, dataset, room, limit, options.smoke)) as trainings:
                yield waiting(trainings.call("waits"), room)


def write_photos(folder: Path, number: int) -> None:
    """Write JPEG files of smooth random images with some noise, in two classes."""
    random = np.random.default_rng(0)
    contents = [photo(random) for _ in range(min(number, DIFFERENT))]
    for label in ("a", "b"):
        Path(folder, label).mkdir(parents=True)
    for index in range(number):
        Path(folder, "ab"[index % 2], f"{index}.jpg").write_bytes(contents[index % len(contents)])


def photo(random: np.random.Generator) -> bytes:
    """A JPEG file of 400 to 600 pixels a side."""
    small = Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    smooth = np.asarray(small.resize(tuple(random.integers(*SIDES, 2).tolist()), Image.Resampling.BICUBIC), np.float32)
    noisy = (smooth + random.normal(0, 6, smooth.shape)).clip(0, 255).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


@contextmanager
def cache_in(photos: Path, room: float) -> Iterator[None]:
    """Use a cache beside the photos, with room for a share of the decoded copies."""
    cache = photos.with_name(f"cache-{room}")
    with patch.dict(os.environ, {"ENSEMBLEKIT_DATA": str(cache)}), ExitStack() as stack:
        if room < 1:
            num_bytes = int(room * DECODED_BYTES)
            stack.enter_context(patch("ensemblekit_datasets.folder_loading.room_on_disk", lambda _: num_bytes))
        yield


def limit_memory(limit: int | None) -> None:
    """Limit this process's address space, in bytes; with malloc's settings of the command line."""
    ek.keep_freed_memory()
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


class Epochs:
    """Epochs of batches without training; calling it reads one."""

    def __init__(self, photos: Path, dataset: dict[str, Any], room: float, limit: int | None) -> None:
        limit_memory(limit)
        plugin: Any = ek.datasets()["image_folder"].load()
        parameters = {name: value for name, value in dataset.items() if name != "name"}
        started = time.perf_counter()
        with cache_in(photos, room):
            self.train = ek.load_data(plugin(**parameters), 0).train
        self.seconds = time.perf_counter() - started
        if hasattr(self.train.inputs, "device"):
            raise RuntimeError("the data set is in memory: it fits in the limit")
        self.epochs = count(1)

    def __call__(self) -> None:
        deque(self.train.training_batches(BATCH, 0, next(self.epochs)), maxlen=1)

    def loaded(self) -> tuple[float, int]:
        """Return how long loading took, and the number of training images."""
        return self.seconds, len(self.train)


def speeds(photos: Path, dataset: dict[str, Any], limit: int | None) -> Iterator[Measured]:
    """Epochs of batches without training, each alone and with the time of loading."""
    pipeline = [transforms.Resize(SIZE), transforms.RandomCrop(CROP), transforms.RandomHorizontalFlip()]
    pipeline += [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.25] * 3)]
    theirs = ImageFolder(str(photos), transforms.Compose(pipeline))
    loader = DataLoader(theirs, BATCH, shuffle=True, num_workers=WORKERS)
    contestants: dict[str, Callable[[], object]] = {"torchvision": lambda: deque(loader, maxlen=1)}
    loaded = {}
    with ExitStack() as stack:
        for room, name in ROOMS.items():
            ours = stack.enter_context(SubprocessContestant(partial(Epochs, photos, dataset, room, limit)))
            loaded[room] = ours.call("loaded")  # waits, so that nobody loads at the same time
            contestants[name] = ours
        timings = interleaved(contestants, 1)
    slow = timings["torchvision"].divided_by(len(theirs))
    size = f"{SIDES[0]} to {SIDES[1]} pixels a side, resized to {SIZE}, crop {CROP}, flip, normalise, B={BATCH}"
    for room, (seconds, number) in loaded.items():
        fast = timings[ROOMS[room]].divided_by(number)
        note = f"{size}; {1 / fast.median:,.0f} images/s against {1 / slow.median:,.0f}"
        work = f"{len(theirs):,} JPEGs, larger than the memory limit, {ROOMS[room]}"
        yield faster(f"epoch over {work}", AGAINST, "≥ 1.5×", slow, fast, note)
        yield from_the_start(work, slow, fast, seconds / number, f"loaded in {seconds:.1f} s")


def from_the_start(work: str, slow: Timing, fast: Timing, first: float, note: str) -> Measured:
    """A whole training's worth of batches: the passes before the first epoch count, too."""
    whole = Timing(tuple(first + seconds * WHOLE for seconds in fast.seconds))
    row = f"loading and {WHOLE} epochs over {work}"
    return faster(row, AGAINST, "≥ 1.5×", Timing(tuple(seconds * WHOLE for seconds in slow.seconds)), whole, note)


class Trainings:
    """Short trainings with streamed data."""

    def __init__(self, photos: Path, dataset: dict[str, Any], room: float, limit: int | None, smoke: bool) -> None:
        limit_memory(limit)
        self.photos, self.room = photos, room
        self.spec = {
            "data": {**dataset, "limit_train": 24 if smoke else STEPS * TRAINING_BATCH, "limit_test": 16},
            "model": MODEL,
            "ensemble": {"members": MEMBERS},
            "training": {"epochs": EPOCHS, "batch_size": TRAINING_BATCH},
            "engine": {"name": "threaded"},
        }

    def waits(self) -> list[tuple[float, float]]:
        """Train twice; returns the epochs of the second training: seconds of waiting for batches, and all seconds."""
        with cache_in(self.photos, self.room):
            timed_run(self.spec)  # warms up
            return timed_run(self.spec)


def waiting(epochs: list[tuple[float, float]], room: float) -> Measured:
    """The share of a training epoch in which the next batch is waited for."""
    shares = [100 * waited / total for waited, total in epochs]
    seconds = statistics.median(total for _, total in epochs)
    note = f"{MEMBERS} ResNets of width {MODEL['width']}, {CROP}×{CROP}, B={TRAINING_BATCH}, {STEPS} steps an epoch"
    note += f", which takes {seconds:.1f} s"
    work = f"share of training in which a batch is waited for, {ROOMS[room]}"
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
