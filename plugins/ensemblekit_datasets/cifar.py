"""CIFAR-10 and CIFAR-100 from the published archives; torchvision verifies their checksums and reads them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ensemblekit import Augmentations, DataError, DataInfo, Splits, atomic_write
from ensemblekit_datasets.downloads import DownloadedImages, RemoteFile, cannot_write, checksum_mismatch

if TYPE_CHECKING:
    from torch import Tensor
    from torchvision.datasets import CIFAR10 as TorchvisionCIFAR


class CIFAR(DownloadedImages):
    """Base of the two CIFAR data sets; they are always kept in memory (184 MB)."""

    source = "https://www.cs.toronto.edu/~kriz/cifar.html, Krizhevsky 2009, Learning Multiple Layers of Features"
    licence = "none stated; the authors ask to be cited"
    samples = "50,000 training and 10,000 test images"
    num_classes: ClassVar[int]
    batches_folder: ClassVar[str]
    """Name of the folder in the archive, and of the archive without .tar.gz; listing data sets must not need torch."""
    mean: ClassVar[tuple[float, float, float]]
    std: ClassVar[tuple[float, float, float]]

    augment: Augmentations = ("crop", "flip")
    normalise: bool = Field(True, description="subtract the channels' means and divide by their standard deviations")

    @abstractmethod
    def reader(self) -> type[TorchvisionCIFAR]:
        """Torchvision's class for this data set, which knows file names and checksums and reads the batches."""

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

        batches, archive = self.places()
        if not batches.exists():
            self._unpack(archive, batches)
        self._check(batches)

        def tensors(split: TorchvisionCIFAR) -> tuple[Tensor, Tensor]:
            return torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(split.targets)

        # The constructor compares the md5 of every batch before it unpickles any of them.
        train, test = (self.reader()(self.folder, train=is_train) for is_train in (True, False))
        return Splits(
            tensors(train), tensors(test), self.info, classes=tuple(test.classes), mean=self.mean, std=self.std
        )

    def _unpack(self, archive: Path, batches: Path) -> None:
        """Unpack the archive, which is downloaded if it is missing; the folder appears complete or not at all."""
        from torchvision.datasets.utils import calculate_md5, extract_archive

        [file] = self.remote_files()
        if not archive.exists():
            archive = self.fetch(file, self.folder)
        elif (md5 := calculate_md5(archive)) != file.md5:
            raise checksum_mismatch(str(archive), file.md5, md5)
        try:
            with atomic_write(batches) as staged:
                extract_archive(archive, staged.parent)
        except OSError as error:
            # Another process may have unpacked the archive in the meantime: what it left is complete.
            if not batches.is_dir():
                raise cannot_write(self.folder, error) from error

    def _check(self, batches: Path) -> None:
        """Raise a `DataError` that names the missing or damaged file; torchvision does not name it."""
        from torchvision.datasets.utils import calculate_md5

        reader = self.reader()
        for name, md5 in [*reader.train_list, *reader.test_list, (reader.meta["filename"], reader.meta["md5"])]:
            if not (file := batches / name).is_file():
                fix = f"delete {batches}, so that it is unpacked or downloaded again"
                raise DataError(f"{name} (md5 {md5}) is missing", str(batches), fix)
            if (got := calculate_md5(file)) != md5:
                raise checksum_mismatch(str(file), md5, got)


class CIFAR10(CIFAR):
    """Colour photographs of animals and vehicles: 32×32 pixels, 10 classes."""

    num_classes = 10
    batches_folder = "cifar-10-batches-py"
    mean = (0.4914, 0.4822, 0.4465)
    # The standard deviation over all pixels; the common (0.2023, 0.1994, 0.2010) is the mean of each image's deviation.
    std = (0.2470, 0.2435, 0.2616)

    def reader(self) -> type[TorchvisionCIFAR]:
        from torchvision.datasets import CIFAR10 as Reader

        return Reader


class CIFAR100(CIFAR):
    """Colour photographs of animals, plants, people and things: 32×32 pixels, 100 classes."""

    num_classes = 100
    batches_folder = "cifar-100-python"
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)

    def reader(self) -> type[TorchvisionCIFAR]:
        from torchvision.datasets import CIFAR100 as Reader

        return Reader
