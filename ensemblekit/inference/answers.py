"""Answers for single samples: a class with its probability and uncertainty, or a value with its deviation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ensemblekit.core.metrics import uncertainty

if TYPE_CHECKING:
    from ensemblekit.inference.ensemble import Ensemble

Answer = dict[str, str | int | float]


def answers(
    ensemble: Ensemble, outputs: Tensor, probabilities: bool = False, members: bool = False
) -> Iterator[Answer]:
    """Yield an answer for each sample.

    Args:
        ensemble: the ensemble.
        outputs: those of its networks, as `Ensemble.network_outputs` gives them.
        probabilities: whether to add the probability of every class as ``probability[NAME]``.
        members: whether to add what each member predicts: ``member_class[INDEX]`` and ``member_probability[INDEX]``,
            or ``member_value[INDEX]``.
    """
    combined = ensemble.combiner.restored(ensemble.combine_networks(outputs))
    outputs = ensemble.combiner.restored(ensemble.predictions_of(outputs))
    return answers_of(ensemble, outputs, combined, probabilities, members)


def answers_of(
    ensemble: Ensemble, outputs: Tensor, combined: Tensor, probabilities: bool = False, members: bool = False
) -> Iterator[Answer]:
    """Yield an answer for each sample of the outputs of members (M, B, C) and what they combine to (B, C)."""
    if ensemble.info.task == "classification":
        columns = _classes(ensemble, outputs, combined, probabilities, members)
    else:
        columns = _values(ensemble, ensemble.loss.point(outputs), ensemble.loss.point(combined), members)
    names, values = list(columns), columns.values()
    for row in zip(*values, strict=True):
        yield dict(zip(names, row, strict=True))


Columns = dict[str, list[str] | list[int] | list[float]]


def _classes(
    ensemble: Ensemble, outputs: Tensor, combined: Tensor, with_probabilities: bool, with_members: bool
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


def _values(ensemble: Ensemble, outputs: Tensor, combined: Tensor, with_members: bool) -> Columns:
    """The columns for the values that members (M, B, C) and ensemble (B, C) predict; several values are numbered."""
    deviations = outputs.std(dim=0, correction=0)
    num_values = combined.shape[-1]
    ends = [""] if num_values == 1 else [f"_{index}" for index in range(num_values)]
    columns: Columns = {}
    for index, end in enumerate(ends):
        columns[f"value{end}"] = _in_units(ensemble, combined, index)
        columns[f"standard_deviation{end}"] = _in_units(ensemble, deviations, index)
    if with_members:
        for member, own in enumerate(outputs):
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


def numbers(values: Tensor) -> list[float]:
    """Return numbers (N,) with the fewest digits that stand for them in their own precision: 0.1, not 0.10000000149."""
    if values.dtype == torch.float64:
        return values.tolist()
    return [float(str(number)) for number in values.float().numpy()]
