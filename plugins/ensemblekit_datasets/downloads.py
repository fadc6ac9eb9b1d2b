"""Downloads: where they are kept, and how files get there complete and verified or not at all."""

from __future__ import annotations

import os
import shutil
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.request import Request, urlopen

from pydantic import Field

from ensemblekit import DataError, DataInfo, ImageDataset, atomic_write, cache_directory

TIMEOUT_SECONDS = 30.0
"""A server that sends nothing for this long is given up."""


@dataclass(frozen=True)
class RemoteFile:
    """A file to download, with the md5 that its publishers or torchvision state."""

    name: str
    urls: tuple[str, ...]
    """The same file on several servers, tried in this order."""
    md5: str

    def __str__(self) -> str:
        return f"{self.name} (md5 {self.md5})"


class DownloadedImages(ImageDataset):
    """An image data set that is downloaded on first use."""

    root: Path | None = Field(
        None, description="folder of the downloaded files; default: $ENSEMBLEKIT_DATA, else ~/.cache/ensemblekit"
    )
    download: bool = Field(True, description="download files that are missing")

    @property
    def folder(self) -> Path:
        """The folder of the downloaded files."""
        return Path(os.path.expanduser(self.root)) if self.root else cache_directory()

    @abstractmethod
    def remote_files(self) -> Sequence[RemoteFile]:
        """The files to download."""

    def image_info(self, channels: int, side: int, num_classes: int) -> DataInfo:
        """Describe square images whose side is `side` unless `size` or `crop_size` is set."""
        side = self.crop_size or self.size or side
        return DataInfo("classification", (channels, side, side), num_classes)

    def fetch(self, file: RemoteFile, folder: Path) -> Path:
        """Download a file into the folder, where it appears only if it is complete and its md5 is right.

        Raises:
            DataError: The download is disabled or failed, the md5 differs, or the folder cannot be written.
        """
        if not self.download:
            raise self._missing(folder, "and download = false")
        try:
            with atomic_write(folder / file.name) as staged:
                failure = _download(file, staged)
                if isinstance(failure, DataError):
                    raise failure
                if failure is not None:
                    raise self._missing(folder, f"and the download failed: {failure}") from failure
        except OSError as error:
            raise cannot_write(folder, error) from error
        return folder / file.name

    def _missing(self, folder: Path, reason: str) -> DataError:
        """Make the error that names the missing files, the folders they may be put into, and the alternative."""
        files = ", ".join(str(file) for file in self.remote_files() if not (folder / file.name).exists())
        return DataError(
            f"{self.name} is not on this machine, {reason}; missing: {files}",
            "looked for " + ", ".join(str(path) for path in self.places()),
            "put the files there, or set data.root to the folder that has them; "
            'a copy in class folders or in an archive of them can be read with data.name = "image_folder"',
        )


def checksum_mismatch(content: str, expected: str, got: str) -> DataError:
    """Make the error for a file that is truncated, damaged or not the published one."""
    what = f"checksum mismatch: {content} is truncated, damaged or another file"
    return DataError(what, f"expected {expected}, got {got}", "delete it if it exists, and download it again")


def cannot_write(folder: Path, error: OSError) -> DataError:
    """Make the error for a folder that is full or read-only."""
    fix = "set data.root to a folder with free space that you may write to"
    return DataError(f"cannot write: {error.strerror or error}", str(folder), fix)


def _download(file: RemoteFile, target: Path) -> Exception | None:
    """Download a file from the first of its servers that works; return the last error, or None on success."""
    from torchvision.datasets.utils import calculate_md5

    failure: Exception | None = None
    for url in file.urls:
        try:
            request = Request(url, headers={"User-Agent": "ensemblekit"})
            with urlopen(request, timeout=TIMEOUT_SECONDS) as response, target.open("wb") as downloaded:
                shutil.copyfileobj(response, downloaded)
        except (OSError, HTTPException) as error:
            failure = error
            continue
        if (md5 := calculate_md5(target)) == file.md5:
            return None
        failure = checksum_mismatch(f"the download of {file.name}", file.md5, md5)
    return failure
