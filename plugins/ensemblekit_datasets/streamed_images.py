"""Images that are not kept in memory, but read when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ensemblekit import DataError, Decoding
from ensemblekit_datasets.decoded_rows import DecodedRows
from ensemblekit_datasets.image_sources import Folder

if TYPE_CHECKING:
    from numpy.typing import NDArray


class StreamedImages(Dataset[tuple[Tensor, int]]):
    """Images that are read on demand: (uint8 (C, H, W), class index); from their decoded copy, or from their files.

    Args:
        folder: The folder of the files.
        names: Their paths in it.
        targets: Their class indices.
        decoding: Size and channels of the decoded images.
        copy: Decoded copies of them; None: there are none. A damaged copy is not used.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], targets: Tensor, decoding: Decoding, copy: DecodedRows | None = None
    ) -> None:
        self.folder, self.names, self.targets, self.decoding, self.copy = folder, names, targets, decoding, copy

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        inputs, _ = self.read_batch([index])
        return inputs[0], int(self.targets[index])

    def read_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read several images at once, uint8 (B, C, H, W), and their class indices (B,); from any thread."""
        targets = self.targets[list(indices)]
        if self.copy is None:
            return torch.stack([torch.from_numpy(self._decode(index)) for index in indices]), targets
        images = torch.empty((len(indices), *self.copy.shape), dtype=torch.uint8)
        pixels = images.numpy()
        for position in self.copy.read(indices, pixels):
            pixels[position] = self._decode(indices[position])
        return images, targets

    def _decode(self, index: int) -> NDArray[np.uint8]:
        [(name, content)] = Folder(self.folder).read([self.names[index]])
        if isinstance(content, DataError):
            raise content
        return np.array(self.decoding(content, f"{self.folder}/{name}"))  # a copy, since Pillow's pixels are read-only

    def subset(self, indices: Tensor) -> StreamedImages:
        """Return the images at some indices."""
        names = [self.names[index] for index in indices.tolist()]
        copy = None if self.copy is None else self.copy.select(indices)
        return StreamedImages(self.folder, names, self.targets[indices], self.decoding, copy)
