"""What all methods share that train one network and keep copies of it on the way."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch

from ensemblekit import Method, Problem, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import GrowingEnsemble, Loss, Spec


class KeptCopies(Method):
    """One network learns and is always the last member; those before it are copies of it as it once was."""

    needs_frozen_members = False

    @abstractmethod
    def kept_at(self, num_epochs: int) -> Collection[int]:
        """The epochs, counted from 1, at whose start a copy is kept."""

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
        if epoch in self.kept_at(num_epochs):
            ensemble.keep_copy(len(ensemble) - 1)

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if spec.groups:
            what = f'"{self.name}" copies one network, so its members cannot have models of their own'
            yield Problem("/ensemble.groups", what, "remove the groups")
