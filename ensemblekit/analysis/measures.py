"""The measures of a run from its kept outputs: values by name, and quantities of each sample for the bootstrap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ensemblekit.analysis.bootstrap import SampleStatistic
from ensemblekit.core.decomposition import quadratic_diversity
from ensemblekit.core.label_metrics import label_disagreement, label_nll, predicted_labels
from ensemblekit.core.losses import Loss, pick
from ensemblekit.core.metrics import ECE_BINS
from ensemblekit.core.plugin import Task
from ensemblekit.core.tasks import task_of
from ensemblekit.inference.coverage import measure_coverage

if TYPE_CHECKING:
    from ensemblekit.inference.combining import Combiner
    from ensemblekit.runs.outputs import KeptOutputs
    from ensemblekit.runs.run import Run

Quantities = dict[str, Tensor]
"""Quantities of each sample by name: (N,), or (N, F) for several."""


@dataclass(frozen=True)
class Measure:
    """A measure that can be shown in a comparison."""

    title: str
    higher_is_better: bool | None = None
    """None if neither is."""
    unit: str = ""
    """"%" for shares, "s", "ms" or "" for plain numbers."""
    statistic: Callable[[Quantities], SampleStatistic] | None = None
    """How it is computed from quantities of the test samples; None if it does not come from them."""


def measures(run: Run, split: str = "test") -> dict[str, float]:
    """Return the measures of a finished run by name.

    Args:
        run: a finished run.
        split: the data of the metrics: "test" or "validation".

    Returns:
        All metrics of the kept outputs by names without the prefix of a split (accuracy, nll, ece, mean_member_accuracy
        …), train_loss and train_diversity of the epoch whose weights are kept, parameters, training_seconds and
        milliseconds_per_1000 predictions; those that the run has not recorded are left out.

    Raises:
        RunError: the run has not finished, or its files are damaged.
    """
    return run.combiner().metrics(run.outputs(split)) | recorded_measures(run)


def recorded_measures(run: Run) -> dict[str, float]:
    """Return the measures that do not come from kept outputs: training loss, parameters, times."""
    found: dict[str, float | None] = {}
    is_best_kept = run.spec.training.keep == "best" and run.best_epoch is not None
    kept = [row for row in run.history if not is_best_kept or row.get("epoch") == run.best_epoch]
    for name in ("train_loss", "train_diversity"):
        found[name] = kept[-1].get(name) if kept else None
    # the parameters of a network count once, whatever the number of its stochastic passes
    own = [member["parameters"] for member in run.members if not member.get("pass") and "parameters" in member]
    found["parameters"] = sum(own) if own else None
    found["training_seconds"] = run.seconds.get("training")
    found["milliseconds_per_1000"] = run.milliseconds_per_1000
    return {name: float(value) for name, value in found.items() if value is not None}


def sample_measures(run: Run, split: str = "test") -> Quantities:
    """Return quantities of each sample of a run's data: `sample_quantities` of its kept outputs."""
    return sample_quantities(run.outputs(split), run.combiner())


@torch.no_grad()
def sample_quantities(kept: KeptOutputs, combiner: Combiner) -> Quantities:
    """Compute the quantities of each of N samples that measures are means of, in float32.

    Args:
        kept: outputs of M members and targets.
        combiner: how the outputs are combined.

    Returns:
        For classes: `correct`, `confidence`, `nll`, `brier`, `member_correct` (N, M), `disagreement`; for labels the
        same without `confidence`; for real targets: `squared_error` (N, C), `absolute_error`, `member_squared_error`
        (N, M), `centred_target` (N, C); and for all `loss`, `diversity` if the loss is twice differentiable, and
        `covered` with `set_size` or `interval_width` if the run has prediction sets or intervals.
    """
    loss, outputs, targets = combiner.loss, combiner.learned(kept.outputs), kept.targets
    learned_targets = combiner.learned_targets(targets)
    combined = combiner.combine_kept(kept)
    found = {"loss": loss(combined, learned_targets)}
    if loss.twice_differentiable:
        found["diversity"] = _diversity(outputs, learned_targets, loss)
    task = task_of(loss, outputs, targets)
    compute = _QUANTITIES[task.name]
    found |= compute(outputs, combined, task.target_for_metrics(targets, loss), combiner)
    coverage = measure_coverage(combiner, outputs, combined, learned_targets)
    if coverage is not None:
        size = "interval_width" if coverage.classes is None else "set_size"
        found |= {"covered": coverage.covered, size: coverage.sizes}
    return {name: values.float() for name, values in found.items()}


