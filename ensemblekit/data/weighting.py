"""How much each training sample counts in the objective: weights of the data set, and weights of classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ensemblekit.core.dataset import Dataset
from ensemblekit.core.errors import PluginError, SpecError, UsageError
from ensemblekit.spec.checks import class_weight_problems

if TYPE_CHECKING:
    from ensemblekit.data.loading import Data

ClassWeights = Literal["balanced"] | Sequence[float]


def train_importance(weights: Tensor | None, indices: Tensor, dataset: Dataset) -> Tensor | None:
    """Return the importance (N,) of the training samples that are left after others were held out or left out.

    Args:
        weights: those of all training samples, as `Splits.weights`.
        indices: which of them are left.
        dataset: whose they are, for errors.

    Raises:
        PluginError: they are not weights, or not one for each sample.
    """
    if weights is None:
        return None
    fits = weights.ndim == 1 and weights.is_floating_point() and len(weights) > int(indices.max())
    if not fits or not bool((weights.isfinite() & (weights >= 0)).all()):
        what = f"load() returned weights that cannot be used: {tuple(weights.shape)}"
        fix = "return one finite weight of at least 0 for each training sample, floating (N,)"
        raise PluginError(what, f'data set "{dataset.name}"', fix, plugin=dataset.name)
    return _normalised(weights[indices.to(weights.device)], f'data set "{dataset.name}"')


def weighted_by_class(data: Data, class_weights: ClassWeights | None) -> Data:
    """Return the data with training samples that count by their class, beside the weights that they have already.

    Args:
        data: the data.
        class_weights: one weight for each class, or "balanced": all classes have the same sum of weights, so that the
            weight of one of K classes with n of N samples is N / (K n). None: classes do not matter.

    Raises:
        SpecError: the task is not classification, or there is not one weight for each class.
    """
    if class_weights is None:
        return data
    if problems := list(class_weight_problems(class_weights, data.info)):
        raise SpecError(problems, "the spec and the data")
    targets, given = data.train.targets, data.train.importance
    own = torch.ones(len(targets), device=targets.device) if given is None else given
    if isinstance(class_weights, str):
        sums = targets.bincount(own.double())
        by_class = sums.sum() / (sums > 0).sum() / sums
    else:
        by_class = torch.tensor(class_weights, dtype=torch.float64, device=targets.device)
    importance = _normalised(own.double() * by_class[targets], "training.class_weights")
    return replace(data, train=replace(data.train, importance=importance))


def _normalised(weights: Tensor, where: str) -> Tensor:
    """Return weights whose mean is 1, in float32: the learning rate then means the same as without weights."""
    mean = weights.double().mean()
    if not bool(mean > 0):
        raise UsageError("all training samples have weight 0", where, "give some of them more")
    return (weights.double() / mean).float()
