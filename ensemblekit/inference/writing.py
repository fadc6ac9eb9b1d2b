"""Writes predictions as CSV, JSON or Parquet, some at a time."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from typing import Any, BinaryIO, Literal, Protocol

from ensemblekit.core.errors import ResourceError, UsageError
from ensemblekit.core.files import atomic_write
from ensemblekit.core.streams import DocumentOutput, escape_json

FileFormat = Literal["csv", "json", "parquet"]
_BY_EXTENSION: dict[str, FileFormat] = {
    "": "csv",
    ".csv": "csv",
    ".txt": "csv",
    ".json": "json",
    ".parquet": "parquet",
}
# A quota or a limit on a file's size stops writing just as a full disk does.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Record = Mapping[str, Any]


class TextStream(Protocol):
    """What text is written to: a file, or standard output."""

    def write(self, text: str, /) -> int:
        """Write text."""

    def flush(self) -> None:
        """Write what is still buffered."""


class Writer(Protocol):
    """Writes records, which all have the same keys; `close` completes what was written."""

    def write(self, records: Sequence[Record]) -> None:
        """Write some records."""

    def close(self) -> None:
        """Write the end."""


class CsvWriter:
    """A table with a header."""

    def __init__(self, stream: TextStream) -> None:
        self.stream = stream
        self.writer: csv.DictWriter[str] | None = None

    def write(self, records: Sequence[Record]) -> None:
        if records and self.writer is None:
            self.writer = csv.DictWriter(self.stream, list(records[0]), lineterminator="\n")
            self.writer.writeheader()
        if self.writer is not None:
            self.writer.writerows(records)

    def close(self) -> None:
        """A table has no end."""


class JsonWriter:
    """A list of objects."""

    def __init__(self, stream: TextStream) -> None:
        self.stream = stream
        self.separator = "[\n"

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
            self.stream.write(self.separator + indent(escape_json(text), "  "))
            self.separator = ",\n"

    def close(self) -> None:
        self.stream.write("[]\n" if self.separator == "[\n" else "\n]\n")


class ParquetWriter:
    """A Parquet file with a group of rows for each call of `write`."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.writer: Any = None

    def write(self, records: Sequence[Record]) -> None:
        import pyarrow
        from pyarrow import parquet

        if not records:
            return
        table = pyarrow.Table.from_pylist([dict(record) for record in records])
        if self.writer is None:
            self.writer = parquet.ParquetWriter(self.stream, table.schema)
        self.writer.write_table(table)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def choose_format(chosen: FileFormat | None, output: Path | None) -> FileFormat:
    """Return the chosen format, or that of the output's extension; CSV if it has none.

    Raises:
        UsageError: the extension is unknown and no format is chosen, or Parquet cannot be written.
    """
    file_format = chosen or _format_of(output)
    if file_format == "parquet" and output is None:
        raise UsageError("Parquet is not text", "--format parquet", "write it to a file: --output FILE.parquet")
    if file_format == "parquet" and find_spec("pyarrow") is None:
        fix = "pip install 'ensemblekit[parquet]', or choose csv or json"
        raise UsageError("Parquet needs the package pyarrow, which is not installed", "--format parquet", fix)
    return file_format


def _format_of(output: Path | None) -> FileFormat:
    # a pipe or a device, such as /dev/fd/3, is no file with an extension
    if output is None or (output.exists() and not output.is_file()):
        return "csv"
    extension = output.suffix.lower()
    if extension not in _BY_EXTENSION:
        what = f'no format has the extension "{output.suffix}"'
        fix = "use .csv, .json or .parquet, or choose --format csv, json or parquet"
        raise UsageError(what, f"--output {output}", fix)
    return _BY_EXTENSION[extension]


def writer_to(path: Path | None, file_format: FileFormat) -> AbstractContextManager[Writer]:
    """Return a writer to a file, or to standard output if no file is named."""
    return text_writer(DocumentOutput(), file_format) if path is None else file_writer(path, file_format)


@contextmanager
def text_writer(stream: TextStream, file_format: FileFormat) -> Iterator[Writer]:
    """Yield a writer to an open text stream."""
    writer: Writer = JsonWriter(stream) if file_format == "json" else CsvWriter(stream)
    yield writer
    writer.close()
    stream.flush()


@contextmanager
def file_writer(path: Path, file_format: FileFormat) -> Iterator[Writer]:
    """Yield a writer to a file that takes the place of an older one when the block ends without an error.

    Raises:
        UsageError: the file cannot be written.
        ResourceError: the disk is full; an older file is unchanged.
    """
    with _write_errors(path):
        if path.exists() and not path.is_file():  # a pipe or a device cannot be replaced
            with _opened(path, file_format) as writer:
                yield writer
            return
        target = path.resolve()
        if not target.parent.is_dir():
            raise NotADirectoryError(errno.ENOENT, os.strerror(errno.ENOENT))
        with atomic_write(target) as staged:
            with _opened(staged, file_format) as writer:
                yield writer
            if target.exists():
                shutil.copymode(target, staged)


@contextmanager
def _opened(path: Path, file_format: FileFormat) -> Iterator[Writer]:
    if file_format == "parquet":
        with path.open("wb") as binary:
            parquet_writer = ParquetWriter(binary)
            yield parquet_writer
            parquet_writer.close()
        return
    with path.open("w", encoding="utf-8", newline="") as text, text_writer(text, file_format) as writer:
        yield writer


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turn a failure to write the file that a user named into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            what = f"disk full: {error.strerror}"
            raise ResourceError(what, str(path), "make room on this disk; an older file is unchanged") from error
        what = f"cannot be written: {error.strerror or error}"
        raise UsageError(what, str(path), "name a file in a directory that you may write to") from error


def format_records(records: Sequence[Record], file_format: Literal["csv", "json"]) -> str:
    """Format records as a CSV table with a header, or as a JSON list of objects."""
    text = io.StringIO(newline="")
    with text_writer(text, file_format) as writer:
        writer.write(records)
    return text.getvalue()
