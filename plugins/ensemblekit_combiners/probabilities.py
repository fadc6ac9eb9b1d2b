"""The mean of the probabilities."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from ensemblekit import Combination, Loss, hookimpl

if TYPE_CHECKING:
    from torch import Tensor


class Probabilities(Combination):
    """The mean of the members' probabilities of classes or labels: the ensemble as a mixture of its members."""

    paper = "Lakshminarayanan et al. 2017, Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles"
    formula = "p = (1/M) sum_i p_i,  for cross-entropy p_i = softmax(h_i)"
    tasks = ("classification", "multilabel")
    mixes_probabilities = True
    averages = "probabilities"

    @hookimpl
    def combine(self, outputs: Tensor, loss: Loss) -> Tensor:
        log_mean = loss.log_probabilities(outputs).logsumexp(dim=0) - log(len(outputs))
        if type(loss).from_probabilities is Loss.from_probabilities:
            return log_mean  # logarithms are outputs already, and do not underflow
        return loss.from_probabilities(log_mean.exp())
