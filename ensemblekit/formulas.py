"""The maths in Python: objective, decomposition and metrics of given outputs, and single members, by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ensemblekit.core import decomposition, metrics
from ensemblekit.core.decomposition import Decomposition
from ensemblekit.core.errors import NumericError, UsageError
from ensemblekit.core.losses import DEFAULT_LOSSES, Loss
from ensemblekit.core.objective import Objective
from ensemblekit.core.plugin import Method, Model
from ensemblekit.members.build import build_member
from ensemblekit.members.python_model import ModelLike
from ensemblekit.members.python_specs import registry_of
from ensemblekit.spec.reader import build_plugin
from ensemblekit.spec.sections import DEFAULT_LOSS

MethodLike = Method | str | Mapping[str, Any]
LossLike = Loss | str | Mapping[str, Any]


def objective(
    method: MethodLike | Sequence[MethodLike],
    outputs: Tensor,
    target: Tensor,
    loss: LossLike = DEFAULT_LOSS,
    sample_weights: Tensor | None = None,
) -> Tensor:
    """Compute the objective of a method, or of several composed methods.

    Args:
        method: a method, its name or its table, or a list of these.
        outputs: the members' raw outputs (M, B, C).
        target: class indices (B,) or real values (B,) or (B, C).
        loss: the loss that the method builds on, its name or its table.
        sample_weights: weights (B, M) of the samples of this batch. Default: 1, also for methods that sample weights
            in training (see `draw_sample_weights`).

    Returns:
        A scalar that can be differentiated.

    Raises:
        DataError: outputs, targets or weights do not fit.
        NumericError: the objective is not finite.
        UsageError: a method needs the outputs of auxiliary networks too.
    """
    run_objective = _objective(method, loss)
    _refuse_auxiliary(run_objective)
    if not outputs.is_meta:
        run_objective.loss.check_values(outputs, target)
    value = run_objective(outputs, target, sample_weights)
    if not outputs.is_meta and not bool(value.isfinite()):
        run_objective.check_finite(outputs, target)
        raise NumericError("the objective is not finite", fix="scale the outputs down, or use float64")
    return value


def _refuse_auxiliary(run_objective: Objective) -> None:
    for method in run_objective.methods:
        for name in method.required_groups():
            what = f'"{method.name}" needs the outputs of the auxiliary group "{name}" beside those of the members'
            raise UsageError(what, "objective", "train a spec with that group, or call the hooks of the method")


def draw_sample_weights(
    method: MethodLike | Sequence[MethodLike],
    num_samples: int,
    num_members: int,
    seed: int = 0,
    targets: Tensor | None = None,
) -> Tensor | None:
    """Sample the weights (N, M) that a run of these methods with this seed would use; None if all are 1.

    Args:
        method: a method, its name or its table, or a list of these.
        num_samples: number of training samples, N.
        num_members: number of members, M.
        seed: seed of the run.
        targets: the training targets, class indices (N,) or real values (N, C), for methods that use them.
    """
    return _objective(method, DEFAULT_LOSS).hooks.sample_weights(num_samples, num_members, seed, targets)


def decompose(outputs: Tensor, target: Tensor, loss: LossLike = DEFAULT_LOSS) -> Decomposition:
    """Decompose the loss of the mean output into mean member loss, diversity and remainder, for any loss.

    Args:
        outputs: the members' raw outputs (M, B, C).
        target: class indices (B,) or real values (B,) or (B, C).
        loss: the loss, its name or its table.

    Raises:
        UsageError: the loss is not twice differentiable, so that it has no diversity.
    """
    chosen = _loss(loss)
    if not chosen.twice_differentiable:
        what = f'the loss "{chosen.name}" is not twice differentiable, and the diversity is a second derivative'
        raise UsageError(what, "decompose", "use another loss")
    chosen.check_values(outputs, target)
    return decomposition.decompose(outputs, target, chosen)


def evaluate(outputs: Tensor, target: Tensor, loss: LossLike | None = None) -> dict[str, float]:
    """Compute metrics of member outputs: accuracy, calibration, diversity … or, for real targets, MSE, R² …

    Args:
        outputs: the members' raw outputs (M, N, C).
        target: class indices (N,), labels of 0 and 1 (N, C), or real values (N,) or (N, C).
        loss: the loss. Default: cross-entropy for class indices, binary cross-entropy for integers or booleans (N, C),
            the squared error for real targets.

    Returns:
        The metrics by name, as the documentation defines them, without the prefix of a split.

    Raises:
        NumericError: an output is not finite.
    """
    chosen = _loss(loss or _default_loss(target))
    chosen.check_values(outputs, target)
    return metrics.evaluate(outputs, target, chosen)


def _default_loss(target: Tensor) -> str:
    if target.is_floating_point():
        return DEFAULT_LOSSES["regression"]
    return DEFAULT_LOSSES["multilabel" if target.ndim == 2 and target.shape[1] > 1 else "classification"]


def build_model(
    spec: ModelLike,
    input_shape: Sequence[int],
    num_outputs: int,
    seed: int = 0,
    categories: Sequence[tuple[int, int]] = (),
) -> nn.Module:
    """Build one member, (B, *input_shape) → (B, num_outputs), on the CPU: the first of an ensemble with this seed.

    Args:
        spec: the model, its name or its table.
        input_shape: shape of one input, without the batch dimension.
        num_outputs: outputs per sample.
        seed: determines the initial weights; torch's global random generator is not used.
        categories: (first input, number) of each block of inputs that are one-hot categories of one column of a table,
            for models that embed them.
    """
    model = spec if isinstance(spec, Model) else build_plugin(Model, spec, registry_of())
    return build_member(model, tuple(input_shape), num_outputs, seed, 0, categories=tuple(categories))


def _objective(method: MethodLike | Sequence[MethodLike], loss: LossLike) -> Objective:
    listed = method if isinstance(method, Sequence) and not isinstance(method, str) else [method]
    methods = [entry if isinstance(entry, Method) else build_plugin(Method, entry, registry_of()) for entry in listed]
    return Objective(methods, _loss(loss))


def _loss(loss: LossLike) -> Loss:
    return loss if isinstance(loss, Loss) else build_plugin(Loss, loss, registry_of())
