"""Distillation: members learn the predictions of a trained ensemble."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field

from ensemblekit import Method, Problem, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import DataInfo, Loss, Spec

TEACHER = "teacher"
"""The name of the auxiliary group whose networks are the members of the trained ensemble."""


class Distillation(Method):
    """Members learn the mean prediction of a trained ensemble, or each of them one of its members, and the labels.

    The ensemble is the auxiliary group `teacher`, whose networks are frozen; predictions do not need it. In regression,
    and wherever outputs are values, half the squared distance takes the place of T^2 KL.
    """

    paper = "Hinton et al. 2015, Distilling the Knowledge in a Neural Network"
    formula = "(1/M) sum_i [(1 - share) l(h_i, y) + share T^2 KL(mean_j softmax(t_j / T), softmax(h_i / T))]"

    temperature: float = Field(
        2.0, gt=0, description="divides the logits of teacher and members: T > 1 shows more of the unlikely classes"
    )
    share: float = Field(0.9, ge=0, le=1, description="weight of the teacher's prediction; the labels have the rest")
    learn: Literal["mean", "members"] = Field(
        "mean", description="every member learns the mean of the teacher's members, or member i their member i"
    )

    def formula_for_parameters(self) -> str:
        return self.formula if self.learn == "mean" else self.formula.replace("mean_j softmax(t_j", "softmax(t_i")

    def required_groups(self) -> Mapping[str, Literal["members", "outputs", "ensemble"]]:
        return {TEACHER: "ensemble"}

    @hookimpl
    def member_loss(
        self,
        outputs: Tensor,
        target: Tensor,
        loss: Loss,
        num_members: int,
        members: Tensor,
        auxiliary: Mapping[str, Tensor],
    ) -> Tensor:
        teacher = teacher_outputs(auxiliary[TEACHER].detach(), outputs.shape[-1])
        if self.learn == "members":
            teacher = teacher[members].unsqueeze(1)  # (M, 1, B, C): each member has one to learn from
        distance = squared_distance if loss.takes == "values" else self._divergence
        learned = distance(outputs, teacher, loss)
        return ((1 - self.share) * loss(outputs, target) + self.share * learned) / num_members

    def _divergence(self, outputs: Tensor, teacher: Tensor, loss: Loss) -> Tensor:
        """Compute T² KL(mean of the teacher's distributions, distribution of the outputs), both at temperature T."""
        logs = self._at_temperature(outputs, loss)
        expected = self._at_temperature(teacher, loss).exp().mean(dim=-3)
        divergence = (torch.special.xlogy(expected, expected) - expected * logs).sum(dim=-1)
        # T² keeps the size of the gradient, which is proportional to 1/T² for large T
        return self.temperature**2 * divergence

    def _at_temperature(self, outputs: Tensor, loss: Loss) -> Tensor:
        """Return logarithms of probabilities at temperature T; those of outputs of any meaning serve as logits."""
        logits = loss.log_probabilities(outputs)
        logits = logits.clamp_min(-(torch.finfo(logits.dtype).max ** 0.5))  # with log 0, 0 · log 0 would be nan
        return (logits / self.temperature).log_softmax(dim=-1)

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        yield from super().check_spec(spec)
        for name in dict.fromkeys(model.name for model in spec.member_models if model.fitted):
            what = f'"{name}" is fitted to the labels and cannot learn from a teacher'
            yield Problem("/model", what, "use a model that learns by gradients")

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        yield from super().check_data(spec, info)
        num_outputs = spec.loss.num_outputs(info)
        if spec.loss.takes == "values" and spec.loss.slices(num_outputs):
            what = f'"{self.name}" compares values, but those of "{spec.loss.name}" are parameters of a distribution'
            yield Problem("/training.loss", what, 'use loss = "mse"')
        group = next((group for group in spec.auxiliary_groups if group.name == TEACHER), None)
        if group is None:  # the spec is refused for that
            return
        size = group.outputs or spec.ensemble.members
        if size % num_outputs:
            what = f'the networks of the group "{TEACHER}" have {size} outputs, but a prediction has {num_outputs}'
            yield Problem("/ensemble.groups", what, f"set outputs to {num_outputs} for each member of the teacher")
        elif self.learn == "members" and (count := group.members * size // num_outputs) != spec.ensemble.members:
            what = f"each member learns from one of the teacher's {count}, but there are {spec.ensemble.members}"
            yield Problem("/ensemble.members", what, f'set it to {count}, or use learn = "mean"')


def teacher_outputs(auxiliary: Tensor, num_outputs: int) -> Tensor:
    """Return the outputs (T, B, C) of all T members of the teacher.

    Args:
        auxiliary: outputs (A, B, K · C) of A networks, each of which computes K members.
        num_outputs: C.
    """
    return auxiliary.unflatten(-1, (-1, num_outputs)).movedim(2, 1).flatten(0, 1)


def squared_distance(outputs: Tensor, teacher: Tensor, loss: Loss) -> Tensor:
    """Compute half the squared distance of the outputs from the mean of the teacher's."""
    return 0.5 * (outputs - teacher.mean(dim=-3)).square().sum(dim=-1)
