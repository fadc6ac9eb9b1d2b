"""A trained ensemble: a module of members and how to combine them."""

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
from ensemblekit.core.threads import ThreadPool
from ensemblekit.data.transforms import ImageTransform
from ensemblekit.members.folding import FoldedMember
from ensemblekit.members.stochastic import outputs_of_passes
from ensemblekit.spec.sections import Spec


class Ensemble(nn.Module):
    """Members and how to combine them. Inputs are batches as the data set gives them: float32 (B, *input_shape).

    On a CPU, in evaluation mode and without gradients, predictions use copies of the members that are folded for
    inference, each on a core of its own. Changes of the members' weights are noticed (by the tensors' version
    counters, which only writing to ``parameter.data`` bypasses), and new copies are made.

    Args:
        members: the networks.
        spec: the spec that they were trained with.
        info: task and shapes.
        classes: names of the classes, in the order of their indices.
        transform: the preparation of images.
        fitted: parameters of the combiner, if a method fits one.
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
        self.register_buffer("fitted", fitted)
        self._objective = Objective(spec.methods, spec.loss)
        self._passes = self._objective.hooks.passes(spec.ensemble.members)
        self._pool = ThreadPool()
        self._pass_lock = Lock()
        """Held in stochastic passes: layers remember the number of the pass."""
        self._folded: _FoldedMembers | None = None

    @property
    def loss(self) -> Loss:
        """The loss that it was trained with, which also defines what its outputs mean."""
        return self.spec.loss

    def member_outputs(self, inputs: Tensor) -> Tensor:
        """Compute the members' raw outputs (M, B, C); (S · M, B, C) of S stochastic passes, the first pass first."""
        in_evaluation = not any(layer.training for member in self.members for layer in member.modules())
        passes = self._passes if in_evaluation else None
        with nullcontext() if passes is None else self._pass_lock:
            if self.spec.engine.precision == "bf16":
                outputs = [self._in_bf16(member, inputs, passes) for member in self.members]
            elif inputs.device.type == "cpu" and in_evaluation and not torch.is_grad_enabled():
                outputs = self._pool.map(lambda member: member(inputs, passes), self._folded_members())
            else:
                outputs = [outputs_of_passes(member, inputs, passes) for member in self.members]
        return torch.stack(outputs, dim=1).flatten(0, 1)

    @staticmethod
    def _in_bf16(member: nn.Module, inputs: Tensor, passes: int | None) -> Tensor:
        """Compute a member in the precision of its run, as it was evaluated in training."""
        with torch.autocast(inputs.device.type, torch.bfloat16):
            return outputs_of_passes(member, inputs, passes).float()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ensemble:
        members = deepcopy(self.members, memo)
        fitted = deepcopy(self.fitted, memo)
        twin = Ensemble(list(members), self.spec, self.info, self.classes, self.transform, fitted)
        twin.training = twin.members.training = self.training
        return twin

    def _folded_members(self) -> list[FoldedMember]:
        tensors = [*self.members.parameters(), *self.members.buffers()]
        hooks = [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in self.members.modules()]
        has_versions = not any(tensor.is_inference() for tensor in tensors)
        state = [*((tensor.data_ptr(), tensor._version) for tensor in tensors), *hooks] if has_versions else []
        if not has_versions or self._folded is None or self._folded.state != state:
            keep_freed_memory()
            channels_last = all("channels_last" not in model.unsupported() for model in self.spec.member_models)
            folded = [FoldedMember(member, channels_last) for member in self.members]
            self._folded = _FoldedMembers(state, [tensor.detach() for tensor in tensors], folded)
        return self._folded.members

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the ensemble's raw output (B, C)."""
        return self.combine(self.member_outputs(inputs))

    def combine(self, outputs: Tensor) -> Tensor:
        """Combine the members' outputs, as `member_outputs` returns them, to the ensemble's output (B, C)."""
        fitted = None if self.fitted is None else self.fitted.to(outputs)
        return self._objective.combine(outputs, fitted, passes=len(outputs) // len(self.members))

    def predict_proba(self, inputs: Tensor) -> Tensor:
        """Compute the class probabilities (B, K)."""
        return self.loss.probabilities(self(inputs))


@dataclass(frozen=True)
class _FoldedMembers:
    """Copies of the members that are folded for inference, and the weights that they were made from."""

    state: list[Any]
    """Address and version of each tensor, and the number of each layer's hooks."""
    tensors: list[Tensor]
    """Referenced, so that no other tensor can get one of these addresses."""
    members: list[FoldedMember]
