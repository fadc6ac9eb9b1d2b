"""Runs on a small table whose columns and classes have names that a careless page would execute or trip over."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import ensemblekit as ek

SCRIPT = "<script>alert(1)</script>"
NAMES = (SCRIPT, "100 $ & more $", "\x1b[31mred", '"><img src=x onerror=alert(2)>')
COLUMN = "<b>width</b>"


def train_on_odd_table(directory: Path, members: int = 3) -> ek.Run:
    """Train a run in `directory`/run on `directory`/table.csv."""
    file = directory / "table.csv"
    numbers = random.Random(1)
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow([COLUMN, "colour", "kind"])
        for row in range(240):
            kind = row % len(NAMES)
            colour = numbers.choice(["a", "<i>b</i>", ""])
            writer.writerow([round(2 * kind + numbers.gauss(0, 1), 3), colour, NAMES[kind]])
    spec = {
        "data": {"name": "table", "path": str(file), "target": "kind"},
        "model": {"name": "mlp", "hidden": [8]},
        "ensemble": {"members": members},
        "training": {"epochs": 4, "batch_size": 20},
        "engine": {"name": "sequential"},
    }
    return ek.train(spec, directory / "run", progress=False)
