"""The files that a user names for predictions: files, folders, patterns, standard input."""

from __future__ import annotations

import glob
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ensemblekit.core.errors import DataError

STANDARD_INPUT = "-"
IMAGE_EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
TABLE_EXTENSIONS = (".csv", ".parquet")


@dataclass(frozen=True)
class InputFile:
    """A file to predict."""

    path: Path
    name: str
    """What the user called it."""

    @classmethod
    def of(cls, path: str | Path) -> InputFile:
        """Return a file that is called by its path; bytes of a path that are not UTF-8 become question marks."""
        return cls(Path(path), str(path).encode(errors="replace").decode())

    def renamed(self, error: DataError) -> DataError:
        """Return an error about this file that calls it by its name."""
        where = error.where.replace(str(self.path), self.name)
        return DataError(error.what, where, error.fix.replace(str(self.path), self.name))


@contextmanager
def opened(names: Sequence[str | Path], extensions: Sequence[str]) -> Iterator[tuple[list[InputFile], list[DataError]]]:
    """Yield the files that names stand for, and an error for each name that stands for none.

    Args:
        names: paths of files or folders, patterns such as ``images/*.png`` (``**`` stands for any folders), or "-" for
            standard input. Of folders, and of those in them, all files with one of the extensions are taken.
        extensions: extensions in lower case.
    """
    files: list[InputFile] = []
    errors: list[DataError] = []
    with TemporaryDirectory(prefix="ensemblekit-") as directory:
        for name in dict.fromkeys(map(str, names)):
            if name == STANDARD_INPUT:
                # in a file, because data sets read files
                path = Path(directory, f"standard-input{extensions[0]}")
                path.write_bytes(sys.stdin.buffer.read())
                files.append(replace(InputFile.of(path), name=STANDARD_INPUT))
                continue
            try:
                files += map(InputFile.of, _matching(name, extensions))
            except DataError as error:
                errors.append(error)
        yield files, errors


def _matching(name: str, extensions: Sequence[str]) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        return _below(path, extensions)
    if path.exists() or not glob.has_magic(name):
        return [path]
    paths = [Path(match) for match in sorted(glob.glob(name, recursive=True))]
    if not paths:
        raise DataError("no file matches the pattern", name, "correct the pattern")
    return [file for match in paths for file in (_below(match, extensions) if match.is_dir() else [match])]


def _below(folder: Path, extensions: Sequence[str]) -> list[Path]:
    """All files below a folder that have one of the extensions and are not hidden, in order."""
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in extensions
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not files:
        raise DataError(f"no {', '.join(extensions)} files in the folder", str(folder), "name a folder with such files")
    return files
