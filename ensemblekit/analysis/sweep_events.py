"""What happens in a sweep, for displays: the base class is silent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ensemblekit.analysis.sweep_rows import SweepRun
from ensemblekit.core.hookspecs import hookimpl


class SweepListener:
    """Follows a sweep. Call `close` when the sweep ends, however it ends."""

    def sweep_started(self, path: Path, runs: Sequence[SweepRun], epochs: Mapping[str, int]) -> None:
        """Announce all runs, those that are finished already too; `epochs` are the epochs of each run by its name."""

    def notice(self, text: str) -> None:
        """Pass on what a user should know although it is no error."""

    def run_started(self, name: str) -> None:
        """Announce a run that is started or resumed."""

    def epoch_started(self, name: str, epoch: int, num_epochs: int) -> None:
        """Announce an epoch of a run."""

    def epoch_finished(self, name: str, epoch: int, num_epochs: int, metrics: Mapping[str, Any]) -> None:
        """Pass on the metrics of an epoch."""

    def run_ended(self, run: SweepRun) -> None:
        """Announce the end of a run, however it ended."""

    def close(self) -> None:
        """Leave the terminal as it was; may be called at any time and more than once."""


class RunEvents:
    """Passes the life cycle of one run on to the listener of its sweep."""

    def __init__(self, name: str, listener: SweepListener) -> None:
        self.name, self.listener = name, listener

    @hookimpl
    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        self.listener.epoch_started(self.name, epoch, num_epochs)

    @hookimpl
    def epoch_finished(self, epoch: int, num_epochs: int, metrics: Mapping[str, Any]) -> None:
        self.listener.epoch_finished(self.name, epoch, num_epochs, metrics)

    @hookimpl
    def notice(self, text: str) -> None:
        self.listener.notice(f"{self.name}: {text}")
