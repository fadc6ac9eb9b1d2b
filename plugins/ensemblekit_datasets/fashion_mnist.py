"""Fashion-MNIST from the published files, downloaded or installed by Debian's package."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ensemblekit import Augmentations, DataInfo, Splits
from ensemblekit_datasets.downloads import DownloadedImages, RemoteFile, checksum_mismatch

if TYPE_CHECKING:
    from torch import Tensor

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Location of the four files of Debian's package dataset-fashion-mnist."""

CONTENTS_SHA256 = {
    "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
"""Checksums of the decompressed files: Debian rewrote the gzip headers, so the md5 of its files is another."""

MAX_CONTENT_BYTES = 2**26
"""No more is decompressed; the largest of the published files has 47,040,016 bytes."""


class FashionMNIST(DownloadedImages):
    """Grey images of clothing by Zalando: 28×28 pixels, 10 classes; always kept in memory (55 MB)."""

    source = "https://github.com/zalandoresearch/fashion-mnist, Xiao et al. 2017; Debian: dataset-fashion-mnist"
    licence = "MIT, Zalando SE"
    samples = "60,000 training and 10,000 test images"

    augment: Augmentations = ("flip",)

    @property
    def info(self) -> DataInfo:
        return self.image_info(channels=1, side=28, num_classes=10)

    def remote_files(self) -> Sequence[RemoteFile]:
        from torchvision.datasets import FashionMNIST as Reader

        return [RemoteFile(name, tuple(url + name for url in Reader.mirrors), md5) for name, md5 in Reader.resources]

    def places(self) -> Sequence[Path]:
        return self.folder / "FashionMNIST" / "raw", DEBIAN_FOLDER

    def found_at(self) -> Path | None:
        complete = (path for path in self.places() if all((path / name).exists() for name in CONTENTS_SHA256))
        return next(complete, None)

    def load(self, seed: int) -> Splits:
        from torchvision.datasets import FashionMNIST as Reader

        folder = self.found_at() or self._download()

        def tensors(prefix: str) -> tuple[Tensor, Tensor]:
            images = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
            labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")
            return images[:, None], labels.long()

        return Splits(
            tensors("train"), tensors("t10k"), self.info, classes=tuple(Reader.classes), mean=(0.2860,), std=(0.3530,)
        )

    def _download(self) -> Path:
        folder = self.places()[0]
        for file in self.remote_files():
            if not (folder / file.name).exists():
                self.fetch(file, folder)
        return folder


def read_idx(path: Path) -> Tensor:
    """Read the uint8 array of a gzipped idx file and verify that it is the published one.

    The format: two zero bytes, the type (8: unsigned bytes), the number of dimensions; the dimensions as big-endian
    32-bit integers; the values in row-major order.

    Raises:
        DataError: The file is damaged or another one.
    """
    import torch

    try:
        with gzip.open(path) as file:
            contents = file.read(MAX_CONTENT_BYTES)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise checksum_mismatch(str(path), CONTENTS_SHA256[path.name], f"an incomplete gzip file ({error})") from error
    if (sha256 := hashlib.sha256(contents).hexdigest()) != CONTENTS_SHA256[path.name]:
        raise checksum_mismatch(f"the content of {path}", CONTENTS_SHA256[path.name], sha256)
    header = 4 + 4 * contents[3]
    shape = [int.from_bytes(contents[start : start + 4]) for start in range(4, header, 4)]
    return torch.frombuffer(bytearray(contents), dtype=torch.uint8, offset=header).view(shape)
