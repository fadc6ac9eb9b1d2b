"""A display that ends a run at a chosen moment, as the death of the process would."""

from __future__ import annotations

from ensemblekit.core.hookspecs import hookimpl
from ensemblekit.display.progress import Progress


class Stop(BaseException):
    """Stands for the end of the process."""


class StopBefore(Progress):
    """Ends the run before an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    @hookimpl
    def epoch_started(self, epoch: int) -> None:
        if epoch == self.epoch:
            raise Stop
