"""The median of the outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ensemblekit import Combination, Problem, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Spec


class Median(Combination):
    """The median over the members of each output, which a single member that is far off hardly changes.

    With an even number of members it is the mean of the two in the middle.
    """

    formula = "f_c = median of h_1c … h_Mc"

    @hookimpl
    def combine(self, outputs: Tensor) -> Tensor:
        ordered = outputs.sort(dim=0).values
        last = len(outputs) - 1
        return (ordered[last // 2] + ordered[last - last // 2]) / 2

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if spec.loss.takes == "probabilities":
            what = f'medians of probabilities do not sum to 1, but the loss "{spec.loss.name}" takes probabilities'
            yield Problem("", what, 'use combiner = "mean", or another training.loss')
