"""The same training three ways: by an engine, by a hand-written loop, by torchensemble.

Each fit starts from new members, which are built before the clock starts (`prepare`); it reads its data itself, and
neither evaluates nor saves during training.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ensemblekit as ek
from ensemblekit.bench.contestants import contest_of, naive_loop
from ensemblekit.bench.subprocesses import SubprocessContestant
from ensemblekit.bench.timing import Timing
from ensemblekit.bench.workloads import SEED, Workload
from ensemblekit.engines.base import Engine
from ensemblekit.engines.selection import engine_class
from ensemblekit.members.growing import GrowingMembers

CPU = torch.device("cpu")
NOISE_IN_POINTS = 3.0
"""How much two accuracies may differ, in percentage points."""


def chosen_engine(workload: Workload) -> str:
    """The engine that `auto` chooses for this workload."""
    return contest_of(workload, CPU).choose_engine().engine


def tensors(split: ek.Split) -> tuple[Tensor, Tensor]:
    """All inputs as the networks see them, float32 (N, …), and the classes (N,)."""
    scaled = split.inputs.float() / 255 if split.inputs.dtype == torch.uint8 else split.inputs
    return scaled, split.targets


def accuracy(outputs: Tensor, split: ek.Split) -> float:
    """Accuracy of combined outputs (N, C), in percent."""
    return 100 * float((outputs.argmax(dim=-1) == split.targets).float().mean())


class OurFit:
    """An engine, fed by `Split.training_batches`, with all life-cycle hooks of the method."""

    def __init__(
        self, workload: Workload, data: ek.Data, epochs: int, engine_name: str, average_probabilities: bool = False
    ) -> None:
        self.workload, self.data, self.epochs, self.engine_name = workload, data, epochs, engine_name
        self.average_probabilities = average_probabilities
        self.engine: Engine | None = None

    def prepare(self) -> None:
        spec = self.workload.run_spec
        self.objective = self.workload.objective()
        self.members = GrowingMembers(spec, self.data.info, CPU)
        at_start = self.objective.hooks.call.members_at_start(num_members=spec.ensemble.members)
        self.members.start(at_start)
        self._new_engine(self.members)

    def __call__(self) -> None:
        spec, hooks, members = self.workload.run_spec, self.objective.hooks.call, self.members
        num_members = spec.ensemble.members
        weights = self.objective.hooks.sample_weights(
            len(self.data.train), num_members, spec.seed, self.data.train.targets
        )
        step = 0
        for epoch in range(1, self.epochs + 1):
            if epoch > 1:
                self.engine.store_optimizer_state()
            lengths = self.data.train.training_batch_lengths(self.workload.batch_size)
            hooks.epoch_started(
                ensemble=members,
                epoch=epoch,
                num_epochs=self.epochs,
                num_members=num_members,
                num_steps=len(lengths),
            )
            if members.changed:
                self._new_engine(members)
            columns = [state.seed_index for state in self.engine.active_members]
            batches = self.data.train.training_batches(self.workload.batch_size, SEED, epoch)
            for index, batch in enumerate(batches):
                rate = hooks.learning_rate(
                    base=self.workload.learning_rate, epoch=epoch - 1 + index / len(lengths), num_epochs=self.epochs
                )
                batch_weights = None if weights is None else weights[batch.index][:, columns]
                learning_rate = self.workload.learning_rate if rate is None else rate
                self.engine.train_step(batch, batch_weights, learning_rate, step)
                step += 1

    def _new_engine(self, members: GrowingMembers) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = engine_class(self.engine_name)(members.states, self.objective, self.workload.settings(CPU))
        members.changed = False

    def accuracy(self) -> float:
        inputs, _ = tensors(self.data.test)
        outputs = self.engine.predict(inputs)
        combined = (
            outputs.softmax(dim=-1).mean(dim=0) if self.average_probabilities else self.objective.combine(outputs)
        )
        return accuracy(combined, self.data.test)


class NaiveFit:
    """The hand-written loop over a DataLoader."""

    def __init__(self, workload: Workload, data: ek.Data, epochs: int) -> None:
        self.workload, self.data, self.epochs = workload, data, epochs

    def prepare(self) -> None:
        self.loop = naive_loop(self.workload, self.workload.members(CPU))

    def __call__(self) -> None:
        loader = DataLoader(TensorDataset(*tensors(self.data.train)), self.workload.batch_size, shuffle=True)
        for _ in range(self.epochs):
            for inputs, targets in loader:
                self.loop.step(inputs, targets)

    def accuracy(self) -> float:
        inputs, _ = tensors(self.data.test)
        with torch.no_grad():
            outputs = torch.stack([network.eval()(inputs) for network in self.loop.networks])
        return accuracy(outputs.mean(dim=0), self.data.test)


class Member(nn.Module):
    """One randomly initialised network of a workload: an estimator for torchensemble."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.network = workload.run_spec.model.build(workload.input_shape, workload.num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)


