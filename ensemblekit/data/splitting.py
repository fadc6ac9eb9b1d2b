"""Stratified selection of samples: every class in proportion to its size, and groups of samples kept together."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from ensemblekit.core.errors import DataError
from ensemblekit.data.grouping import hold_out_groups


def hold_out(
    targets: Tensor, fraction: float, generator: Generator, groups: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Split samples into a part to keep and a part to hold out, for validation or for testing.

    Args:
        targets: Class indices, int64 (N,), which are held out in proportion (largest remainder), except that one
            sample of each class is always kept; or real values (N,) or (N, C), which are not stratified.
        fraction: Share of the samples to hold out, between 0 and 1; at least one sample is held out.
        generator: Source of randomness, as of `ensemblekit.generator`.
        groups: The group of each sample, int64 (N,); a group is kept or held out as a whole. Groups are visited in
            random order, and one is held out if that brings the held-out samples of all classes closer to their share.
            With large groups, share and proportions are therefore only approximate. None: each sample is on its own.

    Returns:
        The indices of the samples to keep and of those to hold out, both int64 and ascending.

    Raises:
        DataError: No sample or group can be held out, since each has the only samples of a class.
    """
    if groups is None:
        held_out = _sample(targets, max(1, round(fraction * len(targets))), generator, keep_one=True)
        what = f"{len(targets)} samples are too few to hold any out: one of each class must stay"
    else:
        held_out = hold_out_groups(targets, fraction, generator, groups)
        what = f"{len(groups.unique())} groups are too few to hold one out: samples of each class must stay"
    if not len(held_out):
        raise DataError(what, fix="add samples, or set the fraction to 0")
    kept = torch.ones(len(targets), dtype=torch.bool)
    kept[held_out] = False
    return kept.nonzero().squeeze(-1), held_out


def limit(targets: Tensor, count: int, generator: Generator) -> Tensor:
    """Select `count` samples, classes in proportion (largest remainder), or all if there are fewer.

    Args:
        targets: Class indices, int64 (N,); or real values, which are not stratified.
        count: Number of samples to select.
        generator: Source of randomness.

    Returns:
        The indices of the selected samples, int64 and ascending.
    """
    return _sample(targets, min(count, len(targets)), generator, keep_one=False)


def _sample(targets: Tensor, count: int, generator: Generator, keep_one: bool) -> Tensor:
    """Sample indices without replacement, ascending; `keep_one` leaves at least one sample of each class out."""
    classes = torch.zeros(len(targets), dtype=torch.int64) if targets.is_floating_point() else targets
    sizes = classes.bincount()
    counts = _class_counts(sizes, count, (sizes - int(keep_one)).clamp(min=0))
    shuffled = torch.randperm(len(classes), generator=generator)
    by_class = shuffled[classes[shuffled].argsort(stable=True)]
    rank_in_class = torch.arange(len(classes)) - (sizes.cumsum(0) - sizes)[classes[by_class]]
    return by_class[rank_in_class < counts[classes[by_class]]].sort().values


def _class_counts(sizes: Tensor, count: int, largest: Tensor) -> Tensor:
    """Divide `count` among the classes (K,) in proportion to their sizes, with at most `largest` for each."""
    total = int(sizes.sum())
    counts = (count * sizes).div(max(total, 1), rounding_mode="floor").minimum(largest)
    remainders = count * sizes - counts * total
    least = torch.iinfo(torch.int64).min
    while (missing := count - int(counts.sum())) > 0 and bool((counts < largest).any()):
        has_room = counts < largest
        order = remainders.where(has_room, least).argsort(descending=True, stable=True)
        chosen = order[: min(missing, int(has_room.sum()))]
        counts[chosen] += 1
        remainders[chosen] -= total
    return counts
