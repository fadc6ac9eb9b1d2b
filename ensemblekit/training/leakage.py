"""Checks before training that no member learns from the fold that it is trained without."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ensemblekit.core.composition import PROGRESS
from ensemblekit.core.errors import UsageError
from ensemblekit.core.objective import Moment, Objective
from ensemblekit.core.verification import implemented_hooks
from ensemblekit.data.loading import Batch
from ensemblekit.members.state import MemberState
from ensemblekit.spec.sections import Spec
from ensemblekit.training.checks import random_outputs
from ensemblekit.training.rehearsal import rehearse

LIFE_CYCLE_HOOKS = {"members_at_start", "epoch_started", "epoch_trained"}
"""Hooks by which methods change the members during training."""
REMOVE = "remove data.folds, or choose a method that trains each member by itself, such as independent or bagging"


def check_no_leakage(
    spec: Spec, objective: Objective, states: Sequence[MemberState], batch: Batch, weights: Tensor | None
) -> None:
    """Raise a `UsageError` if a member would learn from the fold that it is trained without.

    Args:
        spec: what is trained, with `data.folds`.
        objective: of the run.
        states: the members at the start.
        batch: a batch for trials.
        weights: its sample weights (B, M) for all members of the spec.
    """
    _check_members_learn(states)
    _check_life_cycle(spec)
    if weights is not None and not weights.is_meta:
        outputs = random_outputs(objective, spec.ensemble.members, batch.targets)
        _check_gradients(objective, outputs, batch.targets, weights)


def _check_members_learn(states: Sequence[MemberState]) -> None:
    """Raise a `UsageError` if a member is used as it is, so that it may have seen its fold elsewhere."""
    for state in states:
        if not state.can_learn and not state.model.fitted:
            what = f'members of the model "{state.model.name}" are not trained here: they may have seen their fold'
            raise UsageError(what, "data.folds", "remove data.folds, or use a model that is trained")


def _check_life_cycle(spec: Spec) -> None:
    """Raise a `UsageError` if methods change members by what others have learnt, or leave a fold without members."""
    assert spec.data.folds is not None
    changing = [method for method in spec.methods if LIFE_CYCLE_HOOKS & set(implemented_hooks(type(method)))]
    if not changing:
        return
    names, num_folds = ", ".join(f'"{method.name}"' for method in changing), spec.data.folds
    what = f"{names} decides by the outputs of all members, so that a member learns from the fold it must not see"
    rehearsal = rehearse(spec, spec.training.epochs, UsageError(what, "data.folds", REMOVE))
    if any(first % num_folds != second % num_folds for first, second in rehearsal.blended):
        what = f"{names} mixes the weights of members that are trained without different folds"
        raise UsageError(what, "data.folds", REMOVE)
    if len({index % num_folds for index in rehearsal.indices}) < num_folds:
        what = f"{names} leaves folds that every member was trained on, so that they have no out-of-fold predictions"
        raise UsageError(what, "data.folds", REMOVE)


def _check_gradients(objective: Objective, outputs: Tensor, targets: Tensor, weights: Tensor) -> None:
    """Raise a `UsageError` if a sample of weight 0 for a member changes what that member learns.

    It is tried on random outputs at several moments of training.

    Args:
        objective: of the run.
        outputs: random outputs (M, B, W).
        targets: those of the B samples.
        weights: the sample weights (B, M).
    """
    leaf = outputs.clone().requires_grad_()
    for progress in PROGRESS:
        value = objective(leaf, targets, weights, moment=Moment(progress=progress))
        (gradient,) = torch.autograd.grad(value, leaf)
        if bool((gradient[(weights == 0).T] != 0).any()):
            names = ", ".join(f'"{method.name}"' for method in objective.methods)
            what = f"with {names}, a member learns also from samples of weight 0, and so from the fold it must not see"
            raise UsageError(what, "data.folds", REMOVE)
