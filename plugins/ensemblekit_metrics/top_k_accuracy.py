"""The accuracy among the most probable classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from ensemblekit import DataInfo, Metric, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss, Spec


class TopKAccuracy(Metric):
    """The share of samples whose class is among the k most probable ones."""

    formula = "mean of 1{y among the k largest of p}"
    tasks = ("classification",)
    higher_is_better = True

    k: int = Field(5, ge=1, description="number of classes that count as correct")

    def compute(self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss) -> Tensor:
        best = loss.probabilities(combined).topk(self.k, dim=-1).indices
        return (best == target.unsqueeze(-1)).any(dim=-1).double().mean()

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        yield from super().check_data(spec, info)
        if info.task == "classification" and self.k > info.num_outputs:
            what = f'{self.k}, but "{spec.data.name}" has only {info.num_outputs} classes'
            yield Problem("k", what, f"set it to at most {info.num_outputs - 1}")
