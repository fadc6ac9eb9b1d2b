"""A small calibrated run on data with hostile names, and its model folder, for tests that load, damage and read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import ensemblekit as ek

NAMES = (
    "<script>alert(1)</script>",
    "a|b **bold** `code` [link](https://example.com) &amp; $x$ _u_",
    "# head\n---\nlicense: gpl: \x1b[31m",
    "1e-05: [\"\\u0000\", 'x'] {% raw %} {{ name }} 😀",
)
SPEC: dict[str, Any] = {
    "data": {"validation_fraction": 0.3},
    "model": {"name": "mlp", "hidden": [4]},
    "ensemble": {"members": 3},
    "training": {"epochs": 2, "batch_size": 50},
    "engine": {"name": "sequential", "device": "cpu"},
}


def samples(seed: int = 0, num_samples: int = 240) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (N, 3) and the names of their classes."""
    random = np.random.default_rng(seed)
    classes = random.integers(len(NAMES), size=num_samples)
    inputs = random.normal(size=(num_samples, 3)) + classes[:, None] * [1.0, -1.0, 0.5]
    return inputs.astype(np.float32), np.array(NAMES)[classes]


def train(path: Path, **options: Any) -> ek.Run:
    """Train a small run, calibrate it, and give it prediction sets."""
    run = ek.train(SPEC, path, progress=False, data=samples(), **options)
    ek.calibrate(path, **options)
    ek.conform(path, error=0.2, **options)
    return run
