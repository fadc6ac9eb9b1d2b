"""Learning-rate schedules: pure functions of the progress of training. Each is a plugin, and anyone can add one."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated

from pydantic import Field

from ensemblekit.core.plugin import Plugin


class Schedule(Plugin):
    """The factor of the learning rate as a function of time: implement `decay`."""

    kind = "schedule"

    warmup_epochs: float = Field(0.0, ge=0, description="epochs of linear warm-up from 0")

    def factor(self, epoch: float, num_epochs: int) -> float:
        """Return the factor after `epoch` epochs (with fractions) of `num_epochs`."""
        warmup = min(1.0, epoch / self.warmup_epochs) if self.warmup_epochs else 1.0
        return warmup * self.decay(epoch, num_epochs)

    @abstractmethod
    def decay(self, epoch: float, num_epochs: int) -> float:
        """Return the factor without warm-up after `epoch` (0 ≤ epoch < num_epochs, with fractions) epochs."""


class Constant(Schedule):
    """A constant rate."""

    def decay(self, epoch: float, num_epochs: int) -> float:
        return 1.0


class Step(Schedule):
    """Multiplied by `factor` every `every` epochs."""

    every: int = Field(ge=1, description="epochs between two changes")
    multiplier: float = Field(0.5, alias="factor", gt=0, le=1, description="factor of each change")

    def decay(self, epoch: float, num_epochs: int) -> float:
        return float(self.multiplier ** (int(epoch) // self.every))


class MultiStep(Schedule):
    """Multiplied by `factor` after each of the listed epochs."""

    after: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, description="epochs after which it changes")
    multiplier: float = Field(0.1, alias="factor", gt=0, le=1, description="factor of each change")

    def decay(self, epoch: float, num_epochs: int) -> float:
        return float(self.multiplier ** sum(epoch >= milestone for milestone in self.after))


class Cosine(Schedule):
    """Falls along half a cosine to `final` times the rate."""

    final: float = Field(0.0, ge=0, le=1, description="factor at the end of training")

    def decay(self, epoch: float, num_epochs: int) -> float:
        cosine = (1 + math.cos(math.pi * epoch / num_epochs)) / 2
        return self.final + (1 - self.final) * cosine