def _diversity(outputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """Return the diversity of each sample (N,), one member at a time to need little memory."""
    centre = outputs.mean(dim=0)
    total = centre.new_zeros(len(centre))
    for member in outputs:
        total += quadratic_diversity(member.unsqueeze(0), centre, targets, loss)[0]
    return total / len(outputs)


def _of_classes(outputs: Tensor, combined: Tensor, classes: Tensor, combiner: Combiner) -> Quantities:
    loss, combined = combiner.loss, combined.double()  # small probabilities underflow in float32
    probabilities = loss.probabilities(combined)
    confidence, predicted = probabilities.max(dim=-1)
    # the sum over classes of (p - y)² is Σ p² - 2 p_y + 1
    brier = probabilities.square().sum(dim=-1) - 2 * pick(probabilities, classes) + 1
    votes = torch.stack([loss.probabilities(member).argmax(dim=-1) for member in outputs])
    return {
        "correct": predicted == classes,
        "confidence": confidence,
        "nll": -pick(loss.log_probabilities(combined), classes),
        "brier": brier,
        "member_correct": (votes == classes).T,
        "disagreement": _disagreement(votes, probabilities.shape[-1]),
    }


def _disagreement(votes: Tensor, num_classes: int) -> Tensor:
    """Return the share of pairs of members whose votes (M, N) differ, for each sample (N,)."""
    num_members, num_samples = votes.shape
    if num_members == 1:
        return torch.zeros(num_samples)
    counts = torch.zeros(num_samples, num_classes).scatter_add_(1, votes.T, torch.ones(num_samples, num_members))
    return 1 - (counts * (counts - 1)).sum(dim=1) / (num_members * (num_members - 1))


def _of_labels(outputs: Tensor, combined: Tensor, labels: Tensor, combiner: Combiner) -> Quantities:
    loss, combined = combiner.loss, combined.double()
    probabilities, truth = loss.probabilities(combined), labels.bool()
    members = predicted_labels(torch.stack([loss.probabilities(member) for member in outputs]))
    return {
        "correct": (predicted_labels(probabilities) == truth).all(dim=-1),
        "nll": label_nll(combined, truth),
        "brier": (probabilities - truth.double()).square().sum(dim=-1),
        "member_correct": (members == truth).all(dim=-1).T,
        "disagreement": label_disagreement(members),
    }


def _of_values(outputs: Tensor, combined: Tensor, targets: Tensor, combiner: Combiner) -> Quantities:
    point = combiner.loss.point
    combined = point(combiner.restored(combined)).double()
    targets = targets.reshape(combined.shape).double()
    members = point(combiner.restored(outputs))
    member_errors = [(member.double() - targets).square().mean(dim=-1) for member in members]
    return {
        "squared_error": (combined - targets).square(),
        "absolute_error": (combined - targets).abs().mean(dim=-1),
        "member_squared_error": torch.stack(member_errors, dim=1),
        "centred_target": targets - targets.mean(dim=0),
    }


_QUANTITIES: dict[Task, Callable[[Tensor, Tensor, Tensor, Combiner], Quantities]] = {
    "classification": _of_classes,
    "multilabel": _of_labels,
    "regression": _of_values,
}


def _calibration(quantities: Quantities) -> SampleStatistic:
    """The expected calibration error: the sum of the magnitudes of the mean gaps in bins of confidence."""
    confidence = quantities["confidence"]
    bins = (confidence.double() * ECE_BINS).ceil().long().clamp(1, ECE_BINS) - 1
    gap = quantities["correct"] - confidence
    features = torch.zeros(len(gap), ECE_BINS).scatter_(1, bins.unsqueeze(1), gap.unsqueeze(1))
    return SampleStatistic(features, lambda means: means.abs().sum(dim=-1))


def _determination(quantities: Quantities) -> SampleStatistic:
    """R², averaged over outputs."""
    error, target = quantities["squared_error"], quantities["centred_target"]
    num_outputs = target.shape[1]

    def r2(means: Tensor) -> Tensor:
        unexplained, mean, square = means.split(num_outputs, dim=-1)
        total = square - mean.square()
        exact = (unexplained == 0).to(total.dtype)
        share = unexplained / total.clamp_min(torch.finfo(total.dtype).tiny)
        return torch.where(total > 0, 1 - share, exact).mean(dim=-1)

    return SampleStatistic(torch.cat([error, target, target.square()], dim=1), r2)


def _mean(name: str) -> Callable[[Quantities], SampleStatistic]:
    """The mean of a quantity over the samples, and over its features if it has several."""

    def statistic(quantities: Quantities) -> SampleStatistic:
        values = quantities[name]
        return SampleStatistic(values if values.ndim == 1 else values.mean(dim=1))

    return statistic


def _best(name: str, largest: bool) -> Callable[[Quantities], SampleStatistic]:
    """The largest or smallest of the means of the features of a quantity."""

    def reduction(means: Tensor) -> Tensor:
        return means.amax(dim=-1) if largest else means.amin(dim=-1)

    return lambda quantities: SampleStatistic(quantities[name], reduction)


def _root(name: str) -> Callable[[Quantities], SampleStatistic]:
    return lambda quantities: SampleStatistic(
        quantities[name].mean(dim=1), lambda means: means.squeeze(-1).clamp_min(0).sqrt()
    )


class _Measures(dict[str, Measure]):
    """Measures by name; one that is not listed is a metric of a plugin, under its own name."""

    def __missing__(self, name: str) -> Measure:
        return Measure(name.replace("_", " "))


MEASURES: Mapping[str, Measure] = _Measures(
    {
        "accuracy": Measure("accuracy", True, "%", _mean("correct")),
        "mse": Measure("MSE", False, "", _mean("squared_error")),
        "rmse": Measure("RMSE", False, "", _root("squared_error")),
        "r2": Measure("R²", True, "", _determination),
        "nll": Measure("NLL", False, "", _mean("nll")),
        "ece": Measure("ECE", False, "", _calibration),
        "brier": Measure("Brier", False, "", _mean("brier")),
        "aurc": Measure("AURC", False),
        "coverage": Measure("coverage", None, "%", _mean("covered")),
        "mean_set_size": Measure("set size", False, "", _mean("set_size")),
        "mean_interval_width": Measure("interval width", False, "", _mean("interval_width")),
        "mean_member_accuracy": Measure("mean member", True, "%", _mean("member_correct")),
        "best_member_accuracy": Measure("best member", True, "%", _best("member_correct", largest=True)),
        "oracle_accuracy": Measure(
            "oracle", True, "%", lambda quantities: SampleStatistic(quantities["member_correct"].amax(dim=1))
        ),
        "mean_member_mse": Measure("mean member", False, "", _mean("member_squared_error")),
        "best_member_mse": Measure("best member", False, "", _best("member_squared_error", largest=False)),
        "diversity": Measure("diversity", None, "", _mean("diversity")),
        "disagreement": Measure("disagreement", None, "%", _mean("disagreement")),
        "loss": Measure("loss", False, "", _mean("loss")),
        "train_loss": Measure("training loss", False),
        "parameters": Measure("parameters", False),
        "training_seconds": Measure("training time", False, "s"),
        "milliseconds_per_1000": Measure("per 1,000", False, "ms"),
    }
)
"""Every built-in measure that a comparison can show, by name, in the order of its columns."""


def final_metrics(run: Run) -> dict[str, float]:
    """Return final test metrics of a run that are not computed from quantities of samples: AURC and those of plugins.

    They are those of the calibrated outputs, if the run is calibrated. Runs of older versions have no AURC.
    """
    names = ("aurc", *(metric.name for metric in run.spec.known_metrics))
    if (combiner := run.combiner()).calibration is not None:
        current = combiner.metrics(run.outputs("test"))
        return {name: current[name] for name in names if name in current}
    final = {name: run.metrics.get(f"test_{name}") for name in names}
    return {name: float(value) for name, value in final.items() if value is not None}


def statistics_of(quantities: Quantities) -> dict[str, SampleStatistic]:
    """Return the statistics that can be computed from the quantities of samples, by the name of the measure."""
    found = {}
    for name, measure in MEASURES.items():
        if measure.statistic is not None:
            try:
                found[name] = measure.statistic(quantities)
            except KeyError:  # a measure of the other task
                continue
    return found
