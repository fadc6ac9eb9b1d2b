"""Every extension point of ensemblekit, on one page.

A plugin implements any of these with ``@hookimpl`` and names only the arguments it needs.
M members, B samples in the batch, C outputs per sample, N samples in the training data.
`outputs` are the members' raw outputs (logits for cross-entropy), `target` is what `loss` takes
(class indices (B,), labels of 0 and 1 (B, C), or real values (B,) or (B, C)), and ``loss(outputs, target)`` is per
sample: (M, B, C) → (M, B) and (B, C) → (B,).

The objective is the mean over the batch of  importance · (ensemble_loss + Σ_m select · weight · member_loss), where
`importance` are the weights of samples and classes, 1 unless the spec or the data set has some.
With `second_inputs`, a step minimises its sum over two forward passes; `weight_penalty` adds to it.
`members` are the indices of the members in the spec, int64 (M,) on the device of `outputs`: a hook may see only some of
the members, and `num_members` is the number of all. A copy has the index of its original. `epoch` counts from 1, and
`progress` is the share of the training that is done, 0 ≤ progress < 1.
`named` are slices of the outputs by name: those that the loss declares and what models give beside their prediction.
`auxiliary` are the outputs of auxiliary networks, (A, B, K) by the name of their group.

Hooks of the objective are pure functions of tensors: same device and dtype as `outputs`, no ``.item()``,
no randomness except from a generator that is passed in. Life-cycle hooks may change the ensemble.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pluggy

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from ensemblekit.core.losses import Loss
    from ensemblekit.spec.sections import Spec

PROJECT = "ensemblekit"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

RunStatus = Literal["finished", "interrupted", "failed"]


class GrowingEnsemble(Protocol):
    """What a life-cycle hook may do to the ensemble in training."""

    def __len__(self) -> int:
        """Return the current number of members."""

    def grow(self) -> int:
        """Add a freshly initialised member at the end; returns its index."""

    def keep_copy(self, member: int) -> int:
        """Insert a frozen copy of a member just before it; returns the copy's index."""

    def freeze(self, member: int) -> None:
        """Stop training a member: its parameters and batch-norm statistics no longer change."""

    def drop(self, member: int) -> None:
        """Remove a member; the members after it move up."""

    def blend(self, member: int, other: int, share: float) -> None:
        """Move the weights and statistics of a member towards those of another: (1 - share) · own + share · other."""

    def refresh_statistics(self, member: int) -> None:
        """Compute the batch-norm statistics of a member anew from the training data, as its weights are now."""

    @property
    def targets(self) -> Tensor:
        """The training targets: class indices (N,), or real values (N, C) as the networks learn them."""

    @property
    def loss(self) -> Loss:
        """The loss of the run, which defines what outputs mean: ``loss.probabilities(outputs)``."""

    def outputs(self) -> Tensor:
        """Compute the current members' outputs (M, N, C) for the training data, in evaluation mode, not augmented."""

    @property
    def sample_weights(self) -> Tensor | None:
        """The weights (N, M) of the training samples for all members of the spec; None: all 1."""

    def set_sample_weights(self, weights: Tensor) -> None:
        """Weight the training samples from now on, (N, M) for all members of the spec."""


class MemberNoise(Protocol):
    """Random numbers of K members that are the same on every engine and when a run is resumed."""

    def __call__(self, *shape: int, fixed: bool = False) -> Tensor:
        """Sample float32 numbers in [0, 1), (K, *shape); `fixed` ones never change."""


# The objective. Where only one value can be used and several methods return one (something other than None), that of
# the method listed last counts; the defaults are used if no method returns a value.


@hookspec(firstresult=True)
def combine(
    outputs: Tensor,
    num_members: int,
    fitted: Tensor | None,
    loss: Loss,
    members: Tensor,
    named: Mapping[str, Tensor],
    auxiliary: Mapping[str, Tensor],
) -> Tensor | None:
    """Combine the members' outputs, (M, B, C) → (B, C). Called in every step and prediction. Default: the mean.

    `fitted` is what this plugin's `fit_combiner` returned; None during training, when nothing is fitted yet.
    """


