"""Chooses an engine: measures each that supports the members, on real batches and copies of the members.

Measuring starts with a few members and samples and continues with larger parts of a step for the engines that can
still win, as long as there is time: so the choice costs little for large networks and is exact for small ones.
"""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ensemblekit.core.errors import UsageError, is_out_of_memory
from ensemblekit.core.objective import Objective
from ensemblekit.core.threads import num_cores
from ensemblekit.data.loading import Batch
from ensemblekit.engines.base import Engine
from ensemblekit.engines.settings import EngineSettings
from ensemblekit.members.state import MemberState
from ensemblekit.ranks.group import Pretended
from ensemblekit.spec.sections import ENGINES

TIME_LIMIT_SECONDS = 2.4
"""Time for all measurements, as far as it can be predicted; with the last step it stays below three seconds."""
HOPELESS_RATIO = 2.5
"""An engine that takes so many times as long as the best one is measured no further."""
COMPUTE_BOUND_SECONDS = 0.05
"""Engines are given up only for steps that take at least so long: in shorter ones the overhead of operations dominates,
and larger parts may turn out differently."""
SAMPLES = (8, 32)
"""Numbers of samples that are measured before whole batches."""
ROUNDS = 3


def engine_class(name: str) -> type[Engine]:
    """Import the engine of a name."""
    engine: type[Engine] = pkgutil.resolve_name(ENGINES[name])
    return engine


@dataclass(frozen=True)
class Work:
    """One training step to measure."""

    members: Sequence[MemberState]
    objective: Objective
    settings: EngineSettings
    batch: Batch
    weights: Tensor | None

    def part(self, num_members: int, num_samples: int) -> Work:
        """Return a step of some members, spread evenly over all, on the first samples."""
        indices = [number * len(self.members) // num_members for number in range(num_members)]
        parts = (self.batch.inputs, self.batch.targets, self.batch.index)  # it is not measured how samples are mixed
        batch = Batch(*(part[:num_samples] for part in parts))
        weights = None if self.weights is None else self.weights[:num_samples]
        if weights is not None and num_members < len(self.members):
            weights = weights[:, indices]
        return Work([self.members[index] for index in indices], self.objective, self.settings, batch, weights)


def check_engine(name: str, members: Sequence[MemberState], settings: EngineSettings) -> None:
    """Raise a `UsageError` if the engine of that name does not support these members."""
    if reason := engine_class(name).unsupported(members, settings):
        raise UsageError(f'engine "{name}" does not support this run: {reason}', "engine.name", 'set it to "auto"')


def fastest(seconds_per_step: Mapping[str, float]) -> str:
    """Return the engine with the shortest step; the sequential one if none was measured."""
    return min(seconds_per_step, key=seconds_per_step.__getitem__, default="sequential")


def measure_engines(work: Work) -> dict[str, float]:
    """Measure the seconds per step of each supported engine; empty if there is only one.

    Engines that fall far behind or run out of memory are left out. Several processes measure at once, each its own
    members, and the slowest counts.
    """
    group = work.settings.group
    alone = replace(work, settings=replace(work.settings, group=Pretended(group))) if not group.is_alone else work
    rows = group.gather_json(_measure_here(alone))
    common = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: max(row[name] for row in rows) for name in common}


def _measure_here(work: Work) -> dict[str, float]:
    """Measure the engines with the members of this process."""
    deadline = time.perf_counter() + TIME_LIMIT_SECONDS
    names = [name for name in ENGINES if engine_class(name).unsupported(work.members, work.settings) is None]
    seconds: dict[str, float] = {}
    if len(names) == 1:
        return seconds
    total = len(work.members) * len(work.batch.index)
    for num_members, num_samples in _part_sizes(work):
        share = num_members * num_samples / total
        expected = share * sum(seconds.get(name, 0.0) for name in names)
        # twice: the first step of a size pays for the set-up
        if seconds and time.perf_counter() + 2 * expected > deadline:
            break
        measured = _measure(names, work.part(num_members, num_samples), deadline)
        seconds = {name: value / share for name, value in measured.items()}
        if measured and min(measured.values()) >= COMPUTE_BOUND_SECONDS:
            names = _contenders(measured)
    return seconds


def _part_sizes(work: Work) -> Iterator[tuple[int, int]]:
    """Yield larger and larger parts of a step, (members, samples), up to the whole."""
    num_members, num_samples = len(work.members), len(work.batch.index)
    # A method may have a parameter for each member, and frozen members differ from the others: only members that are
    # trained one by one anyway can represent all of them.
    alike = work.objective.separable and not any(member.frozen or member.size > 1 for member in work.members)
    few_members = min(num_members, 2 * num_cores()) if alike else num_members
    for few_samples in SAMPLES:
        if few_samples < num_samples:
            yield few_members, few_samples
    yield num_members, num_samples


def _contenders(seconds: Mapping[str, float]) -> list[str]:
    return [name for name, value in seconds.items() if value <= HOPELESS_RATIO * min(seconds.values())]


def _measure(names: Sequence[str], work: Work, deadline: float) -> dict[str, float]:
    """Return the shortest step of each engine; engines take turns, one round if there is no time for more."""
    shortest: dict[str, float] = {}
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name in names:
            try:
                engine = stack.enter_context(_engine(name, work))
                # the first step pays for the set-up, but where that is little it counts like any other
                shortest[name] = _step_seconds(engine, work)
                engines[name] = engine
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
        for completed in range(ROUNDS):
            if completed and time.perf_counter() + sum(shortest.values()) > deadline:
                break
            for name in _contenders(shortest) if completed else engines:
                shortest[name] = min(_step_seconds(engines[name], work), shortest[name])
    return shortest


@contextmanager
def _engine(name: str, work: Work) -> Iterator[Engine]:
    engine = engine_class(name)(deepcopy(list(work.members)), work.objective, work.settings)
    try:
        yield engine
    finally:
        engine.close()


def _step_seconds(engine: Engine, work: Work) -> float:
    start = time.perf_counter()
    engine.train_step(work.batch, work.weights, 0.0, 0)
    if engine.settings.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start
