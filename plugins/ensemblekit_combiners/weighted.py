"""A weighted mean with fitted weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ensemblekit import Combination, Problem, fit_weights, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss, Spec


class Weighted(Combination):
    """A weighted mean of the members' outputs; the weights are fitted to the validation data.

    The weights are those of the method `stacking` in its form `weights`. The validation metrics of a run are slightly
    optimistic, since the weights are fitted to the same data; the test metrics are not.
    """

    paper = "Breiman 1996, Stacked Regressions; van der Laan et al. 2007, Super Learner"
    formula = "f = sum_i w_i h_i,  w = argmin of the held-out mean of l(f, y),  w_i >= 0,  sum_i w_i = 1"

    @hookimpl
    def combine(self, outputs: Tensor, fitted: Tensor | None) -> Tensor:
        if fitted is None:
            return outputs.mean(dim=0)
        return (outputs * fitted.unsqueeze(1)).sum(dim=0)

    @hookimpl
    def fit_combiner(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        """Fit weights (M, 1)."""
        return fit_weights(outputs, target, loss)

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if spec.data.validation_fraction == 0:
            what = f'0, but "{self.name}" fits the weights of the members to validation data'
            yield Problem("/data.validation_fraction", what, "set it, for example, to 0.1")
