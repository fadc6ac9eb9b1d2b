"""Small runs on digits, what ends them early, and how two of them are compared."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ensemblekit.core.hookspecs import hookimpl
from ensemblekit.display.progress import Progress

TIMES = {"seconds", "images_per_second", "samples_per_second", "sha256"}


def small_spec(**changes: Any) -> dict[str, Any]:
    """A few small networks with dropout and batch norm on augmented digits, 4 steps in an epoch."""
    base = {
        "data": {"name": "digits", "limit_train": 200, "limit_test": 100, "augment": ["crop", "rotate"], "padding": 1},
        "model": {"name": "mlp", "hidden": [16], "dropout": 0.2},
        "ensemble": {"members": 3},
        "training": {"epochs": 3, "batch_size": 50, "optimizer": {"name": "adabelief", "lr": 0.01}},
        "engine": {"name": "sequential", "device": "cpu"},
    }
    return base | changes


def training(**changes: Any) -> dict[str, Any]:
    """The training section of `small_spec`, changed."""
    return small_spec()["training"] | changes


class Crash(BaseException):
    """Stands for the end of the process: nothing contains it."""


class CrashAfter(Progress):
    """Ends training after a step."""

    def __init__(self, epoch: int, step: int) -> None:
        self.last = (epoch, step)

    @hookimpl
    def step_finished(self, epoch, step):
        if (epoch, step) == self.last:
            raise Crash


class CrashOnSave(Progress):
    """Ends training right after a checkpoint."""

    def __init__(self, epoch: int, step: int = 0) -> None:
        self.last = (epoch, step)

    @hookimpl
    def checkpoint_saved(self, epoch, step):
        if (epoch, step) == self.last:
            raise Crash


class SignalAfter(Progress):
    """Sends this process a signal after a step, or in another moment of the life cycle."""

    def __init__(self, number: int, epoch: int = 0, step: int = 0, hook: str = "step_finished", times: int = 1) -> None:
        self.number, self.moment, self.hook, self.times = number, (epoch, step), hook, times

    def _send(self, hook: str, epoch: int = 0, step: int = 0) -> None:
        if (hook, (epoch, step)) == (self.hook, self.moment):
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)

    @hookimpl
    def run_started(self):
        self._send("run_started")

    @hookimpl
    def step_finished(self, epoch, step):
        self._send("step_finished", epoch, step)

    @hookimpl
    def epoch_finished(self, epoch):
        self._send("epoch_finished", epoch)

    @hookimpl
    def checkpoint_saved(self, epoch, step):
        self._send("checkpoint_saved", epoch, step)


def rows(run: Path) -> list[dict[str, Any]]:
    """The metrics of each epoch, without times and checksums."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in TIMES} for line in lines]


def assert_same_tensors(first: Path, second: Path) -> None:
    left, right = load_file(first), load_file(second)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def assert_same_run(first: Path, second: Path) -> None:
    """Weights, optimizer and metrics, bit-identical."""
    assert_same_tensors(first / "model.safetensors", second / "model.safetensors")
    last = max((first / "checkpoints").glob("*.safetensors")).name
    assert_same_tensors(first / "checkpoints" / last, second / "checkpoints" / last)
    assert rows(first) == rows(second)


def checkpoints(run: Path) -> list[str]:
    """The names of all checkpoints of a run."""
    return sorted(path.name.removesuffix(".safetensors") for path in (run / "checkpoints").glob("*.safetensors"))
