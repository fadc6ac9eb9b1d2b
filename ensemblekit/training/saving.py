"""Saves checkpoints of a run in training: at the end of each epoch, and now and then inside a long one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ensemblekit.runs.checkpoints import Checkpoint
from ensemblekit.runs.manifests import Position
from ensemblekit.training import partial_epoch
from ensemblekit.training.checks import check_tensors
from ensemblekit.training.statistics import EpochStatistics

if TYPE_CHECKING:
    from ensemblekit.training.trainer import Trainer


class Saver:
    """Saves what is finite of a trainer, and knows what was saved last."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.directory = trainer, trainer.directory
        self.interval = 60 * trainer.spec.training.checkpoint_every_minutes
        self.last = Position(0)
        """The moment of the last checkpoint."""
        self.last_time = time.monotonic()

    @property
    def kept(self) -> str:
        """Says which checkpoint is kept, for errors."""
        return f"{self.directory.path} keeps the checkpoint of {self.last}"

    @property
    def is_due(self) -> bool:
        """Whether the last checkpoint is so long ago that there should be one inside the epoch."""
        return time.monotonic() - self.last_time >= self.interval

    def save(self, epoch: int, is_best: bool = False) -> None:
        """Save a checkpoint after `epoch` epochs."""
        self._save(Position(epoch), is_best, None)

    def save_within(self, statistics: EpochStatistics, epoch: int) -> None:
        """Save a checkpoint inside the epoch with this number, after the steps that are in the statistics."""
        statistics.check_all(epoch, self.kept)
        self._save(Position(epoch - 1, statistics.num_steps), False, statistics)

    def _save(self, position: Position, is_best: bool, statistics: EpochStatistics | None) -> None:
        trainer = self.trainer
        if not self.directory.wants_checkpoint(is_best):
            self.has_saved(position)
            return
        with trainer.clock.measure("checkpoints"):
            trainer.engine.store_optimizer_state()
            tensors = trainer.tensors()
            check_tensors(tensors, str(position), self.kept)
            state = {"members": trainer.members.state(), **trainer.state()}
            if statistics is not None:
                tensors |= partial_epoch.tensors_of(statistics, trainer.device)
                state[partial_epoch.KEY] = statistics.state()
            self.directory.save_checkpoint(Checkpoint(position.epoch, tensors, state, position.step), best=is_best)
        trainer.group.saved(position.epoch, position.step)
        trainer.meetings.begin_anew()
        self.has_saved(position)
        trainer.hooks.call.checkpoint_saved(epoch=position.epoch, step=position.step, path=self.directory.path)

    def has_saved(self, position: Position) -> None:
        """Remember the moment of the last checkpoint, which was saved or loaded."""
        self.last, self.last_time = position, time.monotonic()
        path = self.directory.path
        what = f"stopped at once: the checkpoint of {position} is kept"
        self.trainer.stop.outcome = (what, str(path), f"continue with: ensemblekit resume {path}")
