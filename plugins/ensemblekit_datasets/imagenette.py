"""Imagenette: ten easy classes of ImageNet, in its edition of 160 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from ensemblekit import DataError, DataInfo, Splits
from ensemblekit_datasets.downloads import DownloadedImages, RemoteFile, checksum_mismatch

ARCHIVE = "imagenette2-160.tgz"
"""Known here so that looking for it needs no torch."""


class Imagenette(DownloadedImages):
    """Photographs of ten easily told classes of ImageNet, from fish to parachutes, 160 pixels high or wide.

    Normalised with ImageNet's statistics, as pretrained networks expect. The images are read from the archive as it
    was downloaded, or from its folder; decoded ones are kept in one file (1 GB) beside it.
    """

    source = "https://github.com/fastai/imagenette, 160 px, version 2"
    licence = "Apache 2.0 for the selection; the images are ImageNet's, under its terms of access"
    samples = "9,469 training and 3,925 test images"

    size: int | None = Field(160, ge=1, description="side that images are resized and centre-cropped to when read")
    crop_size: int | None = Field(
        128, ge=1, description="side of what the network sees: random crops in training, centres else"
    )
    augment: tuple[Literal["crop", "flip", "rotate"], ...] = Field(
        ("crop", "rotate"), description="random changes of training images, each image its own"
    )
    normalise: bool = Field(True, description="subtract the channels' means and divide by their deviations")

    @property
    def info(self) -> DataInfo:
        return self.image_info(channels=3, side=160, num_classes=10)

    def remote_files(self) -> Sequence[RemoteFile]:
        from torchvision.datasets import Imagenette as Reader

        url, md5 = Reader._ARCHIVES["160px"]
        return [RemoteFile(url.rpartition("/")[2], (url,), md5)]

    def places(self) -> Sequence[Path]:
        return self.folder / ARCHIVE.removesuffix(".tgz"), self.folder / ARCHIVE

    def load(self, seed: int) -> Splits:
        from torchvision.datasets import Imagenette as Reader

        from ensemblekit import Decoding
        from ensemblekit_datasets.folder_loading import load_folders

        place = self._obtain()
        # The photographs differ in size: without one, the edition's own is meant.
        loaded = load_folders(place, Decoding(self.size or 160, 3), self.storage, self.folder)
        if list(loaded.classes) != sorted(Reader._WNID_TO_CLASS) or "train" not in loaded.parts:
            what = f"expected train and val with the classes {', '.join(sorted(Reader._WNID_TO_CLASS))}"
            raise DataError(f"not Imagenette: {what}", str(place), "delete it to have it downloaded again")
        names = tuple(Reader._WNID_TO_CLASS[wordnet_id][0] for wordnet_id in loaded.classes)
        return Splits(
            loaded.parts["train"],
            loaded.parts["test"],
            self.info,
            classes=names,
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
        )

    def _obtain(self) -> Path:
        """The folder or the archive, which is downloaded if neither is there."""
        from torchvision.datasets.utils import calculate_md5

        [file] = self.remote_files()
        place = self.found_at() or self.fetch(file, self.folder)
        if place.is_file() and (md5 := calculate_md5(place)) != file.md5:
            raise checksum_mismatch(str(place), file.md5, md5)
        return place
