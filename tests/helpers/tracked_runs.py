"""Runs that trackers log: what ends them between the log of an epoch and its checkpoint, and where their logs are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ensemblekit as ek
from ensemblekit.display.progress import Progress
from helpers.places import ROOT
from helpers.small_runs import Crash

KILLED = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import ensemblekit as ek
from ensemblekit.display.progress import Progress
from helpers import tiny_runs

class Kill(Progress):
    @ek.hookimpl(trylast=True)
    def epoch_finished(self, epoch):
        if epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)

extensions = [{{"name": "csv"}}, {{"name": "wandb", "mode": "offline", "tags": ["b"]}}]
training = {{**tiny_runs.SPEC["training"], "evaluate_every": 2}}
ek.train({{**tiny_runs.SPEC, "training": training, "extensions": extensions}}, "killed", progress=Kill())
"""


class CrashAfterLog(Progress):
    """Ends training when all have logged an epoch, before its checkpoint."""

    @ek.hookimpl(trylast=True)
    def epoch_finished(self, epoch):
        if epoch == 2:
            raise Crash


def page_of(path: Path, plugins: object) -> Path:
    """Write a page in place of the report."""
    (path / "report.html").write_text("a page")
    return path / "report.html"


@dataclass(frozen=True)
class Tracked:
    """A run with trackers, and the directory of their files."""

    folder: Path
    run: ek.Run

    @property
    def store(self) -> Any:
        """MLflow's own client for the store of these tests."""
        from mlflow import MlflowClient

        return MlflowClient(f"sqlite:///{self.folder}/store.db")

    @property
    def mlflow_run(self) -> Any:
        """The run as MLflow's own client reads it."""
        return self.store.get_run(json.loads((self.run.path / "mlflow.json").read_text())["run_id"])

    @property
    def wandb_files(self) -> list[Path]:
        """The offline files of this run, oldest first."""
        import wandb

        wandb.teardown()  # waits until everything is on the disk
        run_id = json.loads((self.run.path / "wandb.json").read_text())["run_id"]
        return sorted((self.folder / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
