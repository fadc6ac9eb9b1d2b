"""Fast geometric ensembling: snapshots of a trained network during short cycles of the learning rate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field, ValidationInfo, field_validator

from ensemblekit import Problem, hookimpl
from ensemblekit_methods.snapshot_method import SnapshotMethod

if TYPE_CHECKING:
    from ensemblekit import Spec


class FastGeometric(SnapshotMethod):
    """Trains one network, then cycles the learning rate and keeps a snapshot whenever the rate is lowest.

    A cycle starts at the highest rate, is lowest in its middle and ends at the highest rate. It has an even number of
    epochs, so that its middle is the end of an epoch, where snapshots are kept. Training ends in the middle of the last
    cycle, so the final network is the last member. The last (cycles - 1/2) cycle epochs are cycles; the epochs before
    follow the spec's schedule. Steps count from 0, as in the authors' code: the last step before a snapshot is one step
    short of the lowest rate.
    """

    paper = "Garipov et al. 2018, Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs, section 5"
    formula = (
        "l(h, y) for the network h in training;  f = mean of its snapshots and the final h;  at t of a cycle,\n"
        "rate / base = (1 - 2t) high + 2t low  for t <= 1/2,  (2 - 2t) low + (2t - 1) high  after"
    )

    cycles: int = Field(5, ge=1, description="number of cycles; each adds one member")
    cycle: int = Field(2, ge=2, multiple_of=2, description="epochs of a cycle, from one highest rate to the next")
    high: float = Field(0.5, gt=0, description="highest rate of a cycle, as a multiple of the optimizer's")
    low: float = Field(0.005, gt=0, description="lowest rate of a cycle, as a multiple of the optimizer's")

    @field_validator("low")
    @classmethod
    def _low_is_below_high(cls, low: float, info: ValidationInfo) -> float:
        if "high" in info.data and low >= info.data["high"]:
            raise ValueError(f"must be below high, which is {info.data['high']}")
        return low

    def required_members(self) -> int:
        return self.cycles

    def first_cycle_at(self, num_epochs: int) -> int:
        """Number of epochs of ordinary training before the first cycle."""
        return num_epochs - self._num_cycle_epochs()

    def _num_cycle_epochs(self) -> int:
        return self.cycles * self.cycle - self.cycle // 2

    def snapshot_epochs(self, num_epochs: int) -> range:
        first_middle = self.first_cycle_at(num_epochs) + self.cycle // 2
        # the middle of the last cycle is the end of training
        return range(first_middle + 1, num_epochs + 1, self.cycle)

    @hookimpl
    def learning_rate(self, base: float, epoch: float, num_epochs: int) -> float | None:
        elapsed = epoch - self.first_cycle_at(num_epochs)
        if elapsed < 0:
            return None
        position = elapsed % self.cycle / self.cycle
        height = abs(1 - 2 * position)  # 1 at both ends of a cycle and 0 in its middle
        return base * (height * self.high + (1 - height) * self.low)

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        yield from super().check_spec(spec)
        epochs, needed = spec.training.epochs, self._num_cycle_epochs()
        if self.first_cycle_at(epochs) < 1:
            what = f"{self.cycles} cycles of {self.cycle} epochs, the last one half, need {needed} epochs"
            fix = f"set training.epochs to {needed + 1} or more, or lower cycles or cycle"
            yield Problem("cycles", f"{what}, so no epoch of {epochs} is left for the training before them", fix)
