"""Stacking: the weights of the members are fitted to held-out data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import Field, ValidationInfo, field_validator

from ensemblekit import Method, Problem, fit_weights, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss, Spec

DEFAULT_PENALTY = 0.1


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
    combines_in_training = False

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
    def fit_combiner(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        """Fit weights (M, 1) or (M, C)."""
        return fit_weights(outputs, target, loss, self._penalty)

    @property
    def _penalty(self) -> float | None:
        if self.form == "weights":
            return None
        return DEFAULT_PENALTY if self.penalty is None else self.penalty

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if spec.data.validation_fraction == 0:
            what = f'0, but "{self.name}" fits the weights of the members to validation data'
            yield Problem("/data.validation_fraction", what, "set it, for example, to 0.1")
        if self.form == "linear" and spec.loss.takes == "probabilities":
            what = f'the outputs of "linear" are not probabilities, but the loss "{spec.loss.name}" needs them'
            yield Problem("form", what, 'set form = "weights", or another training.loss')
