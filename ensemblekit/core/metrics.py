"""Metrics of an ensemble: pure functions of the members' outputs (M, N, C)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ensemblekit.core.dataset import DataInfo
from ensemblekit.core.decomposition import decompose
from ensemblekit.core.errors import NumericError, PluginError, Problem
from ensemblekit.core.losses import Loss, pick
from ensemblekit.core.plugin import Plugin, Task
from ensemblekit.core.selective_prediction import RiskCoverage

if TYPE_CHECKING:
    from ensemblekit.spec.sections import Spec

ECE_BINS = 15
FLOAT64_BYTES = 2**22
"""Size of the members' outputs that are computed with at once in float64; at least those of one member."""
METRIC_GROUPS: dict[str, tuple[str, ...]] = {
    "ensemble": (
        "loss",
        "mean_output_loss",
        "accuracy",
        "nll",
        "ece",
        "brier",
        "prediction_entropy",
        "entropy",
        "aleatoric_entropy",
        "aurc",
        "coverage_at_5_risk",
        "risk_at_80_coverage",
        "mse",
        "rmse",
        "mae",
        "r2",
        "standardised_mse",
    ),
    "members": (
        "mean_member_loss",
        "mean_member_accuracy",
        "best_member_accuracy",
        "worst_member_accuracy",
        "oracle_accuracy",
        "mean_member_mse",
        "best_member_mse",
        "worst_member_mse",
    ),
    "spread": ("diversity", "remainder", "remainder_bound", "disagreement", "mutual_information"),
}
"""Every metric, by what it describes: the ensemble, its members by themselves, or how they differ."""
_OLD_NAMES = {name: f"test_{name}" for name in METRIC_GROUPS["members"]} | {"images_per_second": "samples_per_second"}
_OLD_ENTROPIES = {f"{split}_entropy": f"{split}_prediction_entropy" for split in ("test", "validation")}


class Metric(Plugin):
    """A metric of an ensemble's predictions beside the built-in ones; its name is its name in results: test_NAME."""

    kind = "metric"
    tasks: ClassVar[tuple[Task, ...]] = ("classification", "multilabel", "regression")
    """The tasks that it can be used for."""
    higher_is_better: ClassVar[bool | None] = None
    """Whether comparisons count a higher value as better; None: neither is."""

    @abstractmethod
    def compute(self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss) -> Tensor | float | None:
        """Compute the metric on all samples of a split.

        Args:
            outputs: the members' outputs (M, N, C).
            combined: the ensemble's output (N, C).
            target: class indices (N,), labels of 0 and 1 (N, C), or real values (N, C).
            loss: defines what outputs mean: ``loss.probabilities(combined)``. In regression, outputs and targets are
                in the original units.

        Returns:
            A finite number; None if the metric is not defined for these samples, which leaves it out.
        """

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        if info.task not in self.tasks:
            what = f'"{self.name}" is a metric for {self.tasks[0]}, but the task of "{spec.data.name}" is {info.task}'
            yield Problem("", what, "remove it")


def metric_group(name: str) -> str:
    """Return the group of a metric; a metric without a group is one of the ensemble."""
    return next((group for group, names in METRIC_GROUPS.items() if name in names), "ensemble")


def flat_metrics(metrics: Mapping[str, float], split: str = "test") -> dict[str, float]:
    """Name the metrics of a split as runs do: `test_accuracy`, `test_mean_member_accuracy`."""
    return {f"{split}_{name}": value for name, value in metrics.items()}


def translate_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's metrics with the names of version 0.1.0 replaced by the current ones."""
    # its entropy was that of the combined prediction; its rows are known by a name without prefix
    names = _OLD_NAMES | (_OLD_ENTROPIES if "mean_member_loss" in metrics else {})
    return {names.get(name, name): value for name, value in metrics.items()}


@torch.no_grad()
def evaluate(
    outputs: Tensor,
    target: Tensor,
    loss: Loss,
    combined: Tensor | None = None,
    restore: Callable[[Tensor], Tensor] | None = None,
    extra: Sequence[Metric] = (),
) -> dict[str, float]:
    """Compute all metrics of member outputs.

    Args:
        outputs: the members' raw outputs (M, N, C).
        target: class indices (N,), or real values (N,) or (N, C).
        loss: the loss, which also defines what the outputs mean.
        combined: the ensemble's output (N, C). Default: as the loss combines outputs, which is mostly their mean.
        restore: converts standardised values (…, C) to the original units, in which errors of regression are reported.
        extra: metrics beside the built-in ones.

    Returns:
        The metrics by name, without the prefix of a split. Diversity and remainder are left out if the loss is not
        twice differentiable, and the bound on the remainder if the loss has none or if it overflows.

    Raises:
        NumericError: an output is not finite; the error names the member and the sample.
    """
    from ensemblekit.core.tasks import task_of  # which is made of the metrics below

    if combined is None:
        combined = loss.mixture(outputs)
    _check_finite(outputs, combined)
    metrics = {"loss": loss(combined, target).mean(), **_decomposition(outputs, target, loss)}
    task = task_of(loss, outputs, target)
    metrics |= task.metrics(outputs, combined, target, loss, restore)
    target = task.target_for_metrics(target, loss)
    if extra and restore is not None and task.standardises_targets:
        outputs, combined = loss.rescale(outputs, restore), loss.rescale(combined, restore)
        target = restore(target.reshape(len(target), -1))
    for metric in extra:
        value = metric.compute(outputs, combined, target, loss)
        if value is not None:
            metrics[metric.name] = _checked(metric, value)
    return {name: float(value) for name, value in metrics.items()}


