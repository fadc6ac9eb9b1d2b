"""CIFAR-10 and CIFAR-100 in their published form: pickled batches, read by torchvision after its checksums."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ensemblekit import DataError, DataInfo, Splits
from ensemblekit_datasets.downloads import DownloadedImages, RemoteFile, cannot_write, checksum_mismatch

if TYPE_CHECKING:
    from torch import Tensor
    from torchvision.datasets import CIFAR10 as TorchvisionCIFAR


class CIFAR(DownloadedImages):
    """What the two CIFAR sets share; they are small and always held in memory (184 MB)."""

    source = "https://www.cs.toronto.edu/~kriz/cifar.html, Krizhevsky 2009, Learning Multiple Layers of Features"
    licence = "none stated by its authors, who ask to be cited"
    samples = "50,000 training and 10,000 test images"
    num_classes: ClassVar[int]
    batches_folder: ClassVar[str]
    """The folder in the archive, which has the same name with .tar.gz; known here so that looking needs no torch."""
    mean: ClassVar[tuple[float, float, float]]
    std: ClassVar[tuple[float, float, float]]

    augment: tuple[Literal["crop", "flip", "rotate"], ...] = Field(
        ("crop", "flip"), description="random changes of training images, each image its own"
    )
    normalise: bool = Field(True, description="subtract the channels' means and divide by their deviations")

    @abstractmethod
    def reader(self) -> type[TorchvisionCIFAR]:
        """Torchvision's class for this set: its file names, its checksums, its reader."""

    @property
    def info(self) -> DataInfo:
        return self.image_info(channels=3, side=32, num_classes=self.num_classes)

    def remote_files(self) -> Sequence[RemoteFile]:
        reader = self.reader()
        return [RemoteFile(reader.filename, (reader.url,), reader.tgz_md5)]

    def places(self) -> Sequence[Path]:
        return self.folder / self.batches_folder, self.folder / f"{self.batches_folder}.tar.gz"

    def load(self, seed: int) -> Splits:
        import torch

        from ensemblekit_datasets.parallel_decoding import resize_batch

        batches, archive = self.places()
        if not batches.exists():
            self._unpack(archive, batches)
        self._check(batches)

        def part(batches: TorchvisionCIFAR) -> tuple[Tensor, Tensor]:
            images = torch.from_numpy(batches.data).permute(0, 3, 1, 2).contiguous()
            return resize_batch(images, self.size), torch.tensor(batches.targets)

        # The constructor compares every batch with its md5 before it unpickles any of them.
        train, test = (self.reader()(self.folder, train=is_train) for is_train in (True, False))
        return Splits(part(train), part(test), self.info, classes=tuple(test.classes), mean=self.mean, std=self.std)

    def _unpack(self, archive: Path, batches: Path) -> None:
        """Put the folder of batches in place in one step, from the archive that is there or is downloaded."""
        from torchvision.datasets.utils import calculate_md5, extract_archive

        [file] = self.remote_files()
        if not archive.exists():
            archive = self.fetch(file, self.folder)
        elif (md5 := calculate_md5(archive)) != file.md5:
            raise checksum_mismatch(str(archive), file.md5, md5)
        try:
            with TemporaryDirectory(prefix=".unpack-", dir=self.folder) as staging:
                extract_archive(archive, staging)
                os.replace(Path(staging, batches.name), batches)
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def _check(self, batches: Path) -> None:
        """Name the file that torchvision's check would stumble over."""
        from torchvision.datasets.utils import calculate_md5

        reader = self.reader()
        for name, md5 in [*reader.train_list, *reader.test_list, (reader.meta["filename"], reader.meta["md5"])]:
            if not (file := batches / name).is_file():
                fix = f"delete {batches} to have it unpacked or downloaded again"
                raise DataError(f"{name} (md5 {md5}) is missing", str(batches), fix)
            if (got := calculate_md5(file)) != md5:
                raise checksum_mismatch(str(file), md5, got)


class CIFAR10(CIFAR):
    """Small colour photographs, 32×32, of ten kinds of animals and vehicles."""

    num_classes = 10
    batches_folder = "cifar-10-batches-py"
    mean = (0.4914, 0.4822, 0.4465)
    # The deviation over all pixels; the (0.2023, 0.1994, 0.2010) often seen is the mean of the images' own deviations.
    std = (0.2470, 0.2435, 0.2616)

    def reader(self) -> type[TorchvisionCIFAR]:
        from torchvision.datasets import CIFAR10 as Reader

        return Reader


class CIFAR100(CIFAR):
    """Small colour photographs, 32×32, of a hundred kinds of things."""

    num_classes = 100
    batches_folder = "cifar-100-python"
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)

    def reader(self) -> type[TorchvisionCIFAR]:
        from torchvision.datasets import CIFAR100 as Reader

        return Reader
