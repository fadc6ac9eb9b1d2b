"""Runs that end between the log of an epoch and its checkpoint, and are then resumed."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from helpers import tiny_runs
from helpers.small_runs import Crash
from helpers.tracked_runs import KILLED, CrashAfterLog, Tracked

import ensemblekit as ek


@pytest.fixture(scope="session")
def tracker_settings(tmp_path_factory):
    """Everything that trackers write is in a temporary directory, and they print nothing."""
    folder = tmp_path_factory.mktemp("trackers")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DIR", "CACHE_DIR", "DATA_DIR", "CONFIG_DIR"):
            patch.setenv(f"WANDB_{name}", str(folder))
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="session")
def killed_and_resumed(tracker_settings) -> Tracked:
    """A run that was killed when epoch 2 was logged, but not yet saved, and resumed to its end; logged by wandb."""
    command = [sys.executable, "-c", KILLED]
    assert subprocess.run(command, cwd=tracker_settings, check=False).returncode == -signal.SIGKILL
    return Tracked(tracker_settings, ek.resume(tracker_settings / "killed", progress=False))


@pytest.fixture(scope="session")
def crashed_and_resumed(tracker_settings) -> Tracked:
    """A run that failed when epoch 2 was logged, but not yet saved, and resumed to epoch 4; logged by MLflow."""
    path = tracker_settings / "crashed"
    extension = {"name": "mlflow", "tracking_uri": "sqlite:///store.db", "tags": {"team": "a"}}
    with pytest.raises(Crash):
        ek.train({**tiny_runs.SPEC, "extensions": [extension]}, path, progress=CrashAfterLog())
    failed = Tracked(tracker_settings, ek.open_run(path)).mlflow_run
    assert failed.info.status == "FAILED"
    assert "error" in failed.data.tags
    return Tracked(tracker_settings, ek.resume(path, progress=False, epochs=4))