class PeerFit:
    """A classifier of torchensemble, with its own `fit` over a DataLoader and its default of one job."""

    def __init__(self, classifier: str, workload: Workload, data: ek.Data, epochs: int, **options: Any) -> None:
        self.classifier, self.workload, self.data, self.epochs = classifier, workload, data, epochs
        self.options = options

    def prepare(self) -> None:
        import torchensemble

        torch.manual_seed(SEED)  # it initialises members and shuffles with the global generator
        spec = self.workload.run_spec
        self.ensemble = getattr(torchensemble, self.classifier)(
            estimator=Member,
            estimator_args={"workload": self.workload},
            n_estimators=spec.ensemble.members,
            cuda=False,
            **self.options,
        )
        self.ensemble.set_optimizer("Adam", lr=self.workload.learning_rate)

    def __call__(self) -> None:
        samples = TensorDataset(*tensors(self.data.train))
        samples.classes = range(self.data.info.num_outputs)  # so that it need not count the classes
        loader = DataLoader(samples, self.workload.batch_size, shuffle=True)
        # it prints its progress
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            self.ensemble.fit(loader, epochs=self.epochs, save_model=False)

    def accuracy(self) -> float:
        inputs, _ = tensors(self.data.test)
        self.ensemble.eval()
        with torch.no_grad():
            return accuracy(self.ensemble(inputs), self.data.test)


Fit = OurFit | NaiveFit | PeerFit


def fitted_in_turn(
    fits: Mapping[str, Fit], rounds: int, must_hold: bool, ours_may_be_better: bool = False
) -> tuple[dict[str, Timing], str]:
    """Timings of whole fits, each in a process of its own, and their accuracies in words.

    Preparing is not timed. Exits if `must_hold` and the accuracies differ, since then the times do not compare.
    """
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(SubprocessContestant(partial(_identity, fit))) for name, fit in fits.items()
        }
        timings = timed_in_turn(processes, rounds, prepare=lambda name: processes[name].call("prepare"))
        accuracies = {name: fit.call("accuracy") for name, fit in processes.items()}
    words = "test accuracy: " + ", ".join(f"{name} {value:.1f} %" for name, value in accuracies.items())
    theirs, ours = accuracies.values()
    difference = max(theirs - ours, 0) if ours_may_be_better else abs(theirs - ours)
    if must_hold and difference > NOISE_IN_POINTS:
        sys.exit(f"error: accuracies differ by more than {NOISE_IN_POINTS} points; {words}")
    return timings, words


def _identity(fit: Fit) -> Fit:
    return fit


def timed_in_turn(
    contestants: Mapping[str, Callable[[], object]], rounds: int, prepare: Callable[[str], object] | None = None
) -> dict[str, Timing]:
    """Time long work in turn, A B A B …, without a warm-up; `prepare` is called with a name before each turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, work in contestants.items():
            if prepare is not None:
                prepare(name)
            start = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def with_adam(workload: Workload) -> Workload:
    """The workload with Adam, since torchensemble has no AdaBelief."""
    return workload.changed(training={"optimizer": {"name": "adam", "lr": 1e-3}})


def digits(num_train: int | None) -> ek.Data:
    """The digits of scikit-learn without a validation split; `num_train` None means all training samples."""
    return ek.load_data(ek.datasets()["digits"].load()(validation_fraction=0, limit_train=num_train), SEED)


def clothing(num_train: int, num_test: int) -> tuple[ek.Data, str]:
    """Fashion-MNIST without augmentation if it is present, else random images of its shape; and which of the two."""
    options = {"augment": (), "validation_fraction": 0.0, "limit_train": num_train, "limit_test": num_test}
    dataset = ek.datasets()["fashion_mnist"].load()(**options)
    if dataset.found_at() is not None:
        return ek.load_data(dataset, SEED), "Fashion-MNIST"
    source = ek.generator(SEED, "benchmark")

    def part(size: int) -> tuple[Tensor, Tensor]:
        images = torch.randint(256, (size, 1, 28, 28), dtype=torch.uint8, generator=source)
        return images, torch.arange(size) % 10

    return ek.data_from_datasets(part(num_train), part(num_test), SEED, validation_fraction=0), "random images"