@hookspec(firstresult=True)
def fit_combiner(
    outputs: Tensor,
    target: Tensor,
    loss: Loss,
    num_members: int,
    members: Tensor,
    named: Mapping[str, Tensor],
    auxiliary: Mapping[str, Tensor],
) -> Tensor | None:
    """Fit the parameters of `combine` on validation data, (M, N, C) → a floating-point tensor of any shape.

    Called before every evaluation and at the end of the run, with the outputs for the validation data. The tensor
    returned last is saved with the model. The hook may read values back from the device. Default: None, nothing is
    fitted.
    """


@hookspec(firstresult=True)
def member_loss(
    outputs: Tensor,
    combined: Tensor,
    target: Tensor,
    loss: Loss,
    num_members: int,
    members: Tensor,
    named: Mapping[str, Tensor],
    auxiliary: Mapping[str, Tensor],
    epoch: int,
    num_epochs: int,
    progress: float,
) -> Tensor | None:
    """Return the loss of each member on each sample, (M, B). Called in every step.

    Default: loss(outputs, target) / M.
    """


@hookspec(firstresult=True)
def ensemble_loss(
    outputs: Tensor,
    combined: Tensor,
    target: Tensor,
    loss: Loss,
    num_members: int,
    members: Tensor,
    named: Mapping[str, Tensor],
    auxiliary: Mapping[str, Tensor],
    epoch: int,
    num_epochs: int,
    progress: float,
) -> Tensor | None:
    """Return the loss of the ensemble as a whole on each sample, (B,). Called in every step.

    Default: None, there is no such loss.
    """


@hookspec(firstresult=True)
def second_inputs(inputs: Tensor, gradient: Tensor) -> Tensor | None:
    """Return inputs for a second forward pass, such as adversarial ones, (…, B, *input_shape) → the same shape.

    Called in every step between its two passes, with `gradient` = d objective / d inputs of one member, or of K
    members at once with a leading K: compute it element by element. The step minimises the objective of the outputs
    for `inputs` plus that of the outputs for the second inputs, which differ from member to member; no gradient flows
    through their construction. A frozen member sees `inputs` in both passes. Default: there is no second pass; a
    method that implements the hook must return a tensor.
    """


@hookspec(firstresult=True)
def second_weights(weights: Tensor, gradient: Tensor) -> Tensor | None:
    """Return other weights at which the gradient of the step is taken, (K, P) → (K, P); see SAM.

    Called in every step with the learned parameters of K members, each flattened to P numbers, and the gradient of the
    objective there. The members are then computed again with the weights that the hook returns; the gradient there
    updates the original weights. Random numbers and batch-norm statistics are those of the first pass. Default: there
    is no second pass. It cannot be combined with `second_inputs`.
    """


@hookspec(firstresult=True)
def member_inputs(inputs: Tensor, members: Tensor, uniform: MemberNoise, training: bool) -> Tensor | None:
    """Return the view that each of K members has of a batch, (B, *input_shape) → (K, B, *input_shape).

    Called in every step and prediction, `training` says which. ``uniform(*shape)`` samples numbers in [0, 1), float32
    (K, *shape) on the device, which depend on the member and, in training, on the step; with ``fixed=True`` on the
    member alone. In predictions the numbers are always the same. Default: all members see the batch as it is.
    """


# The values of several methods for weight_penalty are added.


@hookspec
def weight_penalty(
    weights: Tensor,
    start: Tensor,
    members: Tensor,
    num_members: int,
    num_samples: int,
    epoch: int,
    num_epochs: int,
    progress: float,
) -> Tensor | None:
    """Return a penalty of the weights of K members, (K, P) → (K,). Called in every step. Default: none.

    `weights` are the learned parameters of each member, flattened to P numbers, `start` those that it began with, and
    `num_samples` is the number of training samples, N. Its gradient is added in the update, after `clip_norm`; the
    reported objective does not contain it.
    """


# The values of several methods for sample_weights and for select_members are multiplied.


@hookspec
def sample_weights(num_samples: int, num_members: int, generator: Generator, targets: Tensor | None) -> Tensor | None:
    """Return the weight of each training sample for each member, (N, M). Called once per run. Default: None, all 1.

    `generator` is derived from the run's seed. Sample member by member, so that a member's weights
    do not depend on the number of members. `targets` are the training targets on the CPU, as the networks learn them:
    class indices (N,), or real values (N, C); in a run they are never None.
    """


