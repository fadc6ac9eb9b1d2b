"""Dropout in predictions: the thinned networks inside each network are the ensemble."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from ensemblekit import Method, Problem, hookimpl

if TYPE_CHECKING:
    from ensemblekit import Spec


class Dropout(Method):
    """Goes on dropping units in predictions, where each network makes several passes; all of them are the ensemble.

    A pass drops the same units for every sample, so that it is one thinned network and a prediction depends on nothing
    but its input. Training is that of the network with dropout. One network is enough, and several make more passes.
    """

    paper = (
        "Gal and Ghahramani 2016, Dropout as a Bayesian Approximation; Bachman et al. 2014, Learning with "
        "Pseudo-Ensembles"
    )
    formula = "(1/M) sum_i l(h_i, y);  f = mean over passes s of combine_i h_i(x; units dropped in s)"

    num_passes: int = Field(16, alias="passes", ge=1, description="passes of each network in a prediction")

    @hookimpl
    def passes(self) -> int:
        return self.num_passes

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        models = [("/model", spec.model)]
        if spec.groups:
            models = [(f"/ensemble.groups.{index}.model", group.model) for index, group in enumerate(spec.groups)]
        for path, model in models:
            if getattr(model, "dropout", None) == 0:
                what = f'0, but "{self.name}" drops units in predictions'
                yield Problem(f"{path}.dropout", what, "set it to 0.2, say")
