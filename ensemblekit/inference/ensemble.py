"""The trained thing: a module of members and the way to combine them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from ensemblekit.core.losses import Loss
from ensemblekit.core.memory import keep_freed_memory
from ensemblekit.core.objective import Objective
from ensemblekit.core.plugin import DataInfo
from ensemblekit.core.threads import Cores
from ensemblekit.data.transforms import ImageTransform
from ensemblekit.members.folding import ReadyMember
from ensemblekit.members.stochastic import outputs_of_passes
from ensemblekit.spec.sections import Spec


class Ensemble(nn.Module):
    """Members and how they combine. Inputs are as the data set's batches give them: float32 (B, *input_shape).

    On a CPU, in evaluation and where no gradient is asked for, members run on copies that are made for speed, each on
    a core of its own. Changes of the members' weights are noticed (by the tensors' versions, which everything counts
    but writing to ``parameter.data``), and new copies are made.
    """

    def __init__(
        self,
        members: Sequence[nn.Module],
        spec: Spec,
        info: DataInfo,
        classes: tuple[str, ...] | None = None,
        transform: ImageTransform | None = None,
        fitted: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.spec, self.info, self.classes, self.transform = spec, info, classes, transform
        self.fitted: Tensor | None
        self.register_buffer("fitted", fitted)  # what the combiner learnt from held-out data, if it learns
        self._objective = Objective(spec.methods, spec.loss)
        self._passes = self._objective.passes(spec.ensemble.members)
        self._cores = Cores()
        self._noisy = Lock()
        """Held in noisy passes: the networks' layers remember which one they are in."""
        self._ready: _Ready | None = None

    @property
    def loss(self) -> Loss:
        """The loss it was trained with, which also says what its outputs mean."""
        return self.spec.loss

    def member_outputs(self, inputs: Tensor) -> Tensor:
        """The members' raw outputs (M, B, C); if a method asks for S noisy passes (S M, B, C), the first pass first."""
        in_evaluation = not any(layer.training for member in self.members for layer in member.modules())
        passes = self._passes if in_evaluation else None
        with nullcontext() if passes is None else self._noisy:
            if inputs.device.type == "cpu" and in_evaluation and not torch.is_grad_enabled():
                outputs = self._cores.map(lambda member: member(inputs, passes), self._ready_members())
            else:
                outputs = [outputs_of_passes(member, inputs, passes) for member in self.members]
        return torch.stack(outputs, dim=1).flatten(0, 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ensemble:
        members = deepcopy(self.members, memo)
        fitted = deepcopy(self.fitted, memo)
        twin = Ensemble(list(members), self.spec, self.info, self.classes, self.transform, fitted)
        twin.training = twin.members.training = self.training
        return twin

    def _ready_members(self) -> list[ReadyMember]:
        tensors = [*self.members.parameters(), *self.members.buffers()]
        hooks = [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in self.members.modules()]
        countless = any(tensor.is_inference() for tensor in tensors)  # tensors of inference mode have no versions
        state = [] if countless else [*((tensor.data_ptr(), tensor._version) for tensor in tensors), *hooks]
        if countless or self._ready is None or self._ready.state != state:
            keep_freed_memory()
            channels_last = all("channels_last" not in model.unsupported() for model in self.spec.member_models)
            ready = [ReadyMember(member, channels_last) for member in self.members]
            self._ready = _Ready(state, [tensor.detach() for tensor in tensors], ready)
        return self._ready.members

    def forward(self, inputs: Tensor) -> Tensor:
        """The ensemble's raw output (B, C)."""
        return self.combine(self.member_outputs(inputs))

    def combine(self, outputs: Tensor) -> Tensor:
        """The ensemble's output (B, C) from what `member_outputs` returned."""
        fitted = None if self.fitted is None else self.fitted.to(outputs)
        return self._objective.combine(outputs, fitted, passes=len(outputs) // len(self.members))

    def predict_proba(self, inputs: Tensor) -> Tensor:
        """Class probabilities (B, K)."""
        return self.loss.probabilities(self(inputs))


@dataclass(frozen=True)
class _Ready:
    """Copies that are made for speed, and what they are copies of."""

    state: list[Any]
    """Address and version of each tensor, and the number of each layer's hooks."""
    tensors: list[Tensor]
    """Kept, so that no other tensor comes to have one of these addresses."""
    members: list[ReadyMember]
