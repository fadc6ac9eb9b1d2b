"""The contract of an augmentation: a seeded change of each image by itself."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ensemblekit.core.augmentation import Augmentation
from ensemblekit.core.dataset import DataInfo, Splits
from ensemblekit.core.seeds import generator
from ensemblekit.data.image_dataset import ImageDataset
from ensemblekit.testing.checks import check
from ensemblekit.testing.common import PluginContract
from ensemblekit.testing.reviews import call_unmodified, describe, mismatch, works_on_meta
from ensemblekit.testing.toy_run import NUM_TEST, NUM_TRAIN, toy_registry, toy_spec, train_toy_run

IMAGES = 16
CHANNELS, HEIGHT, WIDTH = 3, 10, 12
NUM_CLASSES = 6


class ToyImages(ImageDataset):
    """Random images."""

    @property
    def info(self) -> DataInfo:
        return DataInfo("classification", (CHANNELS, HEIGHT, WIDTH), NUM_CLASSES)

    def load(self, seed: int) -> Splits:
        images = _images(NUM_TRAIN + NUM_TEST, torch.uint8)
        targets = torch.arange(len(images)) % NUM_CLASSES
        return Splits((images[:NUM_TRAIN], targets[:NUM_TRAIN]), (images[NUM_TRAIN:], targets[NUM_TRAIN:]), self.info)


class AugmentationContract(PluginContract[Augmentation]):
    """The checks of an augmentation."""

    kind = "augmentation"

    @cached_property
    def augmentation(self) -> Augmentation:
        """The augmentation for the images of the kit, which networks get in their whole size."""
        return self.plugin.for_images(ToyImages(), (HEIGHT, WIDTH), (HEIGHT, WIDTH))

    def sample(self, epoch: int = 1) -> Tensor:
        """The parameters of the images of an epoch."""
        return self.augmentation.sample(IMAGES, generator(0, "contract", "augment", epoch))

    def apply(self, images: Tensor, sampled: Tensor) -> Tensor:
        """Change a batch."""
        arguments = {"images": images, "sampled": sampled}
        changed: Tensor = call_unmodified(self.plugin_class, "apply", self.augmentation.apply, arguments)
        return changed

    @check("it samples parameters for each image, from the generator alone")
    def seeded(self) -> None:
        """A resumed run samples the same parameters again."""
        first = self.sample()
        torch.rand(1)  # whoever uses the global generator gets other numbers now
        if not isinstance(first, Tensor) or first.ndim < 1 or len(first) != IMAGES or first.device.type != "cpu":
            raise self.violation(f"a tensor ({IMAGES}, …) on the CPU", describe(first), "sample")
        if wrong := mismatch(self.sample(), first, 0.0):
            fix = "pass generator=generator to every function that samples"
            raise self.violation("the same parameters from the same generator", wrong, "sample", fix)
        if torch.equal(self.sample(epoch=2), first):
            raise self.violation("other parameters from another generator", "the same", "sample")

    @check("it keeps the number, the channels and the dtype of the images", needs=[seeded])
    def shapes(self) -> None:
        """uint8 and float32 images, on the meta device too; height and width at least those of the network's input."""
        for dtype in (torch.uint8, torch.float32):
            for device in ("cpu", "meta"):
                images = _images(IMAGES, dtype).to(device)
                with works_on_meta(device, self.plugin_class, "apply"):
                    changed = self.apply(images, self.sample().to(device))
                expected = f"{describe(images)}, or larger images"
                if not isinstance(changed, Tensor) or changed.dtype != dtype or changed.device != images.device:
                    raise self.violation(expected, describe(changed), "apply", "keep dtype and device of the images")
                if changed.shape[:2] != images.shape[:2] or changed.shape[2] < HEIGHT or changed.shape[3] < WIDTH:
                    raise self.violation(expected, describe(changed), "apply")

    @check("an image's augmentation does not depend on the others", needs=[shapes])
    def independent_images(self) -> None:
        """Nor on the batch size."""
        images, sampled = _images(IMAGES, torch.float32), self.sample()
        together = self.apply(images, sampled)
        alone = torch.cat([self.apply(images[n : n + 1], sampled[n : n + 1]) for n in range(IMAGES)])
        if wrong := mismatch(alone, together, 1e-5):
            raise self.violation("the same image alone and in a batch", wrong, "apply")

    @check("a run with it finishes", needs=[independent_images])
    def run_finishes(self) -> None:
        """One epoch on small images."""
        registry = toy_registry(self.plugin, ToyImages())
        table = {"name": ToyImages().name, "augment": [self.plugin.to_table()]}
        train_toy_run(toy_spec(registry, {"data": table}), registry)


def _images(number: int, dtype: torch.dtype) -> Tensor:
    random = generator(0, "contract", "images")
    images = torch.randint(256, (number, CHANNELS, HEIGHT, WIDTH), generator=random)
    return images.to(torch.uint8) if dtype == torch.uint8 else images.to(dtype) / 255
