"""Samples worth a look: the most uncertain, the most confidently wrong and the most contested ones, with all votes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ensemblekit.analysis.report.charts import number, percent
from ensemblekit.analysis.report.predictions import Predictions, vote_counts
from ensemblekit.analysis.report.regression import ValuePredictions

MOST_SAMPLES = 6
MOST_VOTES = 4
"""Classes whose votes are listed for a sample; the others are summed."""


@dataclass(frozen=True)
class Vote:
    """How many members predict a class."""

    label: str
    count: int
    share: float
    right: bool


@dataclass(frozen=True)
class Sample:
    """One test sample and what was predicted for it."""

    position: int
    """Among the test samples of the run."""
    index: int
    """Its number in the data set."""
    facts: tuple[tuple[str, str], ...]
    """Labelled texts: true class, predicted class …"""
    votes: tuple[Vote, ...] = ()
    picture: str | None = None
    """A data URI of a PNG image."""
    columns: tuple[tuple[str, str], ...] = ()
    """The columns of a row of a table, each with its text."""


@dataclass(frozen=True)
class SampleGroup:
    """Samples that were chosen for one reason."""

    name: str
    title: str
    caption: str
    samples: tuple[Sample, ...]


def class_samples(predictions: Predictions, index: Tensor, most: int = MOST_SAMPLES) -> list[SampleGroup]:
    """Choose samples of a classification run.

    Args:
        predictions: of the run.
        index: the numbers of the samples in the data set (N,).
        most: samples in each group.
    """
    wrong = (~predictions.correct).nonzero().flatten()
    chosen = {
        "uncertain": _first(predictions.entropy, most),
        "wrong": wrong[_first(predictions.confidence[wrong], most)],
        "contested": _contested(predictions, most),
    }
    texts = {
        "uncertain": ("Most uncertain", "The entropy of the mean of the members' probabilities is highest."),
        "wrong": (
            "Most confidently wrong",
            "The ensemble is wrong although it is sure: look for wrong labels and blind spots.",
        ),
        "contested": ("Most contested", "The fewest pairs of members predict the same class."),
    }
    groups = []
    for name, positions in chosen.items():
        samples = tuple(_class_sample(predictions, int(position), int(index[position])) for position in positions)
        if samples:
            groups.append(SampleGroup(name, *texts[name], samples))
    return groups


def _first(values: Tensor, most: int) -> Tensor:
    """Return the indices of the largest values; of equal ones the first."""
    return values.sort(descending=True, stable=True).indices[:most]


def _contested(predictions: Predictions, most: int) -> Tensor:
    """Return the samples with the least agreement, of equal ones those with the largest mutual information."""
    order = predictions.mutual_information.sort(descending=True, stable=True).indices
    order = order[predictions.agreement[order].sort(stable=True).indices][:most]
    return order[predictions.agreement[order] < 1]


def _class_sample(predictions: Predictions, position: int, index: int) -> Sample:
    names, true = predictions.classes, int(predictions.targets[position])
    predicted = int(predictions.predicted[position])
    facts = (
        ("true", names[true]),
        ("predicted", f"{names[predicted]} ({percent(float(predictions.confidence[position]), 1)})"),
    )
    counts = vote_counts(predictions.votes[:, position : position + 1], len(names))[0]
    ranked = counts.sort(descending=True, stable=True)
    pairs = [
        (kind, count) for kind, count in zip(ranked.indices.tolist(), ranked.values.tolist(), strict=True) if count
    ]
    total = len(predictions.votes)
    votes = [Vote(names[kind], count, count / total, kind == true) for kind, count in pairs[:MOST_VOTES]]
    if rest := sum(count for _, count in pairs[MOST_VOTES:]):
        votes.append(Vote(f"{len(pairs) - MOST_VOTES} other classes", rest, rest / total, False))
    return Sample(position, index, facts, tuple(votes))


def value_samples(values: ValuePredictions, index: Tensor, most: int = MOST_SAMPLES) -> list[SampleGroup]:
    """Choose samples of a regression run: the largest errors, and the largest spread of the members."""
    chosen = {
        "errors": ("Largest errors", "The prediction is farthest from the true value.", values.residuals.abs()),
        "spread": ("Most contested", "The members' predictions differ most.", values.spread),
    }
    groups = []
    for name, (title, caption, measure) in chosen.items():
        if name == "spread" and len(values.members) == 1:
            continue
        samples = tuple(_value_sample(values, int(p), int(index[p])) for p in _first(measure, most))
        groups.append(SampleGroup(name, title, caption, samples))
    return groups


def _value_sample(values: ValuePredictions, position: int, index: int) -> Sample:
    members = values.members[:, position]
    facts = [
        ("true", number(float(values.targets[position]))),
        ("predicted", number(float(values.predicted[position]))),
    ]
    if len(members) > 1:
        facts.append(("members", f"{number(float(members.min()))} to {number(float(members.max()))}"))
    return Sample(position, index, tuple(facts))


Show = Callable[[Sequence[int]], Sequence[Mapping[str, Any]]]


def with_inputs(groups: Sequence[SampleGroup], show: Show) -> list[SampleGroup]:
    """Add to every sample what its input looks like; the inputs are read once for all groups.

    Args:
        groups: the samples.
        show: returns fields of `Sample` for each of several positions.
    """
    positions = sorted({sample.position for group in groups for sample in group.samples})
    if not positions:
        return list(groups)
    shown = dict(zip(positions, show(positions), strict=True))
    return [
        replace(group, samples=tuple(replace(sample, **shown[sample.position]) for sample in group.samples))
        for group in groups
    ]
