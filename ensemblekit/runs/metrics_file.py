"""metrics.jsonl: one row of metrics for each epoch; the checksum of a row covers all rows before it too."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ensemblekit.core.errors import RunError
from ensemblekit.runs.atomic import replace_file, write_all, write_errors
from ensemblekit.runs.manifests import MetricsMark
from ensemblekit.runs.sealing import KEY, encoded, is_intact, sealed, unsealed

_FIX = "restore the file, or delete it and resume the run, which then has no metrics of past epochs"


class MetricsFile:
    """The rows of a run; `checksum_required` is False for files of format 1, whose rows have no checksums."""

    def __init__(self, path: Path, checksum_required: bool = True) -> None:
        self.path, self.checksum_required = path, checksum_required

    @property
    def is_missing(self) -> bool:
        """Whether there is no file."""
        return not os.path.lexists(self.path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row; after an error no part of it is in the file."""
        with write_errors(self.path):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
            try:
                whole = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
                end = whole.rfind(b"\n") + 1
                os.ftruncate(descriptor, end)
                try:
                    write_all(descriptor, encoded(sealed(row, _last_checksum(whole[:end])), indent=None))
                    os.fsync(descriptor)
                except BaseException:
                    os.ftruncate(descriptor, end)
                    raise
            finally:
                os.close(descriptor)

    def mark(self) -> MetricsMark:
        """Return how far the file is written."""
        whole = self._content()
        end = whole.rfind(b"\n") + 1
        return MetricsMark(whole.count(b"\n"), _last_checksum(whole[:end]))

    def read(self, mark: MetricsMark | None = None, complete: bool = False) -> list[dict[str, Any]]:
        """Return all rows, oldest first; a torn last line is ignored.

        Args:
            mark: rows that must be there.
            complete: whether nothing may follow them, not even a torn line.

        Raises:
            RunError: a row is damaged or missing.
        """
        *lines, torn = self._content().split(b"\n")
        rows: list[dict[str, Any]] = []
        previous, checksums = "", [""]
        for number, line in enumerate(lines, start=1):
            row = _parsed(line)
            if row is None:
                raise self._damaged(f"line {number} is not a JSON object")
            if self.checksum_required or KEY in row:
                if not is_intact(row, previous) or line + b"\n" != encoded(row, indent=None):
                    raise self._damaged(f"line {number} or one before it was changed (checksum mismatch)")
                previous = row[KEY]
            checksums.append(previous)
            rows.append(unsealed(row))
        if mark is not None:
            self._check_mark(mark, checksums, complete and torn != b"")
            if complete and len(rows) > mark.rows:
                raise self._damaged(f"{len(rows)} lines, but the run has written {mark.rows}")
        return rows

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace all rows, atomically."""
        content, previous = [], ""
        for row in rows:
            written = sealed(row, previous)
            previous = written[KEY]
            content.append(encoded(written, indent=None))
        replace_file(self.path, b"".join(content))

    def _check_mark(self, mark: MetricsMark, checksums: list[str], has_torn_line: bool) -> None:
        rows = len(checksums) - 1
        if rows < mark.rows:
            if self.is_missing:
                what = f"{self.path.name} is missing: it holds the metrics of {mark.rows} epochs"
                raise RunError(what, str(self.path), _FIX, path=str(self.path))
            raise self._damaged(f"{rows} lines, but the run has written {mark.rows}")
        if checksums[mark.rows] != mark.sha256:
            raise self._damaged(f"line {mark.rows} or one before it was changed (checksum mismatch)")
        if has_torn_line:
            raise self._damaged("something was added after the last line")

    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise RunError(f"cannot read: {error.strerror}", str(self.path), _FIX, path=str(self.path)) from error

    def _damaged(self, reason: str) -> RunError:
        what = f"damaged: {reason}; {self.path.name} holds the metrics of each epoch"
        return RunError(what, str(self.path), _FIX, path=str(self.path))


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _last_checksum(lines: bytes) -> str:
    """Return the checksum in the last of these lines; empty if there is none."""
    if not lines:
        return ""
    row = _parsed(lines[lines.rfind(b"\n", 0, -1) + 1 :])
    return str((row or {}).get(KEY, ""))
