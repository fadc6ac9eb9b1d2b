"""Learning-rate schedules: pure functions of the progress of training."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Literal

from pydantic import Field

from ensemblekit.core.plugin import Section


class Schedule(Section):
    """What the learning rate is multiplied by as training goes on."""

    warmup_epochs: float = Field(0.0, ge=0, description="epochs in which the rate first rises linearly from 0")

    def factor(self, epoch: float, num_epochs: int) -> float:
        """The factor after `epoch` epochs (with fractions) of `num_epochs`."""
        warmup = min(1.0, epoch / self.warmup_epochs) if self.warmup_epochs else 1.0
        return warmup * self._decay(epoch, num_epochs)

    @abstractmethod
    def _decay(self, epoch: float, num_epochs: int) -> float: ...


class Constant(Schedule):
    """The same rate throughout."""

    name: Literal["constant"] = "constant"

    def _decay(self, epoch: float, num_epochs: int) -> float:
        return 1.0


class Step(Schedule):
    """Multiplied by `factor` every `every` epochs."""

    name: Literal["step"] = "step"
    every: int = Field(ge=1, description="epochs between two changes")
    multiplier: float = Field(0.5, alias="factor", gt=0, le=1, description="what the rate is multiplied by")

    def _decay(self, epoch: float, num_epochs: int) -> float:
        return float(self.multiplier ** (int(epoch) // self.every))


class MultiStep(Schedule):
    """Multiplied by `factor` after each of the listed epochs."""

    name: Literal["multistep"] = "multistep"
    after: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, description="epochs after which it changes")
    multiplier: float = Field(0.1, alias="factor", gt=0, le=1, description="what the rate is multiplied by")

    def _decay(self, epoch: float, num_epochs: int) -> float:
        return float(self.multiplier ** sum(epoch >= milestone for milestone in self.after))


class Cosine(Schedule):
    """Falls along half a cosine to `final` times the rate."""

    name: Literal["cosine"] = "cosine"
    final: float = Field(0.0, ge=0, le=1, description="what is left of the rate at the end")

    def _decay(self, epoch: float, num_epochs: int) -> float:
        cosine = (1 + math.cos(math.pi * epoch / num_epochs)) / 2
        return self.final + (1 - self.final) * cosine


SCHEDULES: dict[str, type[Schedule]] = {"constant": Constant, "step": Step, "multistep": MultiStep, "cosine": Cosine}
