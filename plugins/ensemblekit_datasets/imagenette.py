"""Imagenette: ten easy classes of ImageNet, in the edition of 160 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from ensemblekit import Augmentations, DataError, DataInfo, Splits
from ensemblekit_datasets.downloads import DownloadedImages, RemoteFile, checksum_mismatch

ARCHIVE = RemoteFile(
    "imagenette2-160.tgz",
    ("https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-160.tgz",),
    md5="e793b78cc4c9e9a4ccc0c1155377a412",
)
"""The published archive. torchvision knows it too, but only in private attributes."""
CLASSES = {
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}
"""Names of the classes by their WordNet ids, which are the names of the folders."""


class Imagenette(DownloadedImages):
    """Photographs of 10 easily distinguished classes of ImageNet; the shorter side has 160 pixels.

    Normalised with ImageNet's statistics, as pretrained networks expect. The images are read from the downloaded
    archive or from its unpacked folder; the decoded images are cached in one file (1 GB) next to it.
    """

    source = "https://github.com/fastai/imagenette, 160 px, version 2"
    licence = "Apache 2.0 for the selection; the images are ImageNet's, under its terms of access"
    samples = "9,469 training and 3,925 test images"

    size: int | None = Field(160, ge=1, description="side that images are resized and centre-cropped to when read")
    crop_size: int | None = Field(
        128, ge=1, description="side of the network's input: centre crops, or random crops in training with crop"
    )
    augment: Augmentations = ("crop", "rotate")
    normalise: bool = Field(True, description="subtract the channels' means and divide by their standard deviations")

    @property
    def info(self) -> DataInfo:
        return self.image_info(channels=3, side=160, num_classes=10)

    def remote_files(self) -> Sequence[RemoteFile]:
        return [ARCHIVE]

    def places(self) -> Sequence[Path]:
        return self.folder / ARCHIVE.name.removesuffix(".tgz"), self.folder / ARCHIVE.name

    def load(self, seed: int) -> Splits:
        from ensemblekit import Decoding
        from ensemblekit_datasets.folder_loading import load_folders

        path = self._obtain()
        # The photographs differ in size, so they need one: by default, that of this edition.
        loaded = load_folders(path, Decoding(self.size or 160, 3), self.storage, self.folder)
        if list(loaded.classes) != sorted(CLASSES) or "train" not in loaded.splits:
            what = f"not Imagenette: expected train and val with the classes {', '.join(sorted(CLASSES))}"
            raise DataError(what, str(path), "delete it, so that it is downloaded again")
        return Splits(
            loaded.splits["train"],
            loaded.splits["test"],
            self.info,
            classes=tuple(CLASSES[wordnet_id] for wordnet_id in loaded.classes),
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
            notes=loaded.notes,
        )

    def _obtain(self) -> Path:
        """Return the path of the folder or of the archive, which is downloaded if neither exists."""
        from torchvision.datasets.utils import calculate_md5

        path = self.found_at() or self.fetch(ARCHIVE, self.folder)
        if path.is_file() and (md5 := calculate_md5(path)) != ARCHIVE.md5:
            raise checksum_mismatch(str(path), ARCHIVE.md5, md5)
        return path
