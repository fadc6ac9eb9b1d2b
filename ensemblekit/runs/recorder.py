"""Writes the metrics and the status of a run to its directory: a listener of the run's life cycle like any other."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ensemblekit.core.errors import EnsemblekitError
from ensemblekit.core.hookspecs import RunStatus, hookimpl
from ensemblekit.runs.directory import RunDirectory


class RunRecorder:
    """Appends a line to metrics.jsonl for each epoch, keeps notices, and records how the run ended."""

    is_essential = True
    """The run fails if it cannot be recorded."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.notices = directory.notices
        """Each notice of the run once, also those from before it was resumed."""

    # first of all listeners: the metrics of an epoch are on the disk before anybody logs them
    @hookimpl(tryfirst=True)
    def epoch_finished(self, metrics: Mapping[str, Any]) -> None:
        self.directory.append_metrics(metrics)

    @hookimpl(tryfirst=True)
    def notice(self, text: str) -> None:
        if text not in self.notices:
            self.notices.append(text)

    @hookimpl(tryfirst=True)
    def run_ended(self, status: RunStatus, error: BaseException | None) -> None:
        if error is None:
            self.directory.write_status(status, notices=self.notices)
            return
        text = error.line if isinstance(error, EnsemblekitError) else f"{type(error).__name__}: {error}"
        with suppress(EnsemblekitError):  # the error that ended the run is the one to report
            self.directory.write_status(status, text, self.notices)
