"""Stacking: the weights of the members are fitted to held-out data."""

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
MAX_ITERATIONS = 2000


class Stacking(Method):
    """Combines the members by weights that are fitted to the validation data; the members' training is unchanged.

    Form `weights` has one non-negative weight per member, and the weights sum to one. Form `linear` has one weight per
    member and output, pulled towards 1/M by the penalty. The validation metrics of a run are slightly optimistic, since
    the weights are fitted to the same data; the test metrics are not.
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
        "weights", description="a weighted mean; or a weight of any sign for each member and output"
    )
    penalty: float | None = Field(
        None, ge=0, description=f'strength of the pull of "linear" towards the plain mean (default {DEFAULT_PENALTY})'
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
        if fitted is None:  # in training, as without this method
            return None
        return (outputs * fitted.unsqueeze(1)).sum(dim=0)

    @hookimpl
    def fit_combiner(self, outputs: Tensor, target: Tensor, loss: Loss, num_members: int) -> Tensor:
        """Fit weights (M, 1) or (M, C)."""
        held_out = outputs.detach().double()  # in float32, rounding would stop the search before the optimum
        num_weights = 1 if self.form == "weights" else outputs.shape[-1]
        mean = held_out.new_full((num_members, num_weights), 1 / num_members)

        def objective(weights: Tensor) -> Tensor:
            combined = (held_out * weights.unsqueeze(1)).sum(dim=0)
            return loss(combined, target).mean() + self._strength / 2 * (weights - mean).square().sum()

        start = mean.sqrt() if self.form == "weights" else mean
        with torch.enable_grad():
            weights = self._weights(_minimise(lambda unconstrained: objective(self._weights(unconstrained)), start))
        return torch.where(objective(weights) <= objective(mean), weights, mean).to(outputs.dtype)

    @property
    def _strength(self) -> float:
        if self.form == "weights":
            return 0.0
        return DEFAULT_PENALTY if self.penalty is None else self.penalty

    def _weights(self, unconstrained: Tensor) -> Tensor:
        """Turn unconstrained numbers into weights: squares reach zero, which a softmax only approaches."""
        return unconstrained.square() / unconstrained.square().sum() if self.form == "weights" else unconstrained

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if spec.data.validation_fraction == 0:
            what = f'0, but "{self.name}" fits the weights of the members to validation data'
            yield Problem("/data.validation_fraction", what, "set it, for example, to 0.1")
        if self.form == "linear" and spec.loss.takes == "probabilities":
            what = f'the outputs of "linear" are not probabilities, but the loss "{spec.loss.name}" needs them'
            yield Problem("form", what, 'set form = "weights", or another training.loss')


def _minimise(function: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Find the minimum of a smooth function of a tensor by L-BFGS, from `start`."""
    unconstrained = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [unconstrained],
        max_iter=MAX_ITERATIONS,
        tolerance_grad=1e-10,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        value = function(unconstrained)
        (unconstrained.grad,) = torch.autograd.grad(value, unconstrained)
        return value

    optimizer.step(closure)
    return unconstrained.detach()
