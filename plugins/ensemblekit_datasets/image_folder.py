"""Image files in class folders, or in an archive of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ensemblekit import DataError, DataInfo, ImageDataset, Splits, cache_directory

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit_datasets.folder_loading import Images


class ImageFolder(ImageDataset):
    """Your images in one folder per class, or in an archive of such folders.

    Files are PNG, JPEG, WebP or BMP; archives are .tar, .tar.gz, .tgz or .zip. The layout is `train/<class>/` and
    `test/<class>/`, optionally with `val/<class>/`; or just `<class>/`, of which `test_fraction` is held out for
    testing. Decoded images are cached in one file under $ENSEMBLEKIT_DATA, else ~/.cache/ensemblekit.
    """

    source = "your files"

    path: Path = Field(description="the folder, or a .tar, .tar.gz, .tgz or .zip archive of it")
    channels: Literal[1, 3] = Field(3, description="3 to read images as RGB, 1 as grey")
    test_fraction: float = Field(
        0.2, gt=0, lt=1, description="share of each class held out for testing if there is no test folder"
    )
    on_bad: Literal["error", "skip"] = Field(
        "error", description="images that cannot be decoded: an error that lists all of them, or skip them"
    )

    def places(self) -> Sequence[Path]:
        return (Path(os.path.expanduser(self.path)),)

    def load(self, seed: int) -> Splits:
        from ensemblekit import Decoding
        from ensemblekit_datasets.folder_loading import load_folders

        loaded = load_folders(
            self.path, Decoding(self.size, self.channels), self.storage, cache_directory(), self.on_bad
        )
        splits = dict(loaded.splits)
        if "all" in splits:
            splits["train"], splits["test"] = self._hold_out_test(splits["all"], loaded.classes, seed)
        _, height, width = loaded.shape
        shape = (self.channels, self.crop_size or height, self.crop_size or width)
        info = DataInfo("classification", shape, len(loaded.classes))
        return Splits(
            splits["train"], splits["test"], info, splits.get("validation"), loaded.classes, notes=loaded.notes
        )

    def _hold_out_test(self, images: Images, classes: Sequence[str], seed: int) -> tuple[Images, Images]:
        """Hold out `test_fraction` of every class, by the seed.

        Unlike `ensemblekit.hold_out`, it leaves no class without a test image, however small the class is. A finished
        run is evaluated on the split that its seed gives, so the order of sampling must not change.
        """
        import torch

        from ensemblekit import generator

        targets = images[1] if isinstance(images, tuple) else images.targets
        random = generator(seed, "image_folder", "test part")
        is_test = torch.zeros(len(targets), dtype=torch.bool)
        for target, name in enumerate(classes):
            indices = (targets == target).nonzero()[:, 0]
            if len(indices) < 2:
                what = f"class {name!r} has one image, but needs one for training and one for testing"
                raise DataError(what, str(self.path), "add images or remove the class")
            num_test = min(max(round(self.test_fraction * len(indices)), 1), len(indices) - 1)
            is_test[indices[torch.randperm(len(indices), generator=random)[:num_test]]] = True
        return _select(images, ~is_test), _select(images, is_test)


def _select(images: Images, mask: Tensor) -> Images:
    if isinstance(images, tuple):
        return images[0][mask], images[1][mask]
    return images.subset(mask.nonzero()[:, 0])
