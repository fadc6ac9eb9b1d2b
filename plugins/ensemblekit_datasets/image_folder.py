"""A person's own images: class folders, or an archive of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ensemblekit import DataError, DataInfo, ImageDataset, Splits
from ensemblekit_datasets.downloads import cache_directory

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit_datasets.folder_loading import Part


class ImageFolder(ImageDataset):
    """Your own images: PNG, JPEG, WebP or BMP files in a folder per class, or a .tar, .tar.gz, .tgz or .zip of them.

    Either `train/<class>/` and `test/<class>/` (and `val/<class>/` if you like), or just `<class>/`, of which a
    share is kept for tests. Decoded images are kept in one file under $ENSEMBLEKIT_DATA, else ~/.cache/ensemblekit.
    """

    source = "your own files"

    path: Path = Field(description="the folder, or the .tar, .tar.gz, .tgz or .zip of it")
    channels: Literal[1, 3] = Field(3, description="3 to read every image as colour, 1 as grey")
    test_fraction: float = Field(
        0.2, gt=0, lt=1, description="share of each class kept for tests if the data has no test folder"
    )

    def places(self) -> Sequence[Path]:
        return (self.path.expanduser(),)

    def load(self, seed: int) -> Splits:
        from ensemblekit import Decoding
        from ensemblekit_datasets.folder_loading import load_folders

        loaded = load_folders(self.path, Decoding(self.size, self.channels), self.storage, cache_directory())
        parts = dict(loaded.parts)
        if "all" in parts:
            parts["train"], parts["test"] = self._split(parts["all"], loaded.classes, seed)
        _, height, width = loaded.shape
        shape = (self.channels, self.crop_size or height, self.crop_size or width)
        info = DataInfo("classification", shape, len(loaded.classes))
        return Splits(parts["train"], parts["test"], info, parts.get("validation"), loaded.classes)

    def _split(self, part: Part, classes: Sequence[str], seed: int) -> tuple[Part, Part]:
        """Cut every class in the same proportion, by the seed."""
        import torch

        from ensemblekit import generator

        targets = part[1] if isinstance(part, tuple) else part.targets
        random = generator(seed, "image_folder", "test part")
        is_test = torch.zeros(len(targets), dtype=torch.bool)
        for target, name in enumerate(classes):
            members = (targets == target).nonzero()[:, 0]
            if len(members) < 2:
                what = f"class {name!r} has one image, and both training and tests need one"
                raise DataError(what, str(self.path), "add images or remove the class")
            num_test = min(max(round(self.test_fraction * len(members)), 1), len(members) - 1)
            is_test[members[torch.randperm(len(members), generator=random)[:num_test]]] = True
        return _take(part, ~is_test), _take(part, is_test)


def _take(part: Part, mask: Tensor) -> Part:
    return (part[0][mask], part[1][mask]) if isinstance(part, tuple) else part.subset(mask.nonzero()[:, 0])
