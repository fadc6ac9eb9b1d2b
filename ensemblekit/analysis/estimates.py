"""How long a sweep will take: an estimate from a few real steps of each kind of run, with the members of the start."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from ensemblekit.data.loading import Data
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.spec.sections import Spec
from ensemblekit.training.trainer import Trainer

STEPS = 5
"""Steps that are measured after the first, which pays for the set-up."""
SECONDS = 2.0
"""No further step is measured after this time."""
EVALUATION_BYTES = 2**22
"""Size of the batch of an evaluation that is measured."""


@dataclass(frozen=True)
class Cost:
    """Measured times of one kind of run, in seconds."""

    start: float
    """Building the members and choosing the engine."""
    step: float
    steps: int
    """Steps of an epoch."""
    evaluation: float
    """One evaluation on validation and test data."""

    def of_run(self, spec: Spec) -> float:
        """Return the estimated time of a run."""
        epochs = spec.training.epochs
        evaluations = math.ceil(epochs / spec.training.evaluate_every) + 1
        return self.start + epochs * self.steps * self.step + evaluations * self.evaluation


def kind_of(spec: Spec) -> str:
    """Return a text that is equal for runs whose steps cost the same: values of methods and rates do not count."""
    tables = spec.to_dict()
    training = {key: tables["training"].get(key) for key in ("batch_size", "loss")}
    parts = {key: tables.get(key) for key in ("data", "model", "ensemble", "engine")}
    parts |= {"training": training, "optimizer": spec.optimizer.name, "methods": [m.name for m in spec.methods]}
    return json.dumps(parts, sort_keys=True, default=str)


def estimate(specs: Iterable[Spec], load: Callable[[Spec], Data]) -> tuple[float, int]:
    """Return the seconds that all runs take one after the other, and how many kinds of run were measured."""
    costs: dict[str, Cost] = {}
    total = 0.0
    for spec in specs:
        kind = kind_of(spec)
        if kind not in costs:
            costs[kind] = measure(spec, load(spec))
        total += costs[kind].of_run(spec)
    return total, len(costs)


def measure(spec: Spec, data: Data) -> Cost:
    """Measure some steps and a part of an evaluation of a run; nothing of it is kept."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory, torch.random.fork_rng():
        trainer = Trainer(spec, RunDirectory(Path(directory)), data)
        trainer.engine.choose()
        engine = trainer.engine.current()
        try:
            start = time.perf_counter() - began
            step = _step_seconds(trainer)
            samples = len(trainer.data.test) + (len(trainer.data.validation) if trainer.data.validation else 0)
            return Cost(start, step, len(trainer.batch_lengths), _sample_seconds(trainer) * samples)
        finally:
            engine.close()


def _step_seconds(trainer: Trainer) -> float:
    """Return the mean time of a step, with loading its batch."""
    engine = trainer.engine.current()
    members = [state.seed_index for state in engine.active_members]
    batches = iter(trainer.data.train.training_batches(trainer.spec.training.batch_size, trainer.spec.seed, 1))
    marks = [time.perf_counter()]
    for number, batch in zip(range(STEPS + 1), batches, strict=False):
        weights = None if trainer.weights is None else trainer.weights[batch.index][:, members]
        engine.train_step(batch, weights, 0.0, number)
        _synchronise(trainer)
        marks.append(time.perf_counter())
        if marks[-1] - marks[0] > SECONDS:
            break
    return (marks[-1] - marks[1]) / (len(marks) - 2) if len(marks) > 2 else marks[-1] - marks[0]


def _sample_seconds(trainer: Trainer) -> float:
    """Return the time of a prediction for one sample, from one batch."""
    size = max(1, EVALUATION_BYTES // (4 * math.prod(trainer.data.info.input_shape)))
    batch = next(iter(trainer.data.test.batches(min(size, len(trainer.data.test)))))
    engine = trainer.engine.current()
    start = time.perf_counter()
    engine.predict(batch.inputs)
    _synchronise(trainer)
    return (time.perf_counter() - start) / len(batch.index)


def _synchronise(trainer: Trainer) -> None:
    if trainer.device.type != "cpu":
        torch.accelerator.synchronize()
