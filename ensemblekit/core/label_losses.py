"""The loss of labels that do not exclude each other: the default for multi-label targets."""

from __future__ import annotations

import math

from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from ensemblekit.core.errors import DataError
from ensemblekit.core.losses import Loss, inner_probabilities


class BCE(Loss):
    """Binary cross-entropy of several labels, of which any number may be present; each output is the logit of one."""

    formula = "l(z, y) = - sum_c [w y_c log sigmoid(z_c) + (1 - y_c) log sigmoid(-z_c)],  w the positive weight"
    takes = "labels"

    positive_weight: float = Field(
        1.0, gt=0, description="weight w of labels that are present: more than 1 if they are rare"
    )

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        losses = self.positive_weight * target * logsigmoid(outputs) + (1 - target) * logsigmoid(-outputs)
        return -losses.sum(dim=-1)

    def quadratic_form(self, at: Tensor, target: Tensor, direction: Tensor) -> Tensor:
        labels, p = self.prepare(at, target), at.sigmoid()
        weights = 1 + (self.positive_weight - 1) * labels
        return (weights * p * (1 - p) * direction.square()).sum(dim=-1)

    def third_derivative_bound(self, start: Tensor, end: Tensor, target: Tensor) -> Tensor:
        # p(1-p)(1-2p) is largest at p = 1/2 ± √3/6, as for cross-entropy
        return end.new_full(end.shape[:-1], max(self.positive_weight, 1) / (6 * math.sqrt(3)))

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return the probability of each label (..., C); they do not sum to 1."""
        return outputs.sigmoid()

    def log_probabilities(self, outputs: Tensor) -> Tensor:
        return logsigmoid(outputs)

    def from_probabilities(self, probabilities: Tensor) -> Tensor:
        return inner_probabilities(probabilities).logit()

    def check_values(self, outputs: Tensor, target: Tensor) -> None:
        if bool(((target != 0) & (target != 1)).any()):
            raise DataError("targets are not 0 or 1", f'target of the loss "{self.name}"', "give 1 for a label, else 0")