@hookspec
def select_members(
    outputs: Tensor,
    combined: Tensor,
    target: Tensor,
    loss: Loss,
    num_members: int,
    members: Tensor,
    named: Mapping[str, Tensor],
    auxiliary: Mapping[str, Tensor],
    epoch: int,
    num_epochs: int,
    progress: float,
) -> Tensor | None:
    """Return which member learns from which sample: a mask that broadcasts to (M, B). Called in every step.

    The mask is boolean or floating-point. Default: None, every member learns from every sample.
    """


# The life cycle. Epochs are counted from 1. Where only one value can be used, that of the method listed last counts.


@hookspec(firstresult=True)
def members_at_start(num_members: int) -> int | None:
    """Return how many of the spec's members exist when training starts. Called once per run. Default: all of them.

    A method that starts with fewer adds the others in `epoch_started`.
    """


@hookspec(firstresult=True)
def passes(num_members: int) -> int | None:
    """Return the number of stochastic forward passes per network in a prediction, S (Monte-Carlo dropout).

    Called once per run and when its ensemble is loaded; `num_members` is the number in the spec. A pass uses the same
    random numbers for all samples. The outputs of all passes count as those of S · M members, the first pass first.
    `combine` sees the M outputs of one pass, and the mean of its results is the ensemble's output; `fit_combiner`
    sees the means over the passes. Training does not change. Default: None, one deterministic pass.
    """


@hookspec(firstresult=True)
def learning_rate(base: float, epoch: float, num_epochs: int) -> float | None:
    """Return the learning rate after `epoch` (0 ≤ epoch < num_epochs, with fractions) epochs of training.

    Called before every step. Default: None, `base` times the factor of the spec's schedule.
    """


@hookspec
def run_started(spec: Spec, path: Path, plan: Sequence[tuple[str, str]]) -> None:
    """Announce a run, new or resumed. Called once, before anything is trained.

    `path` is the run directory and exists; `plan` are the rows that describe the run, each a label and a text.
    """


@hookspec
def engine_chosen(engine: str, seconds_per_step: Mapping[str, float]) -> None:
    """Announce the engine of the run. Called once, after `run_started`.

    `seconds_per_step` has the engines that were measured; it is empty if the spec names the engine.
    """


@hookspec
def epoch_started(ensemble: GrowingEnsemble, epoch: int, num_epochs: int, num_members: int, num_steps: int) -> None:
    """Prepare an epoch; may change the members and their sample weights. Called before the first step of each epoch.

    `num_members` is the number in the spec, ``len(ensemble)`` the current one.
    """


@hookspec
def epoch_trained(ensemble: GrowingEnsemble, epoch: int, num_epochs: int, num_members: int, num_steps: int) -> None:
    """Change the ensemble, as `epoch_started` may. Called after the last step of each epoch, before its evaluation."""


@hookspec
def step_finished(
    epoch: int, step: int, num_steps: int, num_samples: int, objective: Tensor, learning_rate: float
) -> None:
    """Follow the steps of training. Called after every step, counted from 1 within its epoch.

    `objective` is a scalar on the device: reading its value waits for the device, so read it seldom.
    """


@hookspec
def epoch_finished(epoch: int, num_epochs: int, metrics: Mapping[str, Any]) -> None:
    """Log an epoch. Called after its evaluation, with the line that is written to metrics.jsonl."""


@hookspec
def checkpoint_saved(epoch: int, step: int, path: Path) -> None:
    """Announce a checkpoint. Called when it is on the disk; epoch 0 is the start. `path` is the run directory.

    `step` is 0, or inside a long epoch the number of finished steps after `epoch` finished epochs.
    """


@hookspec
def notice(text: str) -> None:
    """Pass on what a user should know although it is no error, such as a damaged checkpoint that was skipped.

    Called at any time between `run_started` and `run_ended`. The display prints it, and the run keeps it.
    """


@hookspec
def run_finished(metrics: Mapping[str, Any]) -> None:
    """Log the final metrics. Called once, only if the run has finished; see `run_ended` for all ways to end."""


@hookspec
def run_ended(
    status: RunStatus,
    metrics: Mapping[str, Any],
    members: Sequence[Mapping[str, Any]],
    seconds: Mapping[str, float],
    error: BaseException | None,
) -> None:
    """Close a logger. Called once per `run_started`, however the run ends: "finished", "interrupted" or "failed".

    `metrics` and `members` (those of each member) are the final ones on the test data, empty unless finished;
    `seconds` says what the time was spent on; `error` is what ended the run, None if it has finished.
    """
