"""Predictions of a run on its test data, computed once from the kept outputs for all charts of classification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ensemblekit.core.losses import Loss
from ensemblekit.core.metrics import entropy
from ensemblekit.core.tasks import TASKS


@dataclass(frozen=True)
class Predictions:
    """Classes and probabilities that the members and the ensemble predict for N samples of K classes."""

    targets: Tensor
    """True classes, int64 (N,)."""
    probabilities: Tensor
    """Of the ensemble, float64 (N, K)."""
    votes: Tensor
    """The class that each member predicts, int64 (M, N)."""
    member_confidence: Tensor
    """The probability that each member gives its class, (M, N)."""
    entropy: Tensor
    """Of the mean of the members' probabilities, in nats (N,)."""
    mutual_information: Tensor
    """The part of the entropy that is due to the disagreement of the members (N,)."""
    classes: tuple[str, ...]

    @property
    def predicted(self) -> Tensor:
        """The class that the ensemble predicts, (N,)."""
        return self.probabilities.argmax(dim=-1)

    @property
    def confidence(self) -> Tensor:
        """The probability of the predicted class, (N,)."""
        return self.probabilities.amax(dim=-1)

    @property
    def correct(self) -> Tensor:
        """Whether the ensemble is right, bool (N,)."""
        return self.predicted == self.targets

    @property
    def member_correct(self) -> Tensor:
        """Whether each member is right, bool (M, N)."""
        return self.votes == self.targets

    @property
    def agreement(self) -> Tensor:
        """The share of the pairs of members that predict the same class, (N,); 1 for a single member."""
        num_members = len(self.votes)
        if num_members == 1:
            return torch.ones(self.votes.shape[1], dtype=torch.float64)
        counts = vote_counts(self.votes, len(self.classes)).double()
        return (counts * (counts - 1)).sum(dim=1) / (num_members * (num_members - 1))


def vote_counts(votes: Tensor, num_classes: int) -> Tensor:
    """Count the members (M, N) that predict each class, int64 (N, K)."""
    counts = torch.zeros(votes.shape[1], num_classes, dtype=torch.int64)
    return counts.scatter_add_(1, votes.T, torch.ones_like(votes.T))


def predict(outputs: Tensor, combined: Tensor, targets: Tensor, loss: Loss, names: Sequence[str] | None) -> Predictions:
    """Compute the predictions; a member at a time, to need little memory.

    Args:
        outputs: the members' outputs (M, N, C).
        combined: the ensemble's output (N, C).
        targets: the true classes (N,).
        loss: defines the probabilities.
        names: of the classes. Default: their indices.
    """
    probabilities = loss.probabilities(combined.double())
    votes, confidence, mean, aleatoric = (
        [],
        [],
        torch.zeros_like(probabilities),
        torch.zeros(len(targets), dtype=torch.float64),
    )
    for member in outputs:
        own = loss.probabilities(member.double())
        best = own.max(dim=-1)
        votes.append(best.indices)
        confidence.append(best.values)
        mean += own / len(outputs)
        aleatoric += entropy(own) / len(outputs)
    total = entropy(mean)
    num_classes = probabilities.shape[-1]
    return Predictions(
        targets=TASKS["classification"].target_for_metrics(targets.flatten(), loss),
        probabilities=probabilities,
        votes=torch.stack(votes),
        member_confidence=torch.stack(confidence),
        entropy=total,
        mutual_information=(total - aleatoric).clamp_min(0),
        classes=tuple(names) if names and len(names) == num_classes else tuple(map(str, range(num_classes))),
    )