def _decomposition(outputs: Tensor, target: Tensor, loss: Loss) -> dict[str, Tensor]:
    if not loss.twice_differentiable:  # the diversity is a second derivative
        losses = {"mean_output_loss": loss(outputs.mean(dim=0), target), "mean_member_loss": loss(outputs, target)}
        return {name: values.mean() for name, values in losses.items()}
    parts = decompose(outputs, target, loss)
    terms = {
        "mean_output_loss": parts.ensemble_loss,
        "mean_member_loss": parts.mean_member_loss,
        "diversity": parts.diversity,
        "remainder": parts.remainder,
    }
    # the cube of large outputs overflows long before the other terms do: an infinite bound says nothing
    if parts.remainder_bound is not None and bool(parts.remainder_bound.isfinite()):
        terms["remainder_bound"] = parts.remainder_bound
    return terms


def _checked(metric: Metric, value: Tensor | float) -> Tensor:
    """Return what a metric has computed; an error if it is not one finite number."""
    number = torch.as_tensor(value, dtype=torch.float64)
    if number.ndim:
        what = f"compute() returned a tensor of shape {tuple(number.shape)}"
        raise PluginError(what, f'metric "{metric.name}"', "return one number", plugin=metric.name)
    if not bool(number.isfinite()):
        raise NumericError(f'the metric "{metric.name}" is {float(number)}', fix="return a finite number in compute()")
    return number


def _check_finite(outputs: Tensor, combined: Tensor) -> None:
    """Raise a `NumericError` for nan or infinity: nan would be the largest output and might count as correct."""
    if outputs.is_meta:
        return
    if bool(outputs.isfinite().all()) and bool(combined.isfinite().all()):
        return
    fix = "lower the learning rate, or set training.clip_norm"
    for member, finite in enumerate(outputs.isfinite().all(dim=-1)):
        if not bool(finite.all()):
            sample = int((~finite).nonzero()[0])
            raise NumericError(f"the outputs of member {member} for sample {sample} are not finite", fix=fix)
    sample = int((~combined.isfinite().all(dim=-1)).nonzero()[0])
    raise NumericError(f"the combined output for sample {sample} is not finite", fix=fix)


@torch.no_grad()
def member_metrics(
    outputs: Tensor, target: Tensor, loss: Loss, restore: Callable[[Tensor], Tensor] | None = None
) -> list[dict[str, Any]]:
    """Compute loss, and accuracy or squared error, of each member by itself; arguments as for `evaluate`."""
    names = ("loss", "accuracy", "mse")
    rows = []
    for index, member_outputs in enumerate(outputs):
        metrics = evaluate(member_outputs.unsqueeze(0), target, loss, restore=restore)
        rows.append({"index": index, **{name: metrics[name] for name in names if name in metrics}})
    return rows


