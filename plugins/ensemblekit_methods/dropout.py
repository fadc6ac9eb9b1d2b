"""Monte-Carlo dropout: the ensemble consists of thinned networks within each network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from ensemblekit import Method, Problem, hookimpl

if TYPE_CHECKING:
    from ensemblekit import Spec


class Dropout(Method):
    """Predicts by several forward passes with dropout (Monte-Carlo dropout); the passes are the ensemble.

    A pass drops the same units for every sample, so it is one thinned network, and a prediction depends only on its
    input. Networks are trained with dropout as usual. One network is enough; several networks give more passes.
    """

    paper = (
        "Gal and Ghahramani 2016, Dropout as a Bayesian Approximation; Bachman et al. 2014, Learning with "
        "Pseudo-Ensembles"
    )
    formula = "(1/M) sum_i l(h_i, y);  f = mean over passes s of combine_i h_i(x; units dropped in s)"

    num_passes: int = Field(16, alias="passes", ge=1, description="forward passes of each network in a prediction")

    @hookimpl
    def passes(self) -> int:
        return self.num_passes

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        models = [("/model", spec.model)]
        if spec.has_groups:
            groups = [(index, group) for index, group in enumerate(spec.groups) if group.role == "member"]
            models = [(f"/ensemble.groups.{index}.model", group.model) for index, group in groups]
        for path, model in models:
            if getattr(model, "dropout", None) == 0:
                what = f'0, but "{self.name}" needs dropout in predictions'
                yield Problem(f"{path}.dropout", what, "set it, for example, to 0.2")
