"""Images per second of random crop, flip and normalisation: batched, against torchvision image by image.

Run it with ``python tests/benchmarks/bench_augmentation.py``. The two take turns in one process, because the speed
of a shared machine drifts; the ratio of the medians is what counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from ensemblekit import Splits, load_data
from ensemblekit.plugin import DataInfo, ImageDataset

NUM_IMAGES, BATCH_SIZE, ROUNDS = 4096, 128, 7
MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


def random_images() -> torch.Tensor:
    """uint8 images (N, 3, 32, 32) of CIFAR-100's shape."""
    shape = (NUM_IMAGES, 3, 32, 32)
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class PerImage(Dataset[tuple[torch.Tensor, int]]):
    """What torchvision's CIFAR100 does with the usual transforms."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images.permute(0, 2, 3, 1).contiguous().numpy()
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), 0


class Batched(ImageDataset):
    """The same images as a data set of ensemblekit."""

    def load(self, seed: int) -> Splits:
        images = random_images()
        part = (images, torch.zeros(len(images), dtype=torch.int64))
        return Splits(part, part, DataInfo("classification", (3, 32, 32), 100), mean=MEAN, std=STD)


def images_per_second(epoch: Callable[[], Iterable[object]]) -> float:
    start = time.perf_counter()
    for _ in epoch():
        pass
    return NUM_IMAGES / (time.perf_counter() - start)


def main() -> None:
    """Measure both and print the ratio."""
    loader = DataLoader(PerImage(random_images()), batch_size=BATCH_SIZE, shuffle=True)
    train = load_data(Batched(augment=("crop", "flip"), normalise=True, validation_fraction=0), seed=0).train
    rates: dict[str, list[float]] = {"torchvision, image by image": [], "ensemblekit, batched": []}
    for epoch in range(ROUNDS):
        rates["torchvision, image by image"].append(images_per_second(lambda: loader))
        this_epoch = train.training_batches(BATCH_SIZE, seed=0, epoch=epoch)
        rates["ensemblekit, batched"].append(images_per_second(lambda batches=this_epoch: batches))
    medians = {name: statistics.median(measured) for name, measured in rates.items()}
    for name, median in medians.items():
        print(f"{name:28s} {median:10,.0f} images/s")
    per_image, batched = medians.values()
    print(f"{'ratio':28s} {batched / per_image:10.1f}")


if __name__ == "__main__":
    main()