def classification_metrics(outputs: Tensor, combined: Tensor, classes: Tensor, loss: Loss) -> dict[str, Tensor]:
    """Compute accuracy, calibration, uncertainty and disagreement from (M, N, C), (N, C) and class indices (N,)."""
    # float64, since small probabilities underflow in float32
    combined = combined.double()
    probabilities = loss.probabilities(combined)
    answers = []

    def of_members() -> Iterator[Tensor]:
        for some in outputs.split(max(1, FLOAT64_BYTES // max(1, combined.nbytes))):
            each = loss.probabilities(some.double())
            answers.append(each.argmax(dim=-1))
            yield each

    uncertain = uncertainty(of_members())
    predictions = torch.cat(answers)
    correct = predictions == classes
    member_accuracy = correct.double().mean(dim=1)
    predicted = probabilities.argmax(dim=-1)
    selective = RiskCoverage.of(probabilities.amax(dim=-1), predicted != classes)
    return {
        "accuracy": (predicted == classes).double().mean(),
        "nll": -pick(loss.log_probabilities(combined), classes).mean(),
        "ece": calibration_error(probabilities, classes),
        "brier": brier_score(probabilities, classes),
        "mean_member_accuracy": member_accuracy.mean(),
        "best_member_accuracy": member_accuracy.max(),
        "worst_member_accuracy": member_accuracy.min(),
        "oracle_accuracy": correct.any(dim=0).double().mean(),
        "disagreement": disagreement(predictions, probabilities.shape[-1]),
        "prediction_entropy": entropy(probabilities).mean(),
        "entropy": uncertain.entropy.mean(),
        "aleatoric_entropy": uncertain.aleatoric_entropy.mean(),
        "mutual_information": uncertain.mutual_information.mean(),
        "aurc": selective.area,
        "coverage_at_5_risk": selective.coverage_at(0.05),
        "risk_at_80_coverage": selective.risk_at(0.8),
    }


def regression_metrics(
    outputs: Tensor, combined: Tensor, target: Tensor, restore: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """Compute squared and absolute errors and R² of point predictions (M, N, C) and (N, C), targets (N,) or (N, C)."""
    outputs, combined = outputs.double(), combined.double()
    target = target.reshape(combined.shape).double()
    metrics = {}
    if restore is not None:
        metrics["standardised_mse"] = (combined - target).square().mean()
        outputs, combined, target = restore(outputs), restore(combined), restore(target)
    mse = (combined - target).square().mean()
    member_mse = torch.stack([(member - target).square().mean() for member in outputs])
    return metrics | {
        "mse": mse,
        "rmse": mse.sqrt(),
        "mae": (combined - target).abs().mean(),
        "r2": r2_score(combined, target),
        "mean_member_mse": member_mse.mean(),
        "best_member_mse": member_mse.min(),
        "worst_member_mse": member_mse.max(),
    }


def brier_score(probabilities: Tensor, classes: Tensor) -> Tensor:
    """Return the mean squared distance between probabilities and one-hot targets, summed over classes (0 to 2)."""
    truth = torch.nn.functional.one_hot(classes, probabilities.shape[-1])
    return (probabilities - truth).square().sum(dim=-1).mean()


def calibration_error(probabilities: Tensor, classes: Tensor, bins: int = ECE_BINS) -> Tensor:
    """Return the expected calibration error: |accuracy - confidence| in bins of equal width, weighted by their size."""
    confidence, predicted = probabilities.max(dim=-1)
    bin_of = (confidence * bins).ceil().long().clamp(1, bins) - 1  # bins are open on the left: (a, b]
    gap = (predicted == classes).to(confidence.dtype) - confidence
    sums = torch.zeros(bins, dtype=confidence.dtype, device=confidence.device).index_add(0, bin_of, gap)
    return sums.abs().sum() / len(classes)


def disagreement(predictions: Tensor, num_classes: int) -> Tensor:
    """Return how often two members predict different classes, over all pairs; predictions (M, N). 0 for one member."""
    num_members = len(predictions)
    if num_members == 1:
        return torch.zeros((), dtype=torch.float64, device=predictions.device)
    votes = torch.stack([(predictions == label).sum(dim=0) for label in range(num_classes)]).double()
    agreeing_pairs = (votes * (votes - 1)).sum(dim=0)
    return 1 - (agreeing_pairs / (num_members * (num_members - 1))).mean()


@dataclass(frozen=True)
class Uncertainty:
    """The uncertainty of class probabilities of several members, for each sample (N,), in nats."""

    entropy: Tensor
    """Of the mean of the members' probabilities."""
    aleatoric_entropy: Tensor
    """Mean of the entropies of the members' probabilities."""

    @property
    def mutual_information(self) -> Tensor:
        """The part of the entropy that is due to the disagreement of the members."""
        return (self.entropy - self.aleatoric_entropy).clamp_min(0)  # rounding may put it a little below zero


def uncertainty(member_probabilities: Iterable[Tensor]) -> Uncertainty:
    """Compute the uncertainty from class probabilities, one item after the other.

    Args:
        member_probabilities: (N, K) of one member, or (M, N, K) of several, in each item.
    """
    items = map(_means, member_probabilities)
    mean, aleatoric, count = next(items)
    for item_mean, item_aleatoric, size in items:
        count += size
        mean = mean + (item_mean - mean) / (count / size)
        aleatoric = aleatoric + (item_aleatoric - aleatoric) / (count / size)
    return Uncertainty(entropy(mean), aleatoric)


def _means(probabilities: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the mean probabilities (N, K) and the mean entropy (N,) of members, and how many they are."""
    if probabilities.ndim == 2:
        return probabilities, entropy(probabilities), 1
    return probabilities.mean(dim=0), entropy(probabilities).mean(dim=0), len(probabilities)


def r2_score(predicted: Tensor, target: Tensor) -> Tensor:
    """Return R², averaged over outputs; for a constant target 1 if predictions are exact, else 0."""
    unexplained = (predicted - target).square().sum(dim=0)
    total = (target - target.mean(dim=0)).square().sum(dim=0)
    met_exactly = (unexplained == 0).to(total.dtype)
    return torch.where(total > 0, 1 - unexplained / total.clamp_min(torch.finfo(total.dtype).tiny), met_exactly).mean()


def entropy(probabilities: Tensor) -> Tensor:
    """Return the entropy (…) of class probabilities (…, K), in nats."""
    return torch.special.entr(probabilities).sum(dim=-1)
