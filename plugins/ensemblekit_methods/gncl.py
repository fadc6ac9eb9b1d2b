"""Generalized Negative Correlation Learning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator

from ensemblekit import Method, Problem, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss, Spec


class GNCL(Method):
    """Interpolates between independent (lambda = 0) and end-to-end (lambda = 1) training.

    Mode `upper` minimises the upper bound that the paper proposes. Mode `exact` rewards the diversity term of the
    decomposition itself, for any twice differentiable loss; its Hessian D is never computed as a matrix.

    The exact objective has no minimum for any lambda > 0 if the loss grows less than quadratically, as cross-entropy
    and `gaussian_hinge` do: D depends on f alone, so that members that move apart gain more reward than they lose, and
    nothing stops them. Mode `bounded` counts a member's reward only up to l(h_i, y) - l(f, y) / 2. Then the objective
    is never below ((1 - lambda) / M) sum_i l(h_i, y) + (lambda / 2) l(f, y), so a small value means a small loss; it
    equals the exact one for members that are close to each other; and where the reward is cut off, members still learn,
    from the gradient of that lower bound.
    """

    paper = "Buschjäger et al. 2020, Generalized Negative Correlation Learning for Deep Ensembling, eq. 4 and 5"
    formula = (
        "upper: lambda l(f, y) + ((1 - lambda) / M) sum_i l(h_i, y)\n"
        "exact: (1/M) sum_i l(h_i, y) - (lambda / 2M) sum_i d_i^T D d_i,  d_i = h_i - f,  D = Hessian of l at f\n"
        "bounded: (1/M) sum_i [ l(h_i, y) - lambda min(1/2 d_i^T D d_i, l(h_i, y) - 1/2 l(f, y)) ]"
    )

    mode: Literal["upper", "exact", "bounded"] = Field(
        "upper",
        description="the upper bound (eq. 5), the exact diversity term (eq. 4), or the exact one with a bounded reward",
    )
    lam: float = Field(
        0.5,
        alias="lambda",
        ge=0,
        description="weight of the ensemble's loss, or of the diversity in the other modes; at most 1 unless exact",
    )

    @field_validator("lam")
    @classmethod
    def _is_a_share(cls, lam: float, info: ValidationInfo) -> float:
        mode = info.data.get("mode")
        if mode in ("upper", "bounded") and lam > 1:
            raise ValueError(f'must be at most 1 in mode "{mode}": lower it, or set mode = "exact"')
        return lam

    def formula_for_parameters(self) -> str:
        formulas = dict(line.split(": ", 1) for line in self.formula.splitlines())
        return formulas[self.mode]

    def separable(self) -> bool:
        return self.lam == 0

    def linear_terms(self, num_members: int) -> tuple[float, float] | None:
        return ((1 - self.lam) / num_members, self.lam) if self.mode == "upper" else None

    @hookimpl
    def member_loss(self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss, num_members: int) -> Tensor:
        losses = loss(outputs, target)
        if self.mode == "upper":
            return (1 - self.lam) / num_members * losses
        reward = loss.quadratic_form(combined, target, outputs - combined) / 2
        if self.mode == "bounded":
            reward = torch.minimum(reward, losses - loss(combined, target) / 2)
        return (losses - self.lam * reward) / num_members

    @hookimpl
    def ensemble_loss(self, combined: Tensor, target: Tensor, loss: Loss) -> Tensor | None:
        return self.lam * loss(combined, target) if self.mode == "upper" else None

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if self.mode != "upper" and not spec.loss.twice_differentiable:
            what = f'"{self.mode}" needs a twice differentiable loss, but "{spec.loss.name}" is not'
            yield Problem("mode", what, 'set mode = "upper", or another training.loss')

    def notes(self, spec: Spec) -> Iterable[str]:
        if self.mode != "exact" or self.lam == 0 or spec.loss.takes == "probabilities":
            return
        if self.lam > 1 or not spec.loss.grows_quadratically:
            with_loss = f'lambda = {self.lam:g} and the loss "{spec.loss.name}"'
            yield (
                f'the objective of "{self.name}" in mode "exact" has no minimum with {with_loss}: members may drift '
                'apart without limit. Mode "bounded" or "upper" prevents that.'
            )
