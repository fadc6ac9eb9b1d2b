"""Several runs as one stack: their steps are computed at once, each with the objective of its own run.

The runs must have networks of one architecture and the same settings, and be at the same step. A run announces its step
by `prepare_step`; the first one that then asks for its result has the steps of all runs computed that have announced
one. As always, the states of the members hold everything that training changes: when a run leaves, the others get a new
stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ensemblekit.core.objective import START, Moment, Objective
from ensemblekit.data.loading import Batch
from ensemblekit.engines.part import Samples
from ensemblekit.engines.settings import EngineSettings
from ensemblekit.engines.stacked import Stack, StackedEngine
from ensemblekit.members.state import MemberState


@dataclass(frozen=True)
class AnnouncedStep:
    """A step that a run waits for; see `Engine.train_step`."""

    batch: Batch
    weights: Tensor | None
    learning_rate: float
    step: int
    moment: Moment


class SharedStack:
    """The networks of several runs in one stack. Runs join by making a `TogetherEngine` with it."""

    def __init__(self) -> None:
        self.runs: list[TogetherEngine] = []
        """The runs whose networks are in the stack, in this order."""
        self.stack: Stack | None = None
        self.announced: dict[TogetherEngine, AnnouncedStep] = {}
        self.results: dict[TogetherEngine, tuple[Tensor, Tensor] | Exception] = {}
        """The objective and the outputs of the last step of each run, or why there are none, until the run asks."""
        self.predictions: dict[str, Tensor] = {}
        """The outputs (K, S, N, W) of the networks of all runs for a split, until they learn."""

    def result(self, run: TogetherEngine) -> tuple[Tensor, Tensor]:
        """Return the objective and the outputs (M, B, C) of the step that a run has announced."""
        if run not in self.results:
            self._train(self.announced[run].step)
        result = self.results.pop(run)
        if isinstance(result, Exception):
            raise result
        return result

    def _train(self, number: int) -> None:
        """Train the step with this number of all runs that have announced it; others may be further."""
        runs = [run for run, announced in self.announced.items() if announced.step == number]
        steps = [self.announced.pop(run) for run in runs]
        stack = self._stack_of(runs)
        self.predictions.clear()
        first = steps[0]
        inputs = self._inputs(stack, [step.batch.inputs for step in steps])
        outputs = stack.forward(replace(first.batch, inputs=inputs), first.step)
        gradients = [self._differentiate(*each) for each in zip(runs, steps, outputs.chunk(len(runs)), strict=True)]
        stack.backward_and_update(torch.cat(gradients), first.learning_rate, first.moment)

    def _differentiate(self, run: TogetherEngine, step: AnnouncedStep, outputs: Tensor) -> Tensor:
        """Return d objective / d outputs of one run; 0 if its objective fails, of which the run is told later."""
        batch = step.batch
        try:
            value, gradient = run.objective.value_and_gradient(
                outputs, batch.targets, step.weights, None, run.indices, step.moment, batch.mix, batch.importance
            )
        except Exception as error:  # a hook may raise anything, and the other runs go on
            self.results[run] = error
            return torch.zeros_like(outputs)
        self.results[run] = value, outputs
        return gradient

    def _inputs(self, stack: Stack, inputs: Sequence[Tensor]) -> Tensor:
        """Return inputs (B, …) for all networks, if all runs have the same, else (K, B, …)."""
        # runs with the same seed and the same data have the same batches, computed by each
        stack.shared = len({run.settings.seed for run in self.runs}) == 1
        return inputs[0] if stack.shared else torch.stack(list(inputs)).repeat_interleave(self._rows_per_run, dim=0)

    @property
    def _rows_per_run(self) -> int:
        return len(self.runs[0].members)

    def predict(self, run: TogetherEngine, inputs: Tensor) -> Tensor:
        """Compute the outputs (M, S, B, W) of one run in evaluation mode."""
        return self._rows_of(run, self._predict(run, inputs))

    def predict_split(
        self, run: TogetherEngine, split: str, batches: Iterable[Batch], before_batch: Callable[[], None]
    ) -> Tensor:
        """Compute the outputs (M, S, N, W) of one run for a split; those of the others are kept until they ask.

        All runs have the same splits.
        """
        if run not in self.runs or split not in self.predictions:
            parts = []
            for batch in batches:
                before_batch()
                parts.append(self._predict(run, batch.inputs))
            self.predictions[split] = torch.cat(parts, dim=2)
        return self._rows_of(run, self.predictions[split])

    def _predict(self, run: TogetherEngine, inputs: Tensor) -> Tensor:
        """Compute the outputs (K, S, B, W) of all networks in the stack that has those of this run."""
        stack = self._stack_of(self.runs if run in self.runs else [run])
        # in pieces, so that it takes no more memory than the evaluation of one run
        pieces = inputs.split(max(1, len(inputs) // len(self.runs)))
        passes = run.settings.passes
        return torch.cat([stack.predict(piece, passes) for piece in pieces], dim=2).transpose(0, 1)

    def _rows_of(self, run: TogetherEngine, outputs: Tensor) -> Tensor:
        return outputs.chunk(len(self.runs))[self.runs.index(run)]

    def store_optimizer_state(self, run: TogetherEngine) -> None:
        """Bring the optimizer's state of a run's members up to date."""
        if self.stack is not None and run in self.runs:
            self.stack.store_optimizer_state()

    def _stack_of(self, runs: Sequence[TogetherEngine]) -> Stack:
        """Return the stack of exactly these runs; a new one if they have changed."""
        if self.stack is None or self.runs != runs:
            if self.stack is not None:
                self.stack.store_optimizer_state()
            members = [member for run in runs for member in run.members]
            self.stack, self.runs = Stack(members, runs[0].objective, runs[0].settings), list(runs)
            self.predictions.clear()
        return self.stack


class TogetherEngine(StackedEngine):
    """The engine of a run whose networks are part of a stack that it shares with other runs.

    Args:
        members: the networks of the run, all of one architecture.
        objective: what the run minimises.
        settings: those of the other runs, but for the seed.
        shared: the stack.
    """

    def __init__(
        self, members: Sequence[MemberState], objective: Objective, settings: EngineSettings, shared: SharedStack
    ) -> None:
        super().__init__(members, objective, settings)
        self.shared = shared

    def groups(self, members: Sequence[MemberState]) -> list[list[int]]:
        """Return no group: the shared stack computes all members."""
        return []

    def prepare_step(
        self, batch: Batch, weights: Tensor | None, learning_rate: float, step: int, moment: Moment = START
    ) -> None:
        self.shared.announced[self] = AnnouncedStep(batch, weights, learning_rate, step, moment)

    def train_step(
        self, batch: Batch, weights: Tensor | None, learning_rate: float, step: int, moment: Moment = START
    ) -> tuple[Tensor, Tensor]:
        """Return the results of the step that was announced by `prepare_step` with the same arguments."""
        return self.shared.result(self)

    def predict_split(
        self, split: str, batches: Iterable[Batch], before_batch: Callable[[], None] = lambda: None
    ) -> Tensor:
        return self._by_pass(self.shared.predict_split(self, split, batches, before_batch))

    def _predict_here(self, inputs: Tensor, samples: Samples | None) -> Tensor:
        return self.shared.predict(self, inputs)

    def store_optimizer_state(self) -> None:
        self.shared.store_optimizer_state(self)

    def close(self) -> None:
        """Withdraw a step that was announced: the run has ended, and the others go on without it."""
        self.shared.announced.pop(self, None)
