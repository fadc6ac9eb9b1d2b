"""The run spec: what a TOML file says, validated. Its sections are the plugins' own pydantic models."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import tomli_w
from pydantic import Field, field_validator

from ensemblekit.core.losses import Loss
from ensemblekit.core.plugin import Dataset, Extension, Method, Model, Section
from ensemblekit.spec.optimizers import Optimizer
from ensemblekit.spec.schedules import Schedule


class EnsembleSection(Section):
    """How many members there are; `groups` of members with models of their own are tables below it."""

    members: int = Field(5, ge=1, le=10_000, description="number of members, M")


class TrainingSection(Section):
    """How the members are trained; the loss, the optimizer and the schedule are tables of their own."""

    epochs: int = Field(10, ge=1, description="passes over the training data")
    batch_size: int = Field(128, ge=1, description="samples in one step, B")
    clip_norm: float | None = Field(None, gt=0, description="largest norm of a member's gradient")
    evaluate_every: int = Field(1, ge=1, description="epochs between two evaluations; the last epoch always has one")
    patience: int | None = Field(
        None, ge=1, description="stop after that many evaluations without a lower loss on the validation data"
    )
    keep: Literal["last", "best"] = Field(
        "last", description="the weights of the last epoch, or those with the lowest loss on the validation data"
    )


class EngineSection(Section):
    """How and where the computation runs; no result depends on it beyond rounding."""

    name: Literal["auto", "sequential", "threaded", "stacked"] = Field(
        "auto", description="how members are computed; auto measures and picks the fastest"
    )
    device: str = Field("auto", description="auto takes cuda, then mps, then cpu; cuda:1 is the second of several")
    precision: Literal["float32", "bf16"] = Field("float32", description="what networks compute in; bf16 by autocast")
    compile: bool = Field(False, description="compile the networks first: slow to start, then faster on a GPU")
    recompute: bool = Field(
        False, description="compute outputs twice instead of keeping what all members need for the gradient"
    )

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
            raise ValueError("must be auto, cpu, mps, cuda or cuda:N")
        return device


MAX_SEED = 2**63 - 1
DEFAULT_LOSS = "cross_entropy"
DEFAULT_OPTIMIZER = "adabelief"
DEFAULT_SCHEDULE = "constant"


@dataclass(frozen=True)
class Group:
    """Some members that share a model of their own."""

    members: int
    model: Model


@dataclass(frozen=True)
class Spec:
    """A validated spec: every plugin it names is an instance, every default is filled in."""

    seed: int
    data: Dataset
    model: Model
    ensemble: EnsembleSection
    groups: tuple[Group, ...]
    """`ensemble.groups`: who has which model; empty if all members have `model`."""
    methods: tuple[Method, ...]
    training: TrainingSection
    loss: Loss
    optimizer: Optimizer
    schedule: Schedule
    engine: EngineSection
    extensions: tuple[Extension, ...] = ()

    @property
    def member_models(self) -> tuple[Model, ...]:
        """The model of each member."""
        if not self.groups:
            return (self.model,) * self.ensemble.members
        return tuple(group.model for group in self.groups for _ in range(group.members))

    def to_dict(self) -> dict[str, Any]:
        """The spec as plain tables, with all defaults; `load_spec` reads it back to an equal spec."""
        tables = [method.to_table() for method in self.methods]
        groups = [{"members": group.members, "model": group.model.to_table()} for group in self.groups]
        loss = self.loss.to_table()
        return {
            "seed": self.seed,
            "data": self.data.to_table(),
            "model": self.model.to_table(),
            "ensemble": {**self.ensemble.to_table(), **({"groups": groups} if groups else {})},
            "method": tables[0] if len(tables) == 1 else tables,
            "training": {
                **self.training.to_table(),
                "loss": loss["name"] if len(loss) == 1 else loss,
                "optimizer": self.optimizer.to_table(),
                "schedule": self.schedule.to_table(),
            },
            "engine": self.engine.to_table(),
            **({"extensions": [extension.to_table() for extension in self.extensions]} if self.extensions else {}),
        }

    def to_toml(self) -> str:
        """The spec as a TOML file."""
        return tomli_w.dumps(self.to_dict())
