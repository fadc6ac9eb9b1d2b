"""Generalized Negative Correlation Learning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import Field, ValidationInfo, field_validator

from ensemblekit import Method, Problem, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss, Spec


class GNCL(Method):
    """Interpolates between independent (lambda = 0) and end-to-end (lambda = 1) training.

    Mode `upper` minimises the upper bound that the paper proposes. Mode `exact` rewards the diversity term of the
    decomposition itself, for any twice differentiable loss; its Hessian D is never computed as a matrix.
    """

    paper = "Buschjäger et al. 2020, Generalized Negative Correlation Learning for Deep Ensembling, eq. 4 and 5"
    formula = (
        "upper: lambda l(f, y) + ((1 - lambda) / M) sum_i l(h_i, y)\n"
        "exact: (1/M) sum_i l(h_i, y) - (lambda / 2M) sum_i d_i^T D d_i,  d_i = h_i - f,  D = Hessian of l at f"
    )

    mode: Literal["upper", "exact"] = Field(
        "upper", description="the upper bound (eq. 5) or the exact diversity term (eq. 4)"
    )
    lam: float = Field(
        0.5,
        alias="lambda",
        ge=0,
        description="weight of the ensemble's loss (at most 1), or of the diversity in mode exact",
    )

    @field_validator("lam")
    @classmethod
    def _upper_interpolates(cls, lam: float, info: ValidationInfo) -> float:
        if info.data.get("mode") == "upper" and lam > 1:
            raise ValueError('must be at most 1 in mode "upper": lower it, or set mode = "exact"')
        return lam

    def formula_for_parameters(self) -> str:
        return self.formula.splitlines()[0 if self.mode == "upper" else 1].partition(": ")[2]

    def separable(self) -> bool:
        return self.lam == 0

    @hookimpl
    def member_loss(self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss, num_members: int) -> Tensor:
        if self.mode == "upper":
            return (1 - self.lam) / num_members * loss(outputs, target)
        diversity = loss.quadratic_form(combined, target, outputs - combined) / 2
        return (loss(outputs, target) - self.lam * diversity) / num_members

    @hookimpl
    def ensemble_loss(self, combined: Tensor, target: Tensor, loss: Loss) -> Tensor | None:
        return self.lam * loss(combined, target) if self.mode == "upper" else None

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if self.mode == "exact" and not spec.loss.twice_differentiable:
            what = f'"exact" needs a twice differentiable loss, but "{spec.loss.name}" is not'
            yield Problem("mode", what, 'set mode = "upper", or another training.loss')
