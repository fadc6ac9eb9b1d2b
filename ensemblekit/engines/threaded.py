"""Members spread over the cores: one thread for each core, one core for each operation.

Small operations gain little from several threads, and those threads wait for each other after each one; members never
wait for each other within a pass. Images are kept in channels_last, which convolutions on CPUs are faster with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ensemblekit.data import Batch
from ensemblekit.engines.base import Settings, Slot
from ensemblekit.engines.sequential import MemberRunner, SequentialEngine
from ensemblekit.objectives import Objective


def _use_one_core() -> None:
    # A thread that has never asked takes its number from whoever set one last, when it first needs it: so it asks now.
    torch.get_num_threads()
    torch.set_num_threads(1)


class ThreadedEngine(SequentialEngine):
    """Members are computed at the same time, each by one thread; a lone member uses all of them."""

    name = "threaded"

    def __init__(self, slots: Sequence[Slot], objective: Objective, settings: Settings) -> None:
        self.channels_last = all("channels_last" not in slot.model.unsupported() for slot in slots)
        if self.channels_last:
            for slot in slots:
                slot.network.to(memory_format=torch.channels_last)
        super().__init__(slots, objective, settings)
        self.pool = ThreadPoolExecutor(os.cpu_count(), initializer=_use_one_core)

    def each(self, work: Callable[[MemberRunner, int], Any], slots: Sequence[Slot]) -> list[Any]:
        if len(slots) == 1:
            return super().each(work, slots)
        runners = [self.runners[id(slot)] for slot in slots]
        return list(self.pool.map(work, runners, range(len(slots))))

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        return super().forward(self._arranged(inputs), step)

    def predict(self, inputs: Tensor) -> Tensor:
        return super().predict(self._arranged(inputs))

    def train_step(
        self, batch: Batch, weights: Tensor | None, learning_rate: float, step: int
    ) -> tuple[Tensor, Tensor]:
        arranged = Batch(self._arranged(batch.inputs), batch.targets, batch.index)
        return super().train_step(arranged, weights, learning_rate, step)

    def _arranged(self, inputs: Tensor) -> Tensor:
        images = inputs.ndim == 4 and self.channels_last
        return inputs.contiguous(memory_format=torch.channels_last) if images else inputs

    def close(self) -> None:
        self.pool.shutdown()
