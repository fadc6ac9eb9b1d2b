"""Metrics of every epoch as a CSV file."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr

from ensemblekit import UsageError, atomic_write
from ensemblekit_extensions.tracker import Row, TrackedRun, Tracker


class CSVFile(Tracker):
    """Writes every metric of every epoch to a CSV file, a row for each epoch.

    Columns are in the order in which metrics first appear, beginning with `epoch`; a metric that an epoch does not
    have, such as a test metric between two evaluations, is an empty field. The file of a resumed run is the same as
    that of an uninterrupted one, apart from times.
    """

    path: Path | None = Field(
        None, description="file to write, which must not exist when a run starts; default: metrics.csv in its directory"
    )

    _file: Path = PrivateAttr(Path())
    _rows: list[Row] = PrivateAttr(default_factory=list)
    _columns: list[str] = PrivateAttr(default_factory=list)

    def check(self, is_resumed: bool) -> None:
        if self.path is not None and not is_resumed and os.path.lexists(self.path):
            fix = "choose another path, or leave it out: each run then has its own file"
            raise UsageError("the file exists already", f'extension "{self.name}", {self.path}', fix)

    def open(self, run: TrackedRun) -> None:
        self._file = self.path or run.path / "metrics.csv"
        self._rows, self._columns = run.history, []
        for row in self._rows:
            self._columns += [name for name in row if name not in self._columns]
        self._write_all()

    def log(self, row: Row) -> None:
        if self._rows and row["epoch"] <= self._rows[-1]["epoch"]:
            return
        self._rows.append(row)
        new = [name for name in row if name not in self._columns]
        if new:
            self._columns += new
            self._write_all()
            return
        with self._file.open("a", encoding="utf-8", newline="") as file:
            self._writer(file).writerow(row)

    def close(self, run: TrackedRun, status: str, metrics: Mapping[str, Any], error: BaseException | None) -> None:
        self._rows, self._columns = [], []

    def _write_all(self) -> None:
        if not self._rows:
            return
        with atomic_write(self._file) as staged, staged.open("w", encoding="utf-8", newline="") as file:
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows(self._rows)

    def _writer(self, file: Any) -> csv.DictWriter[str]:
        return csv.DictWriter(file, self._columns, restval="", lineterminator="\n")
