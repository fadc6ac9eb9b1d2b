"""The smallest runs that have every file, for tests that damage them by the hundred."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ensemblekit as ek
from helpers.stopping import Stop, StopBefore

SPEC: dict[str, Any] = {
    "data": {"name": "digits", "limit_train": 40, "limit_test": 20, "validation_fraction": 0.2},
    "model": {"name": "mlp", "hidden": [3], "batch_norm": False},
    "ensemble": {"members": 2},
    "method": "gncl",
    "training": {"epochs": 3, "batch_size": 20, "keep": "best"},
    "engine": {"name": "sequential", "device": "cpu"},
}


def train(path: Path, **training: Any) -> ek.Run:
    """Train a tiny run."""
    return ek.train({**SPEC, "training": {**SPEC["training"], **training}}, path, progress=False)


def train_until(path: Path, epoch: int, **training: Any) -> None:
    """Train a tiny run that is stopped before an epoch."""
    spec = {**SPEC, "training": {**SPEC["training"], **training}}
    with pytest.raises(Stop):
        ek.train(spec, path, progress=StopBefore(epoch))


def content(directory: Path) -> dict[str, bytes]:
    """All files of a run, by their names."""
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}
