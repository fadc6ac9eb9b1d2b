"""Answers for single samples: a class or labels with probabilities and uncertainty, or a value with its deviation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ensemblekit.core.label_metrics import binary_entropy, predicted_labels
from ensemblekit.core.metrics import uncertainty
from ensemblekit.core.plugin import Task

if TYPE_CHECKING:
    from ensemblekit.inference.ensemble import Ensemble

SEPARATOR = " | "
"""Between the classes of a set."""
Answer = dict[str, str | int | float]


def answers(
    ensemble: Ensemble,
    outputs: Tensor,
    probabilities: bool = False,
    members: bool = False,
    uniform: Tensor | None = None,
) -> Iterator[Answer]:
    """Yield an answer for each sample.

    Args:
        ensemble: the ensemble.
        outputs: those of its networks, as `Ensemble.network_outputs` gives them.
        probabilities: whether to add the probability of every class as ``probability[NAME]``; labels always have it.
        members: whether to add what each member predicts: ``member_class[INDEX]`` and ``member_probability[INDEX]``,
            ``member_labels[INDEX]``, or ``member_value[INDEX]``.
        uniform: the random numbers (B,) of prediction sets, if the run has such.
    """
    combined = ensemble.combiner.restored(ensemble.combine_networks(outputs))
    outputs = ensemble.combiner.restored(ensemble.predictions_of(outputs))
    return answers_of(ensemble, outputs, combined, probabilities, members, uniform)


def answers_of(
    ensemble: Ensemble,
    outputs: Tensor,
    combined: Tensor,
    probabilities: bool = False,
    members: bool = False,
    uniform: Tensor | None = None,
) -> Iterator[Answer]:
    """Yield an answer for each sample of the outputs of members (M, B, C) and what they combine to (B, C)."""
    options = {"uniform": uniform} if ensemble.info.task == "classification" else {}
    columns = _COLUMNS[ensemble.info.task](ensemble, outputs, combined, probabilities, members, **options)
    names, values = list(columns), columns.values()
    for row in zip(*values, strict=True):
        yield dict(zip(names, row, strict=True))


Columns = dict[str, list[str] | list[int] | list[float]]


def _classes(
    ensemble: Ensemble,
    outputs: Tensor,
    combined: Tensor,
    with_probabilities: bool,
    with_members: bool,
    uniform: Tensor | None,
) -> Columns:
    """The columns of the answers for outputs (M, B, C) and what they combine to (B, C)."""
    probabilities = ensemble.loss.probabilities(combined)
    member_probabilities = ensemble.loss.probabilities(outputs)
    confidence, predicted = probabilities.max(dim=-1)
    agreement = (member_probabilities.argmax(dim=-1) == predicted).float().mean(dim=0)
    uncertain = uncertainty(member_probabilities.double())
    columns: Columns = {
        "class": _labels(ensemble, predicted),
        "probability": numbers(confidence),
        "agreement": numbers(agreement),
        "entropy": numbers(uncertain.entropy.to(outputs.dtype)),
        "mutual_information": numbers(uncertain.mutual_information.to(outputs.dtype)),
    }
    if ensemble.conformal is not None and uniform is not None:
        exact = ensemble.loss.probabilities(combined.double())
        sets = ensemble.named_sets(exact, ensemble.conformal.sets(exact, uniform))
        columns["set"] = [SEPARATOR.join(map(str, classes)) for classes in sets]
    if with_probabilities:
        for index, column in enumerate(probabilities.unbind(dim=-1)):
            name = ensemble.classes[index] if ensemble.classes else index
            columns[f"probability[{name}]"] = numbers(column)
    if with_members:
        for index, own in enumerate(member_probabilities):
            own_confidence, own_class = own.max(dim=-1)
            columns[f"member_class[{index}]"] = _labels(ensemble, own_class)
            columns[f"member_probability[{index}]"] = numbers(own_confidence)
    return columns


def _labels(ensemble: Ensemble, indices: Tensor) -> list[str] | list[int]:
    classes = ensemble.classes
    return [classes[index] for index in indices.tolist()] if classes else indices.tolist()


def _label_sets(
    ensemble: Ensemble, outputs: Tensor, combined: Tensor, with_probabilities: bool, with_members: bool
) -> Columns:
    """The columns for labels: those that are predicted, separated by semicolons, and the probability of each."""
    probabilities, member_probabilities = ensemble.loss.probabilities(combined), ensemble.loss.probabilities(outputs)
    predicted, own = predicted_labels(probabilities), predicted_labels(member_probabilities)
    entropy = binary_entropy(member_probabilities.double().mean(dim=0))
    aleatoric = binary_entropy(member_probabilities.double()).mean(dim=0)
    names = ensemble.classes or tuple(map(str, range(predicted.shape[-1])))
    columns: Columns = {
        "labels": _joined(predicted, names),
        "agreement": numbers((own == predicted).all(dim=-1).float().mean(dim=0)),
        "entropy": numbers(entropy.to(outputs.dtype)),
        "mutual_information": numbers((entropy - aleatoric).clamp_min(0).to(outputs.dtype)),
    }
    for name, column in zip(names, probabilities.unbind(dim=-1), strict=True):
        columns[f"probability[{name}]"] = numbers(column)
    if with_members:
        columns |= {f"member_labels[{index}]": _joined(labels, names) for index, labels in enumerate(own)}
    return columns


def _joined(labels: Tensor, names: Sequence[str]) -> list[str]:
    return [";".join(name for name, has in zip(names, row, strict=True) if has) for row in labels.tolist()]


def _values(
    ensemble: Ensemble, outputs: Tensor, combined: Tensor, with_probabilities: bool, with_members: bool
) -> Columns:
    """The columns for outputs (M, B, C) and what they combine to (B, C); several values are numbered.

    The standard deviation is that of the members' predictions, unless the loss knows that of the ensemble.
    """
    loss, predicted = ensemble.loss, ensemble.loss.point(outputs)
    by_name = {"value": loss.point(combined), "standard_deviation": predicted.std(dim=0, correction=0)}
    known = loss.intervals(combined)
    if "standard_deviation" in known:
        by_name["member_deviation"] = by_name["standard_deviation"]
    by_name |= known
    num_values = predicted.shape[-1]
    ends = [""] if num_values == 1 else [f"_{index}" for index in range(num_values)]
    columns: Columns = {}
    for index, end in enumerate(ends):
        columns |= {f"{name}{end}": _in_units(ensemble, values, index) for name, values in by_name.items()}
    if ensemble.conformal is not None:
        point, half = loss.point(combined), ensemble.conformal.half_widths(predicted.std(dim=0, correction=0))
        for index, end in enumerate(ends):
            columns[f"low{end}"] = _in_units(ensemble, point - half, index)
            columns[f"high{end}"] = _in_units(ensemble, point + half, index)
    if with_members:
        for member, own in enumerate(predicted):
            for index, end in enumerate(ends):
                columns[f"member_value{end}[{member}]"] = _in_units(ensemble, own, index)
    return columns


def _in_units(ensemble: Ensemble, values: Tensor, index: int) -> list[float]:
    """One of several values (N, C), without digits beyond the precision of what the members learnt."""
    column = numbers(values[:, index])
    if ensemble.target_scaling is None:
        return column
    resolution = ensemble.target_scaling.std[index] * torch.finfo(ensemble.dtype).eps
    decimals = math.ceil(-math.log10(resolution))
    return [round(value, decimals) for value in column]


_COLUMNS: dict[Task, Callable[..., Columns]] = {
    "classification": _classes,
    "multilabel": _label_sets,
    "regression": _values,
}


def numbers(values: Tensor) -> list[float]:
    """Return numbers (N,) with the fewest digits that stand for them in their own precision: 0.1, not 0.10000000149."""
    if values.dtype == torch.float64:
        return values.tolist()
    return [float(str(number)) for number in values.float().numpy()]
