"""A logger

An extension follows a run through the hooks of its life cycle and changes nothing. This one writes a line for each
epoch to `epochs.csv` in the run directory. When a run is resumed, epochs after its last checkpoint are trained again:
their former lines are replaced.

```toml
[[extensions]]
name = "csv_logger"
columns = ["train_objective", "validation_loss", "validation_accuracy"]
```
"""

from __future__ import annotations

import csv
from pathlib import Path

from pydantic import Field, PrivateAttr

from ensemblekit import Extension, atomic_write, hookimpl


class CsvLogger(Extension):
    """Writes a line for each epoch to a CSV file in the run directory."""

    columns: tuple[str, ...] = Field(
        ("train_objective", "test_loss"), description="metrics to write, as in metrics.jsonl"
    )

    _file: Path = PrivateAttr(Path())

    @hookimpl
    def run_started(self, path):
        self._file = path / "epochs.csv"

    @hookimpl
    def epoch_finished(self, epoch, metrics):
        rows = []
        if self._file.exists():
            with self._file.open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if int(row["epoch"]) < epoch]
        with atomic_write(self._file) as path, path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["epoch", *self.columns], extrasaction="ignore")
            writer.writeheader()
            writer.writerows([*rows, {"epoch": epoch, **metrics}])
