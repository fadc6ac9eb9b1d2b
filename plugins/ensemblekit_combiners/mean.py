"""The mean of the outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemblekit import Combination, hookimpl

if TYPE_CHECKING:
    from torch import Tensor


class Mean(Combination):
    """The mean of the members' outputs, which is also the default of methods that do not combine themselves."""

    formula = "f = (1/M) sum_i h_i"
    averages = "outputs"

    @hookimpl
    def combine(self, outputs: Tensor) -> Tensor:
        return outputs.mean(dim=0)
