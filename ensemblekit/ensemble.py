"""The trained thing: a module of members and the way to combine them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ensemblekit.images import ImageTransform
from ensemblekit.losses import Loss
from ensemblekit.objectives import Objective
from ensemblekit.plugin import DataInfo
from ensemblekit.spec import Spec


class Ensemble(nn.Module):
    """Members and how they combine. Inputs are as the data set's batches give them: float32 (B, *input_shape)."""

    def __init__(
        self,
        members: Sequence[nn.Module],
        spec: Spec,
        info: DataInfo,
        classes: tuple[str, ...] | None = None,
        transform: ImageTransform | None = None,
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.spec, self.info, self.classes, self.transform = spec, info, classes, transform
        self._objective = Objective(spec.methods, spec.loss)

    @property
    def loss(self) -> Loss:
        """The loss it was trained with, which also says what its outputs mean."""
        return self.spec.loss

    def member_outputs(self, inputs: Tensor) -> Tensor:
        """The members' raw outputs (M, B, C)."""
        return torch.stack([member(inputs) for member in self.members])

    def forward(self, inputs: Tensor) -> Tensor:
        """The ensemble's raw output (B, C)."""
        return self.combine(self.member_outputs(inputs))

    def combine(self, outputs: Tensor) -> Tensor:
        """The ensemble's output (B, C) from the members' outputs (M, B, C)."""
        return self._objective.combine(outputs)

    def predict_proba(self, inputs: Tensor) -> Tensor:
        """Class probabilities (B, K)."""
        return self.loss.probabilities(self(inputs))
