"""Base of the methods that train one network and keep snapshots of it during training."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch

from ensemblekit import Method, Problem, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import GrowingEnsemble, Loss, Spec


class SnapshotMethod(Method):
    """Trains one network, which is always the last member; the members before it are snapshots of it."""

    needs_frozen_members = False

    @abstractmethod
    def snapshot_epochs(self, num_epochs: int) -> Collection[int]:
        """Epochs, counted from 1, at whose start a snapshot is kept."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(outputs, target)

    @hookimpl
    def select_members(self, outputs: Tensor, num_members: int) -> Tensor:
        return (torch.arange(num_members, device=outputs.device) == num_members - 1).unsqueeze(-1)

    @hookimpl
    def members_at_start(self) -> int:
        return 1

    @hookimpl
    def epoch_started(self, ensemble: GrowingEnsemble, epoch: int, num_epochs: int) -> None:
        if epoch in self.snapshot_epochs(num_epochs):
            ensemble.keep_copy(len(ensemble) - 1)

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if spec.has_groups:
            what = f'"{self.name}" trains one network, so its members cannot have different models'
            yield Problem("/ensemble.groups", what, "remove the groups")
