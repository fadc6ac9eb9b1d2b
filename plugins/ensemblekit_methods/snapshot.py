"""Snapshot ensembles: snapshots of one network during its training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, ValidationInfo, field_validator

from ensemblekit import Problem, hookimpl
from ensemblekit_methods.snapshot_method import SnapshotMethod

if TYPE_CHECKING:
    from ensemblekit import Spec

PAPER_EPOCHS = (2, 3, 4, 5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80, 90)


class Snapshot(SnapshotMethod):
    """Trains one network and keeps snapshots of it; the ensemble is the snapshots and the final network.

    Snapshots are kept at the start of each epoch in `at_epochs` (counted from 1). With `cycles` instead, the learning
    rate falls to 0 along a cosine and restarts that many times, and a snapshot is kept at the end of each cycle.
    The network in training is always the last member.
    """

    paper = "Qiu et al. 2014, Ensemble Deep Learning; Huang et al. 2017, Snapshot Ensembles: Train 1, Get M for Free"
    formula = "l(h, y) for the network h in training;  f = mean of its snapshots and the final h"

    cycles: int | None = Field(None, ge=1, description="number of cycles of the learning rate; each adds one member")
    at_epochs: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        # cycles replace the paper's epochs
        default_factory=lambda fields: None if fields.get("cycles") else PAPER_EPOCHS,
        min_length=1,
        description="epochs at whose start a snapshot is kept, if cycles is not set",
        json_schema_extra={"default": list(PAPER_EPOCHS)},
    )

    @field_validator("at_epochs")
    @classmethod
    def _in_order(cls, at_epochs: tuple[int, ...] | None, info: ValidationInfo) -> tuple[int, ...] | None:
        if at_epochs is not None and info.data.get("cycles") is not None:
            raise ValueError("cannot be combined with cycles: remove one of them")
        if at_epochs is not None and list(at_epochs) != sorted(set(at_epochs)):
            raise ValueError(f"must be ascending without repetitions: write {sorted(set(at_epochs))}")
        return at_epochs

    def required_members(self) -> int:
        return self.cycles or len(self.at_epochs or ()) + 1

    @hookimpl
    def learning_rate(self, base: float, epoch: float, num_epochs: int) -> float | None:
        if self.cycles is None:
            return None
        ends = [cycle * num_epochs // self.cycles for cycle in range(self.cycles + 1)]
        start, end = next((start, end) for start, end in pairwise(ends) if epoch < end)
        return base / 2 * (math.cos(math.pi * (epoch - start) / (end - start)) + 1)  # Huang et al. 2017, eq. 2

    def snapshot_epochs(self, num_epochs: int) -> tuple[int, ...]:
        # cycles are whole epochs and differ by at most one
        if self.cycles is None:
            return self.at_epochs or ()
        return tuple(1 + cycle * num_epochs // self.cycles for cycle in range(1, self.cycles))

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        yield from super().check_spec(spec)
        epochs = spec.training.epochs
        if self.cycles is not None and self.cycles > epochs:
            what = f"{self.cycles}, but there are only {epochs} epochs"
            yield Problem("cycles", what, f"set it to {epochs} or less, or train longer")
        late = [epoch for epoch in self.at_epochs or () if epoch > epochs]
        if late:
            what = f"snapshots at epochs {late}, but there are only {epochs} epochs"
            fitting = [epoch for epoch in self.at_epochs or () if epoch <= epochs] or [epochs]
            yield Problem("at_epochs", what, f"set at_epochs = {fitting}, or training.epochs = {late[-1]} or more")
