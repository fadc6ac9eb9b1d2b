"""AdaBoost for any number of classes: every member concentrates on the samples that those before it get wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field, PrivateAttr

from ensemblekit import Method, Problem, hookimpl
from ensemblekit_methods.boosting import first_epochs
from ensemblekit_methods.conflicts import conflicts

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import DataInfo, GrowingEnsemble, Loss, Spec

SMALLEST_LOG = math.log(torch.finfo(torch.float64).eps)
"""Lower bound of log-probabilities in the weight update of SAMME.R, as in scikit-learn."""
SMALLEST_SHARE = 1e-7
"""Probability of a class without a vote: of 0, the logarithm would be infinite."""
CONFLICTING_HOOKS = {
    "members_at_start": "adds members too",
    "epoch_started": "changes the ensemble during training too",
    "epoch_trained": "changes the ensemble during training too",
    "sample_weights": "weights the samples too",
    "combine": "combines the members too",
    "ensemble_loss": "has a loss of all members together, and they are trained one after the other",
    "select_members": "chooses among members, and they are trained one after the other",
}
"""What other methods cannot do beside this one, and why."""


def samme_update(weights: Tensor, wrong: Tensor, num_classes: int, shrinkage: float = 1.0) -> tuple[float, Tensor]:
    """Compute the vote of a member and the sample weights of the next one by SAMME.

    Args:
        weights: Those that the member was trained with (N,), at least 0, float64.
        wrong: Which samples the member gets wrong (N,), bool.
        num_classes: C.
        shrinkage: Factor of the vote.

    Returns:
        The weight alpha of the member's vote, and new sample weights (N,) with a mean of 1. A member that is not better
        than guessing, err >= 1 - 1/C, has no vote, and the weights stay as they are. The error counts as at least that
        of half a sample of mean weight, so that the vote of a member without a mistake is large but finite.
    """
    wrong = wrong.to(weights.dtype)
    error = float((weights * wrong).sum() / weights.sum())
    if error >= 1 - 1 / num_classes:
        return 0.0, _with_mean_one(weights)
    error = max(error, 0.5 / len(weights))
    alpha = shrinkage * (math.log((1 - error) / error) + math.log(num_classes - 1))
    return alpha, _with_mean_one(weights * torch.exp(alpha * wrong))


def samme_r_update(weights: Tensor, log_probabilities: Tensor, target: Tensor, shrinkage: float = 1.0) -> Tensor:
    """Compute the sample weights of the next member by SAMME.R, from the probabilities of this one.

    Args:
        weights: Those that the member was trained with (N,), at least 0, float64.
        log_probabilities: Of the member (N, C), float64.
        target: Class indices (N,).
        shrinkage: Factor of the exponent.

    Returns:
        New sample weights (N,) with a mean of 1.
    """
    num_classes = log_probabilities.shape[-1]
    logs = log_probabilities.clamp_min(SMALLEST_LOG)
    true = logs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    # algorithm 4: y is 1 for the true class and -1/(C-1) for the others
    coded = true - (logs.sum(dim=-1) - true) / (num_classes - 1)
    return _with_mean_one(weights * torch.exp(-shrinkage * (num_classes - 1) / num_classes * coded))


def _with_mean_one(weights: Tensor) -> Tensor:
    return weights / weights.mean()


class AdaBoost(Method):
    """Trains members one after the other, each with more weight on the samples that those before it get wrong.

    Each member is trained for its share of the epochs and then frozen; its outputs for the training data decide how the
    samples are weighted for the next one. Variant `samme` counts mistakes, and members vote with weights alpha; variant
    `samme.r` uses the members' probabilities, and the ensemble's are their geometric mean. A member that is still in
    training has no vote, but the first one predicts alone. As long as no member has a vote, their mean predicts.
    """

    paper = "Zhu et al. 2009, Multi-class AdaBoost, algorithms 2 and 4"
    formula = (
        "w l(h_m, y) for the member m in training;  w: sample weights with a mean of 1\n"
        "samme: alpha_m = log((1 - err_m) / err_m) + log(C - 1),  w <- w exp(alpha_m 1{wrong}),\n"
        "p = sum_m alpha_m vote_m / sum_m alpha_m\n"
        "samme.r: w <- w exp(-(C-1)/C [log p_y - sum_{c != y} log p_c / (C-1)]),  p = softmax(mean_m log p_m)"
    )
    needs_frozen_members = False

    variant: Literal["samme", "samme.r"] = Field("samme", description="count mistakes, or use the probabilities")
    shrinkage: float = Field(1.0, gt=0, le=1, description="factor of the exponents of the weight updates")

    _alphas: list[float] = PrivateAttr(default_factory=list)
    """The weights of the votes of the members whose training has finished."""

    def state(self) -> Mapping[str, Tensor]:
        return {"alphas": torch.tensor(self._alphas, dtype=torch.float64)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._alphas = state["alphas"].tolist()

    @hookimpl
    def combine(self, outputs: Tensor, loss: Loss, members: Tensor) -> Tensor | None:
        if len(outputs) == 1 or not any(self._alphas):
            return None  # a single member predicts as it is; if nobody has a vote, all do
        known = torch.tensor([*self._alphas, 0.0], dtype=outputs.dtype, device=outputs.device)
        alphas = known[members.clamp_max(len(self._alphas))]  # zero for the member in training
        shares = (alphas / alphas.sum().clamp_min(SMALLEST_SHARE)).view(-1, 1, 1)
        if self.variant == "samme.r":
            # the decision (C-1)(mean log p - mean over classes) means these probabilities
            mean = (shares * loss.log_probabilities(outputs).clamp_min(SMALLEST_LOG)).sum(dim=0)
            return loss.from_probabilities(mean.softmax(dim=-1))
        probabilities = loss.probabilities(outputs)
        classes = torch.arange(probabilities.shape[-1], device=outputs.device)
        votes = (probabilities.argmax(dim=-1, keepdim=True) == classes).to(outputs.dtype)
        voted = (shares * votes).sum(dim=0).clamp_min(SMALLEST_SHARE)
        return loss.from_probabilities(voted / voted.sum(dim=-1, keepdim=True))

    @hookimpl
    def members_at_start(self) -> int:
        return 1

    @hookimpl
    def epoch_started(self, ensemble: GrowingEnsemble, epoch: int, num_epochs: int, num_members: int) -> None:
        if epoch in first_epochs(num_epochs, num_members)[1:]:
            ensemble.freeze(len(ensemble) - 1)
            ensemble.grow()

    @hookimpl
    def epoch_trained(self, ensemble: GrowingEnsemble, epoch: int, num_epochs: int, num_members: int) -> None:
        if epoch + 1 not in [*first_epochs(num_epochs, num_members)[1:], num_epochs + 1]:
            return
        # the mean over stochastic passes, of which there may be several
        outputs = ensemble.outputs().unflatten(0, (-1, len(ensemble)))[:, -1].mean(dim=0).double()
        target = ensemble.targets.clamp_min(0)  # with a margin loss the first of two classes may be -1
        before = ensemble.sample_weights
        weights = outputs.new_ones(len(target)) if before is None else before[:, 0].double()
        if self.variant == "samme":
            probabilities = ensemble.loss.probabilities(outputs)
            wrong = probabilities.argmax(dim=-1) != target
            alpha, weights = samme_update(weights, wrong, probabilities.shape[-1], self.shrinkage)
        else:
            alpha = 1.0
            weights = samme_r_update(weights, ensemble.loss.log_probabilities(outputs), target, self.shrinkage)
        self._alphas.append(alpha)
        ensemble.set_sample_weights(weights.unsqueeze(1).expand(-1, num_members))

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        members, epochs = spec.ensemble.members, spec.training.epochs
        if epochs < members:
            what = f'"{self.name}" needs at least one epoch for each of {members} members, but there are only {epochs}'
            yield Problem("/training.epochs", what, f"set it to {members} or more, or lower ensemble.members")
        yield from conflicts(self, spec, CONFLICTING_HOOKS)

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        if info.task != "classification":
            what = f'"{self.name}" counts classes that are wrong, but the task of "{spec.data.name}" is regression'
            yield Problem("", what, 'use "boosting"')
