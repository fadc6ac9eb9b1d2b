"""Every extension point of ensemblekit, on one page.

A plugin implements any of these with ``@hookimpl`` and names only the arguments it needs.
M members, B samples in the batch, C outputs per sample, N samples in the training data.
`outputs` are the members' raw outputs (logits for cross-entropy), `target` is what `loss` takes
(class indices (B,), or real values (B,) or (B, C)), and ``loss(outputs, target)`` is per sample:
(M, B, C) → (M, B) and (B, C) → (B,).

The objective is the mean over the batch of  ensemble_loss + Σ_m select · weight · member_loss.
With `second_inputs`, a step minimises its sum over two passes.

Hooks of the objective are pure functions of tensors: same device and dtype as `outputs`, no ``.item()``,
no randomness but from a given generator. What changes the ensemble is a life-cycle hook.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from ensemblekit.core.losses import Loss

PROJECT = "ensemblekit"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class GrowingEnsemble(Protocol):
    """What a life-cycle hook may do to the ensemble in training."""

    def __len__(self) -> int:
        """The number of members it has now."""

    def grow(self) -> int:
        """Add a freshly initialised member at the end; returns its index."""

    def keep_copy(self, member: int) -> int:
        """Insert a frozen copy of a member just before it; returns the copy's index."""

    def freeze(self, member: int) -> None:
        """Stop a member from learning: its parameters and statistics stay as they are."""


# The objective. Where there can be only one answer, of several methods the last listed one that answers (returns
# something other than None) wins; the defaults answer when no method does.


@hookspec(firstresult=True)
def combine(outputs: Tensor, num_members: int, fitted: Tensor | None) -> Tensor | None:
    """Join the members' outputs, (M, B, C) → (B, C). Called in every step and prediction. Default: the mean.

    `fitted` is what `fit_combiner` answered; None in training, where nothing is fitted.
    """


@hookspec(firstresult=True)
def fit_combiner(outputs: Tensor, target: Tensor, loss: Loss, num_members: int) -> Tensor | None:
    """Learn from held-out data what `combine` needs, (M, N, C) → a floating-point tensor of any shape on their device.

    Called before every evaluation and at the end of the run, with the outputs for the validation data. What it
    returned last is saved with the model. It may read values back. Default: nothing is fitted (None).
    """


@hookspec(firstresult=True)
def member_loss(outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss, num_members: int) -> Tensor | None:
    """What each member pays on each sample, → (M, B). Called in every step. Default: loss(outputs, target) / M."""


@hookspec(firstresult=True)
def ensemble_loss(outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss, num_members: int) -> Tensor | None:
    """What the ensemble as a whole pays on each sample, → (B,). Called in every step. Default: nothing (None)."""


@hookspec(firstresult=True)
def second_inputs(inputs: Tensor, gradient: Tensor) -> Tensor | None:
    """Inputs near those of the batch that a member learns from as well, (…, B, *input_shape) → the same shape.

    Called in every step between its two passes, with `gradient` = d objective / d inputs of one member, or of K
    members at once with a leading K: answer element by element. The step's objective is that of the outputs for
    `inputs` plus that of the outputs for the answers, each member's its own; no gradient flows through how they were
    made. A member that no longer learns gets `inputs` in both passes. Default: there is no second pass; a method that
    implements the hook must answer.
    """


# Answers of several methods to sample_weights and to select_members are multiplied.


@hookspec
def sample_weights(num_samples: int, num_members: int, generator: Generator) -> Tensor | None:
    """How much each training sample counts for each member, → (N, M). Called once per run. Default: 1 (None).

    `generator` is derived from the run's seed. Draw member by member, so that a member's weights
    do not depend on how many others there are.
    """


@hookspec
def select_members(outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss, num_members: int) -> Tensor | None:
    """Who learns from which sample, → a mask that broadcasts to (M, B). Called in every step. Default: all (None)."""


# The life cycle. Epochs are counted from 1.


@hookspec(firstresult=True)
def members_at_start(num_members: int) -> int | None:
    """How many of the spec's members exist when training starts. Called once per run. Default: all of them.

    The last listed method that answers wins. A method that answers adds the others in `epoch_started`.
    """


@hookspec(firstresult=True)
def passes(num_members: int) -> int | None:
    """How many passes each network makes in a prediction, S, each with random numbers of its own.

    Called once per run and when its ensemble is loaded; `num_members` is what the spec asks for. The numbers of a pass
    are alike for all samples. The outputs of all passes count as those of S · M members, those of the first pass
    first. `combine` gets the M outputs of each pass, and the mean of its answers is the ensemble's output;
    `fit_combiner` gets the means over the passes. Training is not concerned. The last listed method that answers wins.
    Default: one pass without any random numbers (None).
    """


@hookspec(firstresult=True)
def learning_rate(base: float, epoch: float, num_epochs: int) -> float | None:
    """The learning rate after `epoch` (0 ≤ epoch < num_epochs, with fractions) epochs of training.

    Called before every step. Default: `base` as changed by the spec's schedule. The last listed answer wins.
    """


@hookspec
def epoch_started(ensemble: GrowingEnsemble, epoch: int, num_epochs: int, num_members: int) -> None:
    """Called before the first step of each epoch, on every method and extension; may grow or freeze members.

    `num_members` is what the spec asks for, ``len(ensemble)`` what there is now.
    """


@hookspec
def epoch_finished(epoch: int, num_epochs: int, metrics: Mapping[str, Any]) -> None:
    """Called after each epoch's evaluation, with the line that is written to metrics.jsonl; for loggers."""


@hookspec
def run_finished(metrics: Mapping[str, Any]) -> None:
    """Called once when training has ended, with the final metrics; for loggers."""
