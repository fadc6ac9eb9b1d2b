"""A sweep that takes a moment, for tests of sweep directories."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import ensemblekit as ek
from helpers.places import TOY_PLUGINS

BASE: dict[str, Any] = {
    "data": {"name": "blobs", "validation_fraction": 0.3},
    "model": "linear",
    "ensemble": {"members": 2},
    "method": {"name": "gncl", "lambda": 0.5},
    "training": {"epochs": 2, "batch_size": 4, "optimizer": {"name": "sgd", "lr": 0.1}},
    "engine": {"name": "sequential", "device": "cpu"},
}
PLUGINS = [str(TOY_PLUGINS)]
EXPLODING = '''
from ensemblekit import Method, hookimpl

class Exploding(Method):
    """Trains independently, or fails."""
    fails: bool = False

    @hookimpl
    def member_loss(self, outputs, target, loss, num_members):
        return loss(outputs, target) / num_members * (float("nan") if self.fails else 1.0)
'''
"""A plugin file whose method fails in training if it is told to."""


def sweep(out: Path, spec: Any = BASE, **options: Any) -> ek.Sweep:
    return ek.sweep(spec, out=out, **{"progress": False, "plugins": PLUGINS, **options})


def rows(out: Path) -> list[dict[str, str]]:
    """The rows of results.csv."""
    with (out / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def statuses(out: Path) -> list[str]:
    return [row["status"] for row in rows(out)]


def final_metrics(out: Path) -> list[dict[str, str]]:
    """The rows of results.csv without times."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows(out)]
