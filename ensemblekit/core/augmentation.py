"""What augmentations are: random changes of single inputs, and mixtures of the inputs of a batch.

Numbers are sampled on the CPU from a seeded generator, for a whole epoch at once and one row for each sample, so that
they depend neither on the batch size nor on where a run was resumed; `apply` is deterministic and runs on the device.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Self

from ensemblekit.core.dataset import Dataset
from ensemblekit.core.plugin import Plugin

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Augmentation(Plugin):
    """A random change of training images. Images are uint8 or floating, (B, C, H, W), and keep their dtype."""

    kind = "augmentation"

    def for_images(self, dataset: Dataset, stored_size: tuple[int, int], crop_size: tuple[int, int]) -> Self:
        """Return this augmentation for images of a data set; override it if it depends on their sizes.

        Args:
            dataset: The data set, whose parameters may be the defaults of those of the augmentation.
            stored_size: Height and width of the images before any augmentation.
            crop_size: Height and width of the network's input; at most `stored_size`.
        """
        return self

    @abstractmethod
    def sample(self, num_images: int, generator: Generator) -> Tensor:
        """Sample the random parameters of the images of an epoch, (num_images, …), on the CPU."""

    @abstractmethod
    def apply(self, images: Tensor, sampled: Tensor) -> Tensor:
        """Change images (B, C, H, W) by their sampled parameters (B, …), both on the same device."""


class BatchAugmentation(Plugin):
    """A mixture of each training sample with another one of its batch.

    The objective of sample b is share_b times that of its own target, plus 1 - share_b times that of the target of its
    partner: a loss stays as it is.
    """

    kind = "mix"

    @abstractmethod
    def sample(self, num_samples: int, generator: Generator) -> Tensor:
        """Sample the random numbers of an epoch, one row for each sample, (num_samples, …), on the CPU."""

    @abstractmethod
    def apply(self, inputs: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mix the inputs of a batch.

        Args:
            inputs: What the networks would get, float32 (B, *input_shape).
            sampled: The rows that were sampled for them, (B, …), on the same device.

        Returns:
            The mixed inputs (B, *input_shape), the index in the batch of each sample's partner, int64 (B,), and the
            share of the sample itself in the mixture, float32 (B,) from 0 to 1.
        """
