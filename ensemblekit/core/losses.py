"""Per-sample losses. Each is a plugin of the group `ensemblekit.losses`, and anyone can add one.

A loss maps outputs (..., B, C) and a target for each of the B samples to (..., B), never reduced. It must
treat samples independently, because the diversity term takes its second directional derivative.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad, jvp

from ensemblekit.core import kernels
from ensemblekit.core.dataset import DataInfo
from ensemblekit.core.errors import DataError, Problem
from ensemblekit.core.plugin import PREDICTED, Plugin, Task

if TYPE_CHECKING:
    from ensemblekit.spec.sections import Spec

FEW_CLASSES = 32
"""For fewer classes a softmax is several times as fast if samples, not classes, are contiguous in memory."""
SUM_TOLERANCE = 0.01
"""How far a sum of probabilities may be from 1: about the rounding of bfloat16."""
DEFAULT_LOSSES: dict[Task, str] = {"classification": "cross_entropy", "multilabel": "bce", "regression": "mse"}
"""The default loss of each task."""
_TASKS: dict[str, tuple[Task, ...]] = {"values": ("classification", "regression"), "labels": ("multilabel",)}
"""The tasks of losses that do not say theirs, by what they take; the others are for classification."""


class Loss(Plugin):
    """A per-sample loss: implement `per_sample`, and `prepare` if targets are not class indices."""

    kind = "loss"
    takes: ClassVar[Literal["logits", "probabilities", "values", "margins", "labels"]] = "logits"
    """How the network's outputs are interpreted; "labels": as logits of labels that do not exclude each other."""
    tasks: ClassVar[tuple[Task, ...] | None] = None
    """The tasks that it can be used for. None: real values and classes if it takes values, else as `takes` says."""
    twice_differentiable: ClassVar[bool] = True
    """Whether exact GNCL and the decomposition may use it."""
    grows_quadratically: ClassVar[bool] = False
    """Whether it grows at least quadratically in every direction, so that exact GNCL cannot outgrow it."""

    @abstractmethod
    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Compute the loss (..., B) of outputs (..., B, C); `target` is what `prepare` returned."""

    def prepare(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Convert the target to the form that `per_sample` takes.

        Default: class indices (B,); if it takes values or labels, real values (B, T), as many as `point` has.
        """
        if self.takes in ("values", "labels"):
            return real_values(self.point(outputs), target, self.name)
        return class_indices(outputs, target, self.name)

    def __call__(self, outputs: Tensor, target: Tensor) -> Tensor:
        return self.per_sample(outputs, self.prepare(outputs, target))

    def value_and_gradient(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss (..., B) and its gradient with respect to the outputs (..., B, C); a new tensor.

        Override it if there is a formula: training steps then do without autograd where the method allows it.
        """
        leaf = outputs.detach().requires_grad_()
        with torch.enable_grad():
            losses = self.per_sample(leaf, target)
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach(), gradient

    def quadratic_form(self, at: Tensor, target: Tensor, direction: Tensor) -> Tensor:
        """Compute dᵀ D d (..., B) with D the Hessian of the loss at `at` (B, C) and d a row of `direction` (..., B, C).

        This is the second derivative along d, so two nested derivatives give it for any loss with memory proportional
        to the size of `direction`; D is never built. Forward derivatives are cheaper; reverse ones are used for the
        few functions of torch that have no forward rule.
        """
        _load_forward_rules()
        prepared = self.prepare(at, target)
        # forward derivatives do not accept tensors whose elements share memory
        start, direction = at.expand_as(direction).contiguous(), direction.contiguous()

        def value(point: Tensor) -> Tensor:
            return self.per_sample(point, prepared)

        try:
            curvature: Tensor = jvp(lambda point: jvp(value, (point,), (direction,))[1], (start,), (direction,))[1]
        except NotImplementedError:
            slope = grad(lambda point: value(point).sum())
            curvature = (grad(lambda point: (slope(point) * direction).sum())(start) * direction).sum(dim=-1)
        return curvature

    def third_derivative_bound(self, start: Tensor, end: Tensor, target: Tensor) -> Tensor | None:
        """Bound every entry of the third derivative between `start` and `end`, (..., B); None if no bound is known."""
        return None

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Convert outputs (..., C) of a network trained with this loss to class probabilities (..., K)."""
        return outputs.softmax(dim=-1)

    def log_probabilities(self, outputs: Tensor) -> Tensor:
        """Compute the logarithm of `probabilities`, also where these are too small for the dtype.

        Override it together with `probabilities` if there is a formula that does not underflow.
        """
        if type(self).probabilities is Loss.probabilities:
            return outputs.log_softmax(dim=-1)
        return self.probabilities(outputs).log()

    def from_probabilities(self, probabilities: Tensor) -> Tensor:
        """Return outputs (..., C) that mean these class probabilities (..., K): the inverse of `probabilities`."""
        return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()

    def num_outputs(self, info: DataInfo) -> int:
        """Return the number of outputs that a network needs for this data."""
        return 1 if self.takes == "margins" else info.num_outputs

    def slices(self, num_outputs: int) -> Mapping[str, int]:
        """Return the names and sizes of parts of the outputs, such as a mean and a variance, for `named`.

        The sizes add up to `num_outputs`, which is what the method of that name has returned.
        """
        return {}

    def point(self, outputs: Tensor) -> Tensor:
        """Return the prediction of each target (..., T) that outputs (..., C) mean. Default: the outputs themselves."""
        return outputs

    def rescale(self, outputs: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """Convert the outputs of a regression to other units of the targets.

        Args:
            outputs: (..., C).
            convert: converts values of the targets (..., T); affine. Default: every output is such a value.
        """
        return convert(outputs)

    def mixture(self, outputs: Tensor) -> Tensor:
        """Combine outputs (M, ..., C) of several members in predictions, where no method or combiner does.

        Default: the mean. The objective of training always takes the mean, unless a method combines.
        """
        return outputs.mean(dim=0)

    def intervals(self, outputs: Tensor) -> Mapping[str, Tensor]:
        """Return what outputs (..., C) say about each target beside `point`: values (..., T) by their name.

        Predictions show them as columns of these names. Default: nothing.
        """
        return {}

    def metrics(self, combined: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        """Return metrics that only outputs with this meaning have, by name: numbers.

        Args:
            combined: the ensemble's output (N, C), float64, in the original units of the targets.
            target: what `prepare` returned for targets in the same units.
        """
        return {}

    def check_values(self, outputs: Tensor, target: Tensor) -> None:
        """Raise a `DataError` if a target is out of range; reads the values, so not for the training step."""
        if not target.is_floating_point() and target.ndim == 1 and outputs.shape[-1] > 1 and target.numel():
            low, high = int(target.min()), int(target.max())
            if low < 0 or high >= outputs.shape[-1]:
                raise DataError(
                    f"class indices run from {low} to {high}, but there are {outputs.shape[-1]} outputs",
                    f'target of the loss "{self.name}"',
                    f"give indices from 0 to {outputs.shape[-1] - 1}",
                )

    def output_problem(self, outputs: Tensor) -> str | None:
        """Return why outputs (..., C) are not what this loss takes; None if they are, or if any number is fine."""
        return None

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        for name, model in {model.name: model for model in spec.member_models}.items():
            if self.takes == "probabilities" and not model.gives_probabilities():
                option = "set model.softmax = true" if "softmax" in type(model).model_fields else "use another model"
                what = f'"{self.name}" takes probabilities, but the outputs of the model "{name}" are raw values'
                yield Problem("", what, f'{option}, or use loss = "cross_entropy"')
            if self.takes in ("logits", "margins") and model.gives_probabilities():
                what = f'"{self.name}" takes raw outputs, but those of the model "{name}" are probabilities'
                yield Problem("", what, 'remove the softmax, or use loss = "nll"')
        if spec.data.info is None and spec.data.known_task is not None:
            yield from self._check_task(spec, spec.data.known_task)

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        if info.task != "classification" and any(model.gives_probabilities() for model in spec.member_models):
            what = f'the outputs are probabilities, but the task of "{spec.data.name}" is {info.task}'
            yield Problem("/model", what, "use a model without a softmax")
        yield from self._check_task(spec, info.task)
        if info.task == "classification" and self.takes == "margins" and info.num_outputs != 2:
            what = f'"{self.name}" is a loss for two classes, but "{spec.data.name}" has {info.num_outputs}'
            yield Problem("", what, 'use loss = "cross_entropy"')
        if info.task == "regression" and self.takes == "values":
            num_outputs = self.num_outputs(info)
            num_values = self.point(torch.zeros(1, num_outputs)).shape[-1]
            if num_values != info.num_outputs:
                what = f'the point prediction of "{self.name}" from {num_outputs} outputs has {num_values} values, '
                what += f'but the targets of "{spec.data.name}" have {info.num_outputs}'
                yield Problem("", what, "let point() of the loss return one value for each target")

    def _check_task(self, spec: Spec, task: Task) -> Iterable[Problem]:
        tasks = self.tasks or _TASKS.get(self.takes, ("classification",))
        if task not in tasks:
            what = f'"{self.name}" is a loss for {PREDICTED[tasks[0]]}, but the task of "{spec.data.name}" is {task}'
            yield Problem("", what, f'use loss = "{DEFAULT_LOSSES[task]}"')


class MSE(Loss):
    """Half the squared distance between the outputs and the target (one-hot for classes)."""

    formula = "l(z, y) = 1/2 ||z - y||^2"
    takes = "values"
    grows_quadratically = True

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        return 0.5 * (outputs - target).square().sum(dim=-1)

    def value_and_gradient(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.per_sample(outputs, target), outputs - target

    def quadratic_form(self, at: Tensor, target: Tensor, direction: Tensor) -> Tensor:
        return direction.square().sum(dim=-1)  # the Hessian is the identity

    def third_derivative_bound(self, start: Tensor, end: Tensor, target: Tensor) -> Tensor:
        return end.new_zeros(end.shape[:-1])

    def probabilities(self, outputs: Tensor) -> Tensor:
        # The minimiser of the squared error to one-hot targets is the class probability itself.
        positive = outputs.clamp_min(torch.finfo(outputs.dtype).tiny)
        return positive / positive.sum(dim=-1, keepdim=True)

    def from_probabilities(self, probabilities: Tensor) -> Tensor:
        return probabilities


class NLL(Loss):
    """Negative log-likelihood of outputs that already are probabilities."""

    formula = "l(z, y) = - sum_c y_c log z_c, z probabilities"
    takes = "probabilities"

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        return -pick(outputs, target).log()

    def output_problem(self, outputs: Tensor) -> str | None:
        outputs = outputs.detach()
        sums, smallest = outputs.sum(dim=-1), float(outputs.min())
        if smallest >= 0 and bool(((sums - 1).abs() <= SUM_TOLERANCE).all()):
            return None
        return (
            f"the outputs are not probabilities: the smallest is {smallest:.4g}, "
            f"and the sums over classes run from {float(sums.min()):.4g} to {float(sums.max()):.4g}"
        )

    def check_values(self, outputs: Tensor, target: Tensor) -> None:
        if problem := self.output_problem(outputs):
            raise DataError(problem, f'the loss "{self.name}"', 'apply a softmax, or use the loss "cross_entropy"')
        super().check_values(outputs, target)

    def quadratic_form(self, at: Tensor, target: Tensor, direction: Tensor) -> Tensor:
        index = self.prepare(at, target)
        return (pick(direction, index) / pick(at, index)).square()

    def third_derivative_bound(self, start: Tensor, end: Tensor, target: Tensor) -> Tensor:
        index = self.prepare(end, target)
        # 2 / z_c^3 is largest where z_c is smallest, which on a segment is at one of its ends
        return 2 / torch.minimum(pick(start, index), pick(end, index)) ** 3

    def probabilities(self, outputs: Tensor) -> Tensor:
        return outputs

    def from_probabilities(self, probabilities: Tensor) -> Tensor:
        return probabilities


class CrossEntropy(Loss):
    """Negative log-likelihood of the softmax of the outputs: the usual loss for classes."""

    formula = "l(z, y) = - sum_c y_c log softmax(z)_c"

    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="share of each target that is spread evenly over all classes"
    )

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        return self._of_logs(_log_softmax(outputs), target)

    def value_and_gradient(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        if not self.label_smoothing and (found := kernels.cross_entropy(outputs, target)) is not None:
            return found
        logs = _log_softmax(outputs)
        index = target.expand(logs.shape[:-1]).unsqueeze(-1)
        of_target = logs.gather(-1, index)
        smoothing = self.label_smoothing
        # q_c - 1 for the true class without cancellation
        slopes = logs.exp().scatter_(-1, index, of_target.expm1())
        if not smoothing:
            return of_target.squeeze(-1).neg_(), slopes
        evenly = smoothing / outputs.shape[-1]
        slopes = slopes.sub_(evenly).scatter_add_(-1, index, torch.full_like(of_target, smoothing))
        return self._of_logs(logs, target), slopes

    def _of_logs(self, logs: Tensor, target: Tensor) -> Tensor:
        if not self.label_smoothing:
            return -pick(logs, target)
        return -(1 - self.label_smoothing) * pick(logs, target) - self.label_smoothing * logs.mean(dim=-1)

    def quadratic_form(self, at: Tensor, target: Tensor, direction: Tensor) -> Tensor:
        # dᵀ(diag(q) - qqᵀ)d is the variance of d under q, written so that it cannot turn negative
        q = at.softmax(dim=-1)
        mean = (q * direction).sum(dim=-1, keepdim=True)
        return (q * (direction - mean).square()).sum(dim=-1)

    def third_derivative_bound(self, start: Tensor, end: Tensor, target: Tensor) -> Tensor:
        # q(1-q)(1-2q) at q = 1/2 ± √3/6; the paper's 1/27 is too small
        return end.new_full(end.shape[:-1], 1 / (6 * math.sqrt(3)))


class _MarginLoss(Loss):
    """A loss of one output z and a target y of -1 or +1."""

    takes = "margins"

    def prepare(self, outputs: Tensor, target: Tensor) -> Tensor:
        return signs(outputs, target, self.name)

    def check_values(self, outputs: Tensor, target: Tensor) -> None:
        values = set(target.unique().tolist())
        if not (values <= {-1, 1} or values <= {0, 1}):
            raise DataError(
                f"targets are {sorted(values)[:5]}",
                f'target of the loss "{self.name}"',
                "give -1 and +1, or the class indices 0 and 1",
            )


class Exponential(_MarginLoss):
    """The exponential loss of AdaBoost, for two classes and one output."""

    formula = "l(z, y) = exp(-z y), y = -1 or +1"

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (-outputs.squeeze(-1) * target).exp()

    def third_derivative_bound(self, start: Tensor, end: Tensor, target: Tensor) -> Tensor:
        # |l'''| = exp(-zy) is monotone in z, so largest at one end of the segment
        return torch.maximum(self(start, target), self(end, target))

    def probabilities(self, outputs: Tensor) -> Tensor:
        return two_classes(torch.sigmoid(2 * outputs))  # Friedman, Hastie and Tibshirani 2000

    def log_probabilities(self, outputs: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(torch.cat([-2 * outputs, 2 * outputs], dim=-1))

    def from_probabilities(self, probabilities: Tensor) -> Tensor:
        return inner_probabilities(probabilities[..., 1:]).logit() / 2


class GaussianHinge(_MarginLoss):
    """The hinge loss smoothed by a Gaussian, for two classes and one output."""

    formula = "l(z, y) = exp(-z^2) / sqrt(pi) - y z (1 + erf(-y z)), y = -1 or +1"

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        z = outputs.squeeze(-1)
        margin = target * z
        return (-z.square()).exp() / math.sqrt(math.pi) - margin * (1 + torch.erf(-margin))

    def third_derivative_bound(self, start: Tensor, end: Tensor, target: Tensor) -> Tensor:
        # |l'''| = (4/√π) |z| exp(-z²), largest at z = 1/√2
        return end.new_full(end.shape[:-1], 4 / math.sqrt(2 * math.pi) * math.exp(-0.5))

    def probabilities(self, outputs: Tensor) -> Tensor:
        # the expected loss is least where erf(z) = 2 P(y = +1) - 1
        return two_classes((1 + torch.erf(outputs)) / 2)

    def log_probabilities(self, outputs: Tensor) -> Tensor:
        # (1 + erf(z)) / 2 is the cumulative normal distribution at √2 z
        return torch.special.log_ndtr(math.sqrt(2) * torch.cat([-outputs, outputs], dim=-1))

    def from_probabilities(self, probabilities: Tensor) -> Tensor:
        return torch.special.ndtri(inner_probabilities(probabilities[..., 1:])) / math.sqrt(2)


@cache
def _load_forward_rules() -> None:
    """Make torch load its forward derivatives, without the warning that it raises about its own torch.jit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))


def _log_softmax(outputs: Tensor) -> Tensor:
    if outputs.shape[-1] >= FEW_CLASSES:
        return outputs.log_softmax(dim=-1)
    return outputs.transpose(-1, -2).log_softmax(dim=-2).transpose(-1, -2)


def inner_probabilities(probabilities: Tensor) -> Tensor:
    """Move probabilities of 0 and 1, which no finite output means, a little inside."""
    limits = torch.finfo(probabilities.dtype)
    return probabilities.clamp(limits.tiny, 1 - limits.eps)


def pick(outputs: Tensor, index: Tensor) -> Tensor:
    """Select the output (..., B) of each sample's true class, from (..., B, C) and indices (B,)."""
    index = index.expand(outputs.shape[:-1]).unsqueeze(-1)
    return outputs.gather(-1, index).squeeze(-1)


def two_classes(positive: Tensor) -> Tensor:
    """Return the probabilities (..., 2) of the classes -1 and +1 from that of +1 (..., 1)."""
    return torch.cat([1 - positive, positive], dim=-1)


def class_indices(outputs: Tensor, target: Tensor, loss_name: str) -> Tensor:
    """Return the target as int64 class indices (B,)."""
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool or target.ndim != 1:
        raise _wrong_target(target, loss_name, "class indices: integers of shape (B,)")
    _check_batch(outputs, target, loss_name)
    return target.long()


def real_values(outputs: Tensor, target: Tensor, loss_name: str) -> Tensor:
    """Return the target as real values (B, C); class indices become one-hot."""
    _check_batch(outputs, target, loss_name)
    num_outputs = outputs.shape[-1]
    if target.ndim == 1 and num_outputs == 1:
        target = target.unsqueeze(-1)
    elif target.ndim == 1 and not target.is_floating_point():
        # a comparison instead of scatter: it also works under vmap and on the meta device
        target = target.unsqueeze(-1) == torch.arange(num_outputs, device=target.device)
    if target.ndim != 2 or target.shape[-1] != num_outputs:
        raise _wrong_target(
            target, loss_name, f"real values of shape (B, {num_outputs}) or class indices: integers of shape (B,)"
        )
    return target.to(outputs.dtype)


def signs(outputs: Tensor, target: Tensor, loss_name: str) -> Tensor:
    """Return the target as -1 and +1 of shape (B,), from these or from the class indices 0 and 1."""
    _check_batch(outputs, target, loss_name)
    if outputs.shape[-1] != 1:
        raise DataError(
            f"{outputs.shape[-1]} outputs", f'the loss "{loss_name}"', "use a network with exactly one output"
        )
    if target.ndim == 2 and target.shape[-1] == 1:
        target = target.squeeze(-1)
    if target.ndim != 1:
        raise _wrong_target(target, loss_name, "-1 and +1 (or the class indices 0 and 1) of shape (B,)")
    return torch.where(target > 0, 1.0, -1.0).to(outputs.dtype)


def _check_batch(outputs: Tensor, target: Tensor, loss_name: str) -> None:
    if target.ndim == 0 or outputs.ndim < 2 or target.shape[0] != outputs.shape[-2]:
        raise DataError(
            f"outputs {tuple(outputs.shape)} and targets {tuple(target.shape)} do not fit together",
            f'the loss "{loss_name}"',
            "give outputs (B, C) or (M, B, C) and one target for each of the B samples",
        )


def _wrong_target(target: Tensor, loss_name: str, expected: str) -> DataError:
    got = f"{str(target.dtype).removeprefix('torch.')} of shape {tuple(target.shape)}"
    return DataError(f"the target is {got}", f'the loss "{loss_name}"', f"expected {expected}")
