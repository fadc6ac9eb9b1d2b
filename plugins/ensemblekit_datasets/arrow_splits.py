"""The splits of a Hugging Face data set in a folder: where their files are, and their columns, read within limits."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ensemblekit import DataError, memory_limit

WHOLE = "train"
"""The name of the only split, if nothing says what it is."""
NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
"""What the splits are called, by their role."""
KNOWN = {name: role for role, names in NAMES.items() for name in names}
ROWS_PER_BATCH = 64
"""Rows that are decoded at once: a batch of images has to fit in the memory."""
SHARE_OF_MEMORY = 0.5
"""Largest part of the memory that the columns of a split may take."""
EXPECTED = "name a folder that `save_to_disk` has written, or a folder of Parquet files"
_SHARD = re.compile(r"-\d+-of-\d+(-[0-9a-f]+)?$")


@dataclass(frozen=True)
class StoredSplit:
    """The files of a split: Arrow streams, which are mapped into memory, or Parquet files."""

    name: str
    folder: Path
    files: tuple[Path, ...]

    @cached_property
    def schema(self) -> Any:
        """The Arrow schema of the first file; others must have the same columns."""
        with reading(self.files[0]):
            schema = _arrow_stream(self.files[0]).schema if self.is_arrow else _parquet(self.files[0]).schema_arrow
            schema.names  # noqa: B018 - names that are not UTF-8 are an error here
            return schema

    @cached_property
    def features(self) -> Mapping[str, Any]:
        """What the package `datasets` has noted about the columns, such as the names of classes; may be empty."""
        try:
            noted = json.loads((self.schema.metadata or {})[b"huggingface"])["info"]["features"]
        except (KeyError, ValueError, TypeError, RecursionError):
            return {}
        return noted if isinstance(noted, dict) else {}

    @property
    def is_arrow(self) -> bool:
        return self.files[0].suffix == ".arrow"

    def where(self, row: int) -> str:
        """Describe a row for error messages; rows are counted from 0, as in the package `datasets`."""
        return f"{self.folder}, {self.row_name(row)}"

    def row_name(self, row: int) -> str:
        return f'split "{self.name}" row {row}'

    def batches(self, column: str) -> Iterator[Any]:
        """Read a column, an Arrow array of some rows at a time."""
        for file in self.files:
            with reading(file):
                for batch in _arrow_stream(file) if self.is_arrow else _parquet_batches(file, column):
                    array = batch.column(column)
                    array.validate(full=True)  # offsets of a damaged file would point anywhere
                    yield array

    def column(self, column: str) -> Any:
        """Read a column as a chunked array: Arrow files stay on the disk until they are used.

        Raises:
            DataError: A file is damaged, or the column of Parquet files takes more than half of the memory.
        """
        import pyarrow

        chunks, needed, limit = [], 0, SHARE_OF_MEMORY * memory_limit()
        for array in self.batches(column):
            chunks.append(array)
            needed += 0 if self.is_arrow else array.nbytes
            if needed > limit:
                what = f'column "{column}" of split "{self.name}" takes more than {limit / 2**30:.3g} GiB, half of the'
                fix = "store it with `save_to_disk`, whose files are read in parts, or use fewer rows"
                raise DataError(f"{what} memory", str(self.folder), fix)
        return pyarrow.chunked_array(chunks, self.schema.field(column).type)


def find_splits(path: Path) -> dict[str, StoredSplit]:
    """Find the splits of a folder by the names of its files.

    Raises:
        DataError: There is no such folder, or it has no data, or the files of several data sets.
    """
    if find_spec("pyarrow") is None:
        fix = "pip install 'ensemblekit[parquet]'"
        raise DataError("the package pyarrow is not installed, which reads Arrow and Parquet files", str(path), fix)
    if not path.is_dir():
        what = "expected a folder, got a file" if path.exists() else "no such folder"
        raise DataError(what, str(path), EXPECTED)
    if (path / "dataset_dict.json").exists():
        names = _listed(path / "dataset_dict.json", "splits")
        return {name: _saved_split(name, path / name) for name in names}
    if (path / "state.json").exists():
        return {WHOLE: _saved_split(WHOLE, path)}
    return _parquet_splits(path)


def _saved_split(name: str, folder: Path) -> StoredSplit:
    """Return a split that `save_to_disk` has written."""
    names = _listed(folder / "state.json", "_data_files")
    missing = [file for file in names if not (folder / file).is_file()]
    if missing or not names:
        what = f"the file {missing[0]} is missing" if missing else "it has no data files"
        raise DataError(what, str(folder), "write it again with `save_to_disk`")
    return StoredSplit(name, folder, tuple(folder / file for file in names))


def _listed(file: Path, key: str) -> list[str]:
    """Read a list of names from a JSON file; they never lead out of its folder."""
    try:
        listed = json.loads(file.read_bytes())[key]
        names = [item["filename"] if isinstance(item, dict) else item for item in listed]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"cannot be read ({type(error).__name__}: {error})"
        raise DataError(what, str(file), "write it again with `save_to_disk`") from error
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or os.sep in name:
            raise DataError(f"refused: {name!r} is not a name in this folder", str(file), "correct the file")
    return names


def _parquet_splits(path: Path) -> dict[str, StoredSplit]:
    files = [
        file
        for file in sorted(path.rglob("*.parquet"))
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not files:
        raise DataError("there are neither files of `save_to_disk` nor Parquet files", str(path), EXPECTED)
    by_split: dict[str, list[Path]] = {}
    folders: set[Path] = set()
    for file in files:
        split, folder = _split_of(file)
        by_split.setdefault(split, []).append(file)
        folders.add(folder)
    if len(folders) > 1:
        names = ", ".join(sorted(str(folder.relative_to(path)) for folder in folders))
        raise DataError(f"several data sets: {names}", str(path), "set data.path to one of these folders")
    return {split: StoredSplit(split, path, tuple(found)) for split, found in by_split.items()}


def _split_of(file: Path) -> tuple[str, Path]:
    """Return the split of a file by its name or that of its folder, and the folder of all splits."""
    stem = _SHARD.sub("", file.stem)
    if stem in KNOWN or stem != file.stem:
        return stem, file.parent
    if file.parent.name in KNOWN:
        return file.parent.name, file.parent.parent
    return WHOLE, file.parent


def choose(splits: Mapping[str, StoredSplit], role: str, named: str | None, path: Path) -> StoredSplit | None:
    """Return the split of a role, by the name that the user gave or else by its usual names; None if there is none."""
    if named is not None and named not in splits:
        raise DataError(f'no split "{named}"', str(path), f"set data.{role}_split to one of: {', '.join(splits)}")
    names: Sequence[str] = NAMES[role] if named is None else (named,)
    return next((splits[name] for name in names if name in splits), None)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn whatever pyarrow raises about a file into a `DataError` that names it."""
    import pyarrow

    try:
        yield
    except (OSError, pyarrow.ArrowException, KeyError, ValueError) as error:  # ValueError: names that are no text
        text = " ".join(str(error).split())[:200]
        what = f"not a valid {'Arrow' if file.suffix == '.arrow' else 'Parquet'} file of this data set: {text}"
        raise DataError(what, str(file), "restore or write it again") from error


def _arrow_stream(file: Path) -> Any:
    from pyarrow import ipc, memory_map

    return ipc.open_stream(memory_map(str(file)))


def _parquet(file: Path) -> Any:
    from pyarrow.parquet import ParquetFile

    return ParquetFile(file)


def _parquet_batches(file: Path, column: str) -> Iterator[Any]:
    return iter(_parquet(file).iter_batches(ROWS_PER_BATCH, columns=[column]))
