"""Images that cannot be used: collected, so that all of them are reported at once, or skipped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ensemblekit import DataError
from ensemblekit_datasets.parallel_decoding import WrongSize


class BadImages:
    """The images of a folder or archive that cannot be used, with the reasons.

    Args:
        folder: The folder or archive.
        num_images: Number of all its images.
    """

    def __init__(self, folder: Path, num_images: int) -> None:
        self.folder, self.num_images = folder, num_images
        self.skipped: dict[str, str] = {}
        """Why an image cannot be decoded, by its name."""
        self.errors: list[DataError] = []

    def __bool__(self) -> bool:
        return bool(self.errors)

    @classmethod
    def of_cache(cls, metadata: Mapping[str, Any], folder: Path) -> BadImages:
        """Return those that were skipped when a cached file was written."""
        bad = cls(folder, metadata["num_images"])
        for name, reason in metadata["skipped"].items():
            bad.add(name, DataError(reason, f"{folder}/{name}", "replace or remove the file"))
        return bad

    def add(self, name: str, error: DataError) -> None:
        """Add an image by its name, with the error that names its path."""
        self.errors.append(error)
        # All images of another size than the first cannot be meant to be left out.
        if not isinstance(error, WrongSize):
            self.skipped[name] = error.what

    def raise_unless_skipped(self, on_bad: str | None) -> None:
        """Raise an error about all of them, unless there are none or all are to be skipped."""
        if len(self.errors) > (len(self.skipped) if on_bad == "skip" else 0):
            raise self.error(on_bad)

    def error(self, on_bad: str | None) -> DataError:
        """Make the error: that of a single image, or one that lists all of them."""
        skip = 'set data.on_bad = "skip" to leave out what cannot be decoded'
        skip = skip if on_bad == "error" and self.skipped else ""
        if len(self.errors) == 1:
            [error] = self.errors
            return DataError(error.what, error.where, "; ".join(filter(None, [error.fix, skip])))
        resize = "set data.size to resize all" if len(self.errors) > len(self.skipped) else ""
        fix = "; ".join(filter(None, [resize, "replace or remove them", skip]))
        what = f"{len(self.errors)} of {self.num_images} images cannot be used"
        return DataError(what, str(self.folder), fix, details=[error.problem for error in self.errors])
