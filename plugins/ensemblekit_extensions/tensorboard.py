"""Metrics of every epoch as curves in TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr

from ensemblekit import Extension, PluginError, hookimpl


class TensorBoard(Extension):
    """Writes every metric of every epoch for TensorBoard.

    View them with `tensorboard --logdir DIRECTORY`. Give each run a directory of its own, such as
    tensorboard/NAME, to compare runs.
    """

    directory: Path = Field(Path("tensorboard"), description="directory of the curves")

    _writer: Any = PrivateAttr(None)

    @hookimpl
    def run_started(self) -> None:
        """Open the files before anything is trained, so that a missing package is found at once."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            fix = "pip install 'ensemblekit[tensorboard]'"
            raise PluginError("TensorBoard is not installed", f'extension "{self.name}"', fix) from error
        self._writer = SummaryWriter(str(self.directory))

    @hookimpl
    def epoch_finished(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Add a point to each curve."""
        for name, value in metrics.items():
            if name != "epoch" and isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, epoch)
        self._writer.flush()

    @hookimpl
    def run_ended(self) -> None:
        """Close the files, also if the run was interrupted or failed."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
