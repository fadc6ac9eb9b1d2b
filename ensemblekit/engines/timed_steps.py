"""Timed training steps of several engines on copies of the members, from which the time of whole steps is estimated.

Engines take turns, so that whatever slows the machine down slows all of them down.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ensemblekit.core.errors import is_out_of_memory
from ensemblekit.core.objective import Objective
from ensemblekit.data.loading import Batch
from ensemblekit.engines.base import Engine
from ensemblekit.engines.settings import EngineSettings
from ensemblekit.members.state import MemberState

FEW_ROUNDS = 2
"""Up to so many rounds, the shortest step of an engine counts, since one may be disturbed; then the median."""
DISTURBED_SHARE = 0.1
"""Steps with fewer samples that take longer by more than this share were disturbed."""


@dataclass(frozen=True)
class Size:
    """The size of a step."""

    members: int
    samples: int


@dataclass(frozen=True)
class Work:
    """One training step to time."""

    members: Sequence[MemberState]
    objective: Objective
    settings: EngineSettings
    batch: Batch
    weights: Tensor | None
    num_steps: int | None = None
    """The steps of the run: trials may take a share of their time only. None: not known."""

    @property
    def size(self) -> Size:
        """The size of the whole step."""
        return Size(len(self.members), len(self.batch.index))

    def part(self, size: Size) -> Work:
        """Return a step of some members, spread evenly over all, on the first samples."""
        indices = [number * len(self.members) // size.members for number in range(size.members)]
        parts = (self.batch.inputs, self.batch.targets, self.batch.index)  # it is not measured how samples are mixed
        batch = Batch(*(part[: size.samples] for part in parts))
        weights = None if self.weights is None else self.weights[: size.samples]
        if weights is not None and size.members < len(self.members):
            weights = weights[:, indices]
        return replace(self, members=[self.members[index] for index in indices], batch=batch, weights=weights)


class EnginesOnTrial:
    """Engines that train copies of the members of a step.

    Args:
        classes: the engines by name.
    """

    def __init__(self, classes: Mapping[str, type[Engine]]) -> None:
        self.classes = classes
        self.engines: dict[str, Engine] = {}
        self.num_members = 0

    def prepare(self, work: Work) -> None:
        """Get ready for steps of that many members: engines of another number are released."""
        if self.num_members != len(work.members):
            self.close()
            self.num_members = len(work.members)

    def step(self, name: str, work: Work) -> float | None:
        """Train one step with an engine; returns its seconds, or None if there is not enough memory."""
        try:
            if name not in self.engines:
                self.engines[name] = self.classes[name](deepcopy(list(work.members)), work.objective, work.settings)
            engine = self.engines[name]
            start = time.perf_counter()
            engine.train_step(work.batch, work.weights, 0.0, 0)
            if work.settings.device.type != "cpu":
                torch.accelerator.synchronize()
            return time.perf_counter() - start
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the engines."""
        for engine in self.engines.values():
            engine.close()
        self.engines.clear()


class Stage:
    """Timed steps of one size.

    Args:
        engines: the engines.
        work: the step of this size.
        before: the stage before, with fewer samples and perhaps fewer members.
    """

    def __init__(self, engines: EnginesOnTrial, work: Work, before: Stage | None = None) -> None:
        self.engines, self.work, self.size, self.before = engines, work, work.size, before
        self.first: dict[str, float] = {}
        """The first step of each engine, which pays for the set-up."""
        self.rounds: list[dict[str, float]] = []
        """The steps after that, in which engines take turns."""
        engines.prepare(work)

    def begin(self, names: Iterable[str], deadline: float) -> None:
        """Train the first step with each engine, as long as there is time; one without enough memory is left out."""
        for name in names:
            if self.first and time.perf_counter() > deadline:
                return
            seconds = self.engines.step(name, self.work)
            if seconds is not None:
                self.first[name] = seconds

    def add_round(self, names: Sequence[str]) -> None:
        """Train one step with each engine."""
        steps = {name: self.engines.step(name, self.work) for name in names}
        self.rounds.append({name: seconds for name, seconds in steps.items() if seconds is not None})

    def num_rounds(self, name: str) -> int:
        """Return the number of rounds with an engine."""
        return sum(name in steps for steps in self.rounds)

    def seconds(self, name: str) -> float:
        """Return the seconds of a step of this size, as far as they are known."""
        steps = [steps[name] for steps in self.rounds if name in steps]
        return min([self.first[name], *steps]) if len(steps) <= FEW_ROUNDS else statistics.median(steps)

    def noise(self, name: str, size: Size) -> float:
        """Return the ratio of the median to the lower quartile, a rather undisturbed step, for a larger step."""
        steps = sorted(steps[name] for steps in self.rounds if name in steps)
        undisturbed = steps[(len(steps) - 1) // 4]
        return self.estimate(name, size) / max(self.estimate(name, size, undisturbed), 1e-9)

    def estimate(self, name: str, size: Size, seconds: float | None = None) -> float:
        """Estimate the seconds of a larger step.

        From two numbers of samples it is extrapolated linearly: a step has costs for each sample and fixed ones, which
        differ much between engines. From one number, or if steps with fewer samples were disturbed, it is taken to be
        proportional.

        Args:
            name: of the engine.
            size: of the larger step.
            seconds: of a step of this size; by default what `seconds` returns.
        """
        seconds = self.seconds(name) if seconds is None else seconds
        samples = self.size.samples
        for_each_sample = seconds / samples
        before = self.before
        if before is not None and before.size.members == self.size.members:
            growth = seconds - before.seconds(name)
            if growth >= -DISTURBED_SHARE * seconds:
                for_each_sample = max(growth, 0.0) / (samples - before.size.samples)
        return (seconds + for_each_sample * (size.samples - samples)) * size.members / self.size.members

    def ratios(self, name: str, other: str, size: Size) -> list[float]:
        """Return how many times as long an engine takes as another for a larger step, round by round."""
        return [
            self.estimate(name, size, steps[name]) / max(self.estimate(other, size, steps[other]), 1e-9)
            for steps in self.rounds
            if name in steps and other in steps
        ]
