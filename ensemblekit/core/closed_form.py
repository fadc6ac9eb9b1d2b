"""The gradient of an objective that is linear in losses, by the loss's own formula instead of autograd.

Most objectives are a Σ_i w_i l(h_i, y) + b l(f, y) for each sample, with f the mean of the members' outputs:
independent training, bagging, GNCL's upper bound, end-to-end training. For tiny members the bookkeeping of autograd
takes longer than this arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ensemblekit.core.plugin import Method
from ensemblekit.core.verification import implemented_hooks

if TYPE_CHECKING:
    from ensemblekit.core.losses import Loss

LOSS_HOOKS = {"member_loss", "ensemble_loss", "select_members"}


def linear_terms_of(methods: Sequence[Method], loss: Loss) -> Callable[[int], tuple[float, float] | None]:
    """Return a function of M that returns the factors (a, b), or None where the hooks have to be called.

    A subclass that overrides a hook, or the formula of a loss, without overriding what depends on it is not trusted.
    """
    decisive = [method for method in methods if LOSS_HOOKS & set(implemented_hooks(type(method)))]
    combining = [method for method in methods if "combine" in implemented_hooks(type(method))]
    loss_is_known = is_up_to_date(type(loss), "value_and_gradient", ("per_sample", "__call__"))
    if not loss_is_known or len(decisive) > 1:
        return lambda num_members: None
    if not decisive:  # without a loss of the ensemble, it does not matter how outputs are combined
        return lambda num_members: (1 / num_members, 0.0)
    (method,) = decisive
    is_mean = not any(method.combines_in_training for method in combining)
    is_known = is_mean and is_up_to_date(type(method), "linear_terms", LOSS_HOOKS)
    return method.linear_terms if is_known else lambda num_members: None


def is_up_to_date(kind: type, name: str, originals: Iterable[str]) -> bool:
    """Return whether a class defines a method at least as late as all those that the method has to agree with."""

    def depth(attribute: str) -> int:
        return next((index for index, base in enumerate(kind.__mro__) if attribute in vars(base)), len(kind.__mro__))

    return all(depth(name) <= depth(original) for original in originals)


def linear_value_and_gradient(
    terms: tuple[float, float],
    loss: Loss,
    outputs: Tensor,
    target: Tensor,
    weights: Tensor | None,
    importance: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the mean of a Σ_i w_i l(h_i, y) + b l(f, y) over a batch, and its gradient.

    Args:
        terms: (a, b).
        loss: one that has a gradient of its own.
        outputs: (M, B, C).
        target: what ``loss.prepare`` returned.
        weights: sample weights (B, M), or None for 1.
        importance: how much each sample counts (B,), or None for 1.

    Returns:
        The objective (a scalar), and its gradient (M, B, C).
    """
    of_members, of_ensemble = terms
    num_members, num_samples = outputs.shape[:2]
    if of_ensemble:  # the combined output as one more row: its loss costs no operation of its own
        columns = outputs if outputs.is_contiguous() else outputs.transpose(1, 2)
        joined = torch.cat([columns, columns.mean(dim=0, keepdim=True)])
        outputs = joined if columns is outputs else joined.transpose(1, 2)
    losses, slopes = loss.value_and_gradient(outputs, target)
    value, gradient = losses[:num_members], slopes[:num_members]
    if weights is not None:
        factors = weights.T.to(outputs.dtype)
        value, gradient = value * factors, gradient * factors.unsqueeze(-1)
    value, gradient = value.sum(dim=0) * of_members, gradient * (of_members / num_samples)
    if of_ensemble:
        value.add_(losses[-1], alpha=of_ensemble)
        gradient.add_(slopes[-1], alpha=of_ensemble / (num_members * num_samples))
    if importance is not None:
        factors = importance.to(outputs.dtype)
        value, gradient = value * factors, gradient * factors.unsqueeze(-1)
    return value.mean(), gradient
