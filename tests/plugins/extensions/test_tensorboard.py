"""The extension that writes curves for TensorBoard; the package itself is stood in for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner
from ensemblekit_extensions.tensorboard import TensorBoard

from ensemblekit import PluginError
from ensemblekit.cli import main
from ensemblekit.core.hooks import RunHooks
from ensemblekit.core.registry import discover


class FakeWriter:
    """Takes what a SummaryWriter takes."""

    opened: list[FakeWriter]

    def __init__(self, log_dir: str) -> None:
        self.log_dir = log_dir
        self.points: list[tuple[str, float, int]] = []
        self.closed = False
        self.opened.append(self)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.points.append((tag, scalar_value, global_step))

    def flush(self) -> None:
        self.flushed = len(self.points)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def opened(monkeypatch) -> list[FakeWriter]:
    """The writers that were opened."""
    module = ModuleType("torch.utils.tensorboard")
    FakeWriter.opened = []
    module.SummaryWriter = FakeWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return FakeWriter.opened


def test_every_number_of_every_epoch_is_written(opened):
    hooks = RunHooks([TensorBoard(directory=Path("curves"))]).call
    start(hooks)
    rows = [
        {
            "epoch": epoch,
            "test_accuracy": 0.5 + epoch / 10,
            "samples": 7,
            "engine": "stacked",
            "validation_accuracy": None,
        }
        for epoch in (1, 2)
    ]
    for row in rows:
        hooks.epoch_finished(epoch=row["epoch"], num_epochs=2, metrics=row)
    (writer,) = opened
    assert writer.log_dir == "curves"
    assert writer.points == [
        ("test_accuracy", 0.6, 1),
        ("samples", 7, 1),
        ("test_accuracy", 0.7, 2),
        ("samples", 7, 2),
    ]
    assert writer.flushed == 4
    assert not writer.closed


def start(hooks) -> None:
    hooks.run_started(spec=None, path=Path("run"), plan=[])


@pytest.mark.parametrize("status", ["finished", "interrupted", "failed"])
def test_the_files_are_closed_however_the_run_ends(opened, status):
    hooks = RunHooks([TensorBoard()]).call
    start(hooks)
    hooks.run_ended(status=status, metrics={}, members=[], seconds={}, error=None)
    (writer,) = opened
    assert writer.closed


def test_nothing_is_written_before_training_starts(opened):
    TensorBoard()
    assert opened == []


def test_a_missing_package_is_found_before_the_first_step_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # importing it is now an ImportError
    hooks = RunHooks([TensorBoard()]).call
    with pytest.raises(PluginError, match=r"pip install 'ensemblekit\[tensorboard\]'") as caught:
        start(hooks)
    assert caught.value.exit_code == 4


def test_it_is_registered_and_listed_without_its_package():
    assert discover().get("extension", "tensorboard").load() is TensorBoard
    entries = json.loads(CliRunner().invoke(main, ["list", "extensions", "--json"]).stdout)
    (entry,) = [entry for entry in entries if entry["name"] == "tensorboard"]
    assert entry["description"] == "Writes every metric of every epoch for TensorBoard."
