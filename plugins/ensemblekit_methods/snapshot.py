"""Snapshot ensembles: one network trains, and copies of it are kept on the way."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, ValidationInfo, field_validator

from ensemblekit import Problem, hookimpl
from ensemblekit_methods.snapshot_method import KeptCopies

if TYPE_CHECKING:
    from ensemblekit import Spec

PAPER_EPOCHS = (2, 3, 4, 5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80, 90)


class Snapshot(KeptCopies):
    """Trains one network and keeps copies of it on the way; the ensemble is the copies and the final network.

    Copies are kept at the start of each epoch in `at_epochs` (counted from 1). With `cycles` instead, the learning
    rate falls to 0 along a cosine and restarts that many times, and a copy is kept at the end of each cycle.
    The live network is always the last member.
    """

    paper = "Qiu et al. 2014, Ensemble Deep Learning; Huang et al. 2017, Snapshot Ensembles: Train 1, Get M for Free"
    formula = "l(h_live, y);  f = mean of the kept copies and the final network"

    cycles: int | None = Field(None, ge=1, description="cycles of the learning rate, each leaving one member")
    at_epochs: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        # cycles take the place of the paper's epochs
        default_factory=lambda given: None if given.get("cycles") else PAPER_EPOCHS,
        min_length=1,
        description="epochs at whose start a copy is kept, if there are no cycles",
        json_schema_extra={"default": list(PAPER_EPOCHS)},
    )

    @field_validator("at_epochs")
    @classmethod
    def _in_order(cls, at_epochs: tuple[int, ...] | None, info: ValidationInfo) -> tuple[int, ...] | None:
        if at_epochs is not None and info.data.get("cycles") is not None:
            raise ValueError("excludes cycles: remove one of them")
        if at_epochs is not None and list(at_epochs) != sorted(set(at_epochs)):
            raise ValueError(f"must rise without repeats: write {sorted(set(at_epochs))}")
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

    def kept_at(self, num_epochs: int) -> tuple[int, ...]:
        # cycles are whole epochs and differ by one at most
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
            what = f"copies are to be kept at epochs {late}, but training ends after {epochs}"
            fitting = [epoch for epoch in self.at_epochs or () if epoch <= epochs] or [epochs]
            yield Problem("at_epochs", what, f"set at_epochs = {fitting}, or training.epochs = {late[-1]} or more")
