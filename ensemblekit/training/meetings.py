"""Meetings of the processes that train together: they compare where they are, and decide together to stop or to save.

Signals and clocks reach each process at another moment, but all have to stop and to save at the same step. A process
alone decides at every step; several meet about once a second.
"""

from __future__ import annotations

import time
import zlib

from ensemblekit.core.errors import RanksDifferError
from ensemblekit.data.loading import Batch
from ensemblekit.ranks.group import Group
from ensemblekit.training.interruption import StopRequest

SECONDS_BETWEEN = 1.0
MOST_STEPS = 10_000
FACTS = {"step": "another step", "samples": "other samples in its batch"}


class Meetings:
    """What the processes of a training have agreed on.

    Args:
        group: the processes.
        stop: asks this one to stop.
    """

    def __init__(self, group: Group, stop: StopRequest) -> None:
        self.group, self.stop = group, stop
        self._agreed_to_stop = False
        self.begin_anew()

    def begin_anew(self) -> None:
        """Meet at the next step; after a checkpoint, so that what follows depends on the checkpoint only."""
        self._agreed_to_save = False
        self._next_step = 0
        self._last: tuple[int, float] | None = None
        """The step and the time of the last meeting."""

    @property
    def must_stop(self) -> bool:
        """Whether all processes stop here."""
        return self.stop.signal_number is not None if self.group.is_alone else self._agreed_to_stop

    def must_save(self, is_due: bool) -> bool:
        """Whether all processes save here; `is_due` says whether a process alone would."""
        if self.group.is_alone:
            return is_due
        agreed, self._agreed_to_save = self._agreed_to_save, False
        return agreed

    def meet(self, step: int, batch: Batch, is_due: bool) -> None:
        """Meet the others before a step of the run, if it is time.

        Args:
            step: counted over the whole run.
            batch: the samples of the step, which must be those of the others.
            is_due: whether it is time for a checkpoint, as the clock of this process says.

        Raises:
            RanksDifferError: a rank is at another step, or has other samples.
        """
        if self.group.is_alone or step < self._next_step:
            return
        samples = zlib.crc32(batch.index.cpu().numpy().tobytes())
        now = time.monotonic()
        seconds = SECONDS_BETWEEN if self._last is None else (now - self._last[1]) / max(step - self._last[0], 1)
        own = {"step": step, "samples": samples, "signal": self.stop.signal_number or 0}
        rows = self.group.gather_json({**own, "due": is_due, "seconds": seconds})
        for rank, row in enumerate(rows):
            for fact in FACTS:
                if row[fact] != rows[0][fact]:
                    what = f"rank {rank} differs from rank 0 at step {step}: it has {FACTS[fact]}"
                    raise RanksDifferError(what, "training data", "give all ranks the same data, spec and versions")
        if signal_number := max(row["signal"] for row in rows):
            self.stop.signal_number = self.stop.signal_number or signal_number
            self._agreed_to_stop = True
        self._agreed_to_save = rows[0]["due"]
        # the same on all ranks, because all have the same numbers
        slowest = max(row["seconds"] for row in rows)
        self._next_step = step + min(max(int(SECONDS_BETWEEN / max(slowest, 1e-6)), 1), MOST_STEPS)
        self._last = step, time.monotonic()
