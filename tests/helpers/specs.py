"""A spec that sets every part, for tests of reading it."""

from __future__ import annotations

from typing import Any

FULL: dict[str, Any] = {
    "seed": 3,
    "data": {"name": "blobs", "spread": 0.5},
    "model": {"name": "linear", "bias": False},
    "ensemble": {"members": 4},
    "method": [{"name": "bagging", "weights": "subsample", "fraction": 0.5}, {"name": "gncl", "lambda": 0.6}],
    "training": {
        "epochs": 7,
        "batch_size": 16,
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "schedule": {"name": "step", "every": 25, "factor": 0.5},
    },
    "engine": {"name": "sequential", "device": "cpu"},
}
