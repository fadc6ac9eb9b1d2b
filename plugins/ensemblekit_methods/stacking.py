"""Stacking: how much each member counts is learnt from held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator

from ensemblekit import Method, Problem, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss, Spec

DEFAULT_PENALTY = 0.1
MOST_ITERATIONS = 2000


class Stacking(Method):
    """Combines the members by weights that are fitted to the validation data; they train as without it.

    Form `weights` has one weight for each member, none below zero and summing to one. Form `linear` has one for each
    member and output, drawn towards 1/M by the penalty. The validation metrics of a run are those of the data that
    the weights were fitted to, and so a little too good; the test metrics are not.
    """

    paper = (
        "Wolpert 1992, Stacked Generalization; Breiman 1996, Stacked Regressions; van der Laan et al. 2007, Super "
        "Learner"
    )
    formula = (
        "weights: f = sum_i w_i h_i,  w = argmin of the held-out mean of l(f, y),  w_i >= 0,  sum_i w_i = 1\n"
        "linear: f_c = sum_i w_ic h_ic,  w = argmin of the held-out mean of l(f, y) + (penalty / 2) sum (w_ic - 1/M)^2"
    )

    form: Literal["weights", "linear"] = Field(
        "weights", description="a mean with weights; or a weight for each member and output, of any sign"
    )
    penalty: float | None = Field(
        None, ge=0, description=f'how strongly "linear" is drawn towards the plain mean ({DEFAULT_PENALTY} if left out)'
    )

    @field_validator("penalty")
    @classmethod
    def _penalty_is_used(cls, penalty: float | None, info: ValidationInfo) -> float | None:
        if penalty is not None and info.data.get("form") != "linear":
            raise ValueError('is only used with form = "linear": set that, or remove it')
        return penalty

    def formula_for_parameters(self) -> str:
        return self.formula.splitlines()[0 if self.form == "weights" else 1].partition(": ")[2]

    @hookimpl
    def combine(self, outputs: Tensor, fitted: Tensor | None) -> Tensor | None:
        if fitted is None:  # in training: as without this method
            return None
        return (outputs * fitted.unsqueeze(1)).sum(dim=0)

    @hookimpl
    def fit_combiner(self, outputs: Tensor, target: Tensor, loss: Loss, num_members: int) -> Tensor:
        """Weights (M, 1) or (M, C)."""
        held_out = outputs.detach().double()  # so that the search ends where the optimum is, not where rounding rules
        num_weights = 1 if self.form == "weights" else outputs.shape[-1]
        mean = held_out.new_full((num_members, num_weights), 1 / num_members)

        def paid(weights: Tensor) -> Tensor:
            combined = (held_out * weights.unsqueeze(1)).sum(dim=0)
            return loss(combined, target).mean() + self._strength / 2 * (weights - mean).square().sum()

        start = mean.sqrt() if self.form == "weights" else mean
        with torch.enable_grad():
            weights = self._weights(_minimised(lambda free: paid(self._weights(free)), start))
        return torch.where(paid(weights) <= paid(mean), weights, mean).to(outputs.dtype)

    @property
    def _strength(self) -> float:
        if self.form == "weights":
            return 0.0
        return DEFAULT_PENALTY if self.penalty is None else self.penalty

    def _weights(self, free: Tensor) -> Tensor:
        """Weights from numbers without constraints: squares reach zero, which a softmax only approaches."""
        return free.square() / free.square().sum() if self.form == "weights" else free

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if spec.data.validation_fraction == 0:
            what = f'0, but "{self.name}" learns from held-out data how to combine the members'
            yield Problem("/data.validation_fraction", what, "set it to 0.1, say")
        if self.form == "linear" and spec.loss.takes == "probabilities":
            what = f'"linear" makes no probabilities of probabilities, and the loss "{spec.loss.name}" needs them'
            yield Problem("form", what, 'set form = "weights", or another training.loss')


def _minimised(function: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Where a smooth function of a tensor is least, by a quasi-Newton search from `start`."""
    free = start.clone().requires_grad_()
    search = torch.optim.LBFGS(
        [free],
        max_iter=MOST_ITERATIONS,
        tolerance_grad=1e-10,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def slope() -> Tensor:
        value = function(free)
        (free.grad,) = torch.autograd.grad(value, free)
        return value

    search.step(slope)
    return free.detach()
