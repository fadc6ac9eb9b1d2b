"""End-to-end training: the ensemble is trained as one large network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemblekit import Method, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss


class EndToEnd(Method):
    """Trains the ensemble as one network: only the loss of its combined output counts."""

    paper = "Dutt et al. 2017, Coupled Ensembles of Neural Networks; GNCL with lambda = 1"
    formula = "l(f, y)"

    def linear_terms(self, num_members: int) -> tuple[float, float]:
        return 0.0, 1.0

    @hookimpl
    def member_loss(self, outputs: Tensor) -> Tensor:
        return outputs.new_zeros(outputs.shape[:2])

    @hookimpl
    def ensemble_loss(self, combined: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(combined, target)
