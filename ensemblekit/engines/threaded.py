"""Members spread over the cores, each computed by one of them; images in channels_last, which suits convolutions there.

A member's backward pass and its optimizer's step are one piece of work: cores wait for each other only where the
objective needs all outputs, between the forward passes and the backward ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.objective import Objective
from ensemblekit.core.threads import Cores, one_thread
from ensemblekit.data.loading import Batch
from ensemblekit.engines.base import Settings, Slot, at_least_float32
from ensemblekit.engines.sequential import MemberRunner, SequentialEngine
from ensemblekit.members.folding import ReadyMember


class ThreadedEngine(SequentialEngine):
    """Members are computed at the same time, each by one thread; a lone member uses all of them."""

    name = "threaded"

    def __init__(self, slots: Sequence[Slot], objective: Objective, settings: Settings) -> None:
        self.channels_last = all("channels_last" not in slot.model.unsupported() for slot in slots)
        self.cores = Cores()
        super().__init__(slots, objective, settings)

    def make_runner(self, slot: Slot) -> MemberRunner:
        if self.channels_last:
            slot.network.to(memory_format=torch.channels_last)
        return FoldingRunner(slot, self, self.channels_last)

    def each(self, work: Callable[[MemberRunner, int], Any], slots: Sequence[Slot]) -> list[Any]:
        runners = [self.runners[id(slot)] for slot in slots]
        return self.cores.map(lambda pair: work(*pair), list(zip(runners, range(len(slots)), strict=True)))

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        return super().forward(self._arranged(inputs), step)

    def predict(self, inputs: Tensor) -> Tensor:
        return super().predict(self._arranged(inputs))

    def train_step(
        self, batch: Batch, weights: Tensor | None, learning_rate: float, step: int
    ) -> tuple[Tensor, Tensor]:
        if self.objective.separable:
            arranged = Batch(self._arranged(batch.inputs), batch.targets, batch.index)
            return super().train_step(arranged, weights, learning_rate, step)
        if self.has_second_pass:
            return super().train_step(batch, weights, learning_rate, step)
        leaf = self.forward(batch.inputs, step).requires_grad_()
        with one_thread():
            value = self.objective(leaf, batch.targets, weights)
            (gradient,) = torch.autograd.grad(value, leaf)

        def work(place: int) -> None:
            runner = self.runners[id(self.running[place])]
            runner.backward(gradient[place])
            runner.update(learning_rate)

        # the member that came last is the first to go back: what it needs may still be in the cache
        self.cores.map(work, range(len(self.running) - 1, -1, -1))
        return value.detach(), leaf.detach()

    def _arranged(self, inputs: Tensor) -> Tensor:
        images = inputs.ndim == 4 and self.channels_last
        return inputs.contiguous(memory_format=torch.channels_last) if images else inputs

    def close(self) -> None:
        self.cores.close()


class FoldingRunner(MemberRunner):
    """A member that predicts with a copy made for it, until it learns again."""

    def __init__(self, slot: Slot, engine: ThreadedEngine, channels_last: bool) -> None:
        super().__init__(slot, engine)
        self.channels_last = channels_last
        self.ready: ReadyMember | None = None

    def forward(self, inputs: Tensor, step: int, second_pass: bool = False) -> Tensor:
        if not self.slot.frozen:
            self.ready = None
        return super().forward(inputs, step, second_pass)

    def predict(self, inputs: Tensor, passes: int | None = None) -> Tensor:
        if self.engine.settings.compile:
            return super().predict(inputs, passes)
        if self.ready is None:
            self.ready = ReadyMember(self.network, self.channels_last)
        with self.engine.autocast():
            return at_least_float32(self.ready(inputs, passes))
