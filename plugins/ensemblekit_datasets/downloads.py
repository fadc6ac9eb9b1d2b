"""Images that are fetched once and kept in a folder: where it is, and how files get there whole or not at all."""

from __future__ import annotations

import io
import os
import socket
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import Field

from ensemblekit import DataError, DataInfo, ImageDataset

STALLED_SECONDS = 30.0
"""A server that says nothing for so long is taken for gone; torchvision itself would wait for ever."""


def cache_directory() -> Path:
    """Where downloads and decoded images are kept: $ENSEMBLEKIT_DATA, else the user's cache directory."""
    if chosen := os.environ.get("ENSEMBLEKIT_DATA"):
        return Path(os.path.expanduser(chosen))
    # os.path's version leaves "~" as it is where there is no home
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "ensemblekit"


@dataclass(frozen=True)
class RemoteFile:
    """A file that can be downloaded, and the md5 by which torchvision knows that it is the right one."""

    name: str
    urls: tuple[str, ...]
    md5: str

    def __str__(self) -> str:
        return f"{self.name} (md5 {self.md5})"


class DownloadedImages(ImageDataset):
    """Images that are downloaded when they are first used."""

    root: Path | None = Field(
        None, description="folder that has or gets the files; left out: $ENSEMBLEKIT_DATA, else ~/.cache/ensemblekit"
    )
    download: bool = Field(True, description="fetch the files if they are in none of the places looked at")

    @property
    def folder(self) -> Path:
        """The folder that downloads go to."""
        return self.root.expanduser() if self.root else cache_directory()

    @abstractmethod
    def remote_files(self) -> Sequence[RemoteFile]:
        """The files to download, from torchvision's own tables."""

    def image_info(self, channels: int, side: int, num_classes: int) -> DataInfo:
        """What a network sees of images that are `side` pixels wide unless the spec says otherwise."""
        side = self.crop_size or self.size or side
        return DataInfo("classification", (channels, side, side), num_classes)

    def fetch(self, file: RemoteFile, folder: Path) -> Path:
        """Download a file into the folder, where it appears only when it is whole and its checksum is right."""
        from torchvision.datasets.utils import calculate_md5, download_url

        if not self.download:
            raise self._missing(folder, "and download = false")
        failure: Exception | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=".download-", dir=folder) as staging, _silent_and_impatient():
                arrived = Path(staging, file.name)
                for url in file.urls:
                    try:
                        download_url(url, staging, file.name, file.md5)
                    except (OSError, HTTPException, RuntimeError) as error:
                        failure = error
                        continue
                    os.replace(arrived, folder / file.name)
                    return folder / file.name
                if arrived.exists():
                    raise checksum_mismatch(f"the download of {file.name}", file.md5, calculate_md5(arrived))
        except OSError as error:
            raise cannot_write(folder, error) from error
        raise self._missing(folder, f"and the download failed: {failure}") from failure

    def _missing(self, folder: Path, reason: str) -> DataError:
        """The error that says which files are missing, where they may be put, and what else would do."""
        files = ", ".join(str(file) for file in self.remote_files() if not (folder / file.name).exists())
        return DataError(
            f"{self.name} is not on this machine, {reason}; missing: {files}",
            "looked for " + ", ".join(str(place) for place in self.places()),
            "put the files there, or set data.root to the folder that has them; "
            'a copy in class folders or in an archive of them can be read with data.name = "image_folder"',
        )


def checksum_mismatch(what: str, expected: str, got: str) -> DataError:
    """The error for a file that is cut or is not what it should be."""
    what = f"checksum mismatch: {what} is cut, damaged or another file"
    return DataError(what, f"expected {expected}, got {got}", "delete it if it is there, and fetch it again")


def cannot_write(folder: Path, error: OSError) -> DataError:
    """The error for a folder that is full or read-only."""
    return DataError(f"cannot write: {error.strerror or error}", str(folder), "set data.root to a folder with room")


@contextmanager
def _silent_and_impatient() -> Iterator[None]:
    """Keep torchvision's progress bars off the terminal, and give up on a connection that has stalled."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALLED_SECONDS)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        socket.setdefaulttimeout(before)
