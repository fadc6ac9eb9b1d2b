"""Picks an engine by trying each that can run, on real batches and copies of the members.

It starts with a few members and samples and goes on to larger parts of the step with the engines that can still win,
as long as there is time: so the choice costs little for large networks and is exact for small ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy

import torch
from torch import Tensor

from ensemblekit.core.faults import is_out_of_memory
from ensemblekit.core.objective import Objective
from ensemblekit.core.threads import num_cores
from ensemblekit.data.loading import Batch
from ensemblekit.engines import ENGINES, Engine, Settings, Slot, unsupported

ORDER = ("threaded", "stacked", "sequential")
SECONDS = 2.4
"""What trying may take, as far as one can tell before it; with what a last step adds, it stays below three."""
HOPELESS = 2.5
"""An engine that takes so many times as long as the best is not tried any further …"""
ARITHMETIC_RULES = 0.05
"""… if the best takes so many seconds: in less, the overhead of operations decides, and larger parts differ."""
SAMPLES = (8, 32)
"""How many samples are tried before whole batches are."""
ROUNDS = 3


def measure_engines(
    slots: Sequence[Slot],
    objective: Objective,
    settings: Settings,
    optimizer: str,
    batch: Batch,
    weights: Tensor | None,
) -> dict[str, float]:
    """Seconds per step of the engines that were tried to the end; empty if there is nothing to choose.

    Left out are those that fell far behind and those that ran out of memory.
    """
    deadline = time.perf_counter() + SECONDS
    names = [name for name in ORDER if unsupported(name, slots, settings, optimizer) is None]
    seconds: dict[str, float] = {}
    if len(names) == 1:
        return seconds
    for num_members, num_samples in _parts(slots, len(batch.index)):
        size = num_members * num_samples / (len(slots) * len(batch.index))
        expected = size * sum(seconds.get(name, 0.0) for name in names)
        # twice: the first step of a size pays for what is set up once
        if seconds and time.perf_counter() + 2 * expected > deadline:
            break
        places = [place * len(slots) // num_members for place in range(num_members)]
        part = Batch(batch.inputs[:num_samples], batch.targets[:num_samples], batch.index[:num_samples])
        part_weights = None if weights is None else weights[:num_samples][:, places]
        part_slots = [slots[place] for place in places]
        found = _measured(names, part_slots, objective, settings, part, part_weights, deadline)
        seconds = {name: value / size for name, value in found.items()}
        if found and min(found.values()) >= ARITHMETIC_RULES:
            names = _hopeful(found)
    return seconds


def _parts(slots: Sequence[Slot], num_samples: int) -> Iterator[tuple[int, int]]:
    """Larger and larger parts of a step: (members, samples), up to all of them."""
    # members that are frozen differ from the others, so that no few of them stand for all
    few_members = len(slots) if any(slot.frozen for slot in slots) else min(len(slots), 2 * num_cores())
    for few_samples in SAMPLES:
        if few_samples < num_samples:
            yield few_members, few_samples
    yield len(slots), num_samples


def _hopeful(seconds: Mapping[str, float]) -> list[str]:
    return [name for name, value in seconds.items() if value <= HOPELESS * min(seconds.values())]


def _measured(
    names: Sequence[str],
    slots: Sequence[Slot],
    objective: Objective,
    settings: Settings,
    batch: Batch,
    weights: Tensor | None,
    deadline: float,
) -> dict[str, float]:
    """The shortest step of each engine, taken in turns; one round if there is no time for more."""
    found: dict[str, float] = {}
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name in names:
            try:
                engine = stack.enter_context(_engine(name, slots, objective, settings))
                # the first step pays for what is set up once, but where that is little it counts like any other
                found[name] = _seconds(engine, batch, weights)
                engines[name] = engine
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
        for done in range(ROUNDS):
            if done and time.perf_counter() + sum(found.values()) > deadline:
                break
            for name in _hopeful(found) if done else engines:
                found[name] = min(_seconds(engines[name], batch, weights), found[name])
    return found


@contextmanager
def _engine(name: str, slots: Sequence[Slot], objective: Objective, settings: Settings) -> Iterator[Engine]:
    engine = ENGINES[name](deepcopy(list(slots)), objective, settings)
    try:
        yield engine
    finally:
        engine.close()


def _seconds(engine: Engine, batch: Batch, weights: Tensor | None) -> float:
    start = time.perf_counter()
    engine.train_step(batch, weights, 0.0, 0)
    if engine.settings.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start
