"""Members spread over the cores, one thread each; images in channels_last, which convolutions prefer on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.objective import Objective
from ensemblekit.core.plugin import Family
from ensemblekit.core.threads import ThreadPool, num_cores, one_thread
from ensemblekit.data.loading import Batch
from ensemblekit.engines.base import Result
from ensemblekit.engines.part import Part
from ensemblekit.engines.sequential import MemberPart, SequentialEngine
from ensemblekit.engines.settings import EngineSettings
from ensemblekit.members.folding import FoldedMember
from ensemblekit.members.fused_layers import with_fused_layers
from ensemblekit.members.state import MemberState


class ThreadedEngine(SequentialEngine):
    """Computes members at the same time, each in one thread; a single member uses all threads."""

    name = "threaded"

    def __init__(self, members: Sequence[MemberState], objective: Objective, settings: EngineSettings) -> None:
        self.channels_last = all("channels_last" not in member.model.unsupported() for member in members)
        self.pool = ThreadPool()
        super().__init__(members, objective, settings)

    @classmethod
    def unsupported(cls, members: Sequence[MemberState], settings: EngineSettings) -> str | None:
        if settings.device.type != "cpu":
            return f"threads are for the CPU, and the device is {settings.device}"
        if num_cores() < 2 and settings.group.is_alone:
            return "there is only one core"
        for member in members:
            if member.uses_global_rng:
                return f'model "{member.model.name}" uses torch\'s global random generator, which threads share'
        return None

    def make_part(self, members: Sequence[MemberState]) -> Part:
        if self.channels_last:
            members[0].network.to(memory_format=torch.channels_last)
        return FoldingPart(members, self.objective, self.settings, self.channels_last)

    def map(self, work: Callable[[Any], Result], items: Sequence[Any]) -> list[Result]:
        return self.pool.map(work, items)

    def arrange(self, inputs: Tensor) -> Tensor:
        is_images = inputs.ndim == 4 and self.channels_last
        return inputs.contiguous(memory_format=torch.channels_last) if is_images else inputs

    def objective_context(self) -> AbstractContextManager[None]:
        # the objective is small: sharing it out to threads costs more than it saves where a core is busy
        return one_thread()

    def close(self) -> None:
        self.pool.close()


class FoldingPart(MemberPart):
    """A member with fused layers in training, which predicts with a copy that is folded, made anew after each step."""

    def __init__(
        self,
        members: Sequence[MemberState],
        objective: Objective,
        settings: EngineSettings,
        channels_last: bool,
    ) -> None:
        super().__init__(members, objective, settings)
        self.channels_last = channels_last
        if channels_last and not settings.compile:
            self.call = with_fused_layers(self.network)
        self.folded: FoldedMember | None = None

    def forward(self, batch: Batch, step: int) -> Tensor:
        if not self.frozen:
            self.folded = None
        return super().forward(batch, step)

    def compute(self, inputs: Tensor, passes: int | None) -> Tensor:
        # folded weights are rounded to bf16 differently, so that other outputs would come of them
        if self.settings.compile or self.settings.bf16:
            return super().compute(inputs, passes)
        if self.folded is None:
            self.folded = FoldedMember(self.network, self.channels_last, self.settings.passes is not None)
        outputs = self.folded(inputs if self.keys is None else inputs[0], passes)
        return outputs if isinstance(self.member.model, Family) else outputs.unsqueeze(1)
