"""Which samples go where: parts of a data set with its classes in proportion."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from ensemblekit.core.errors import DataError


def hold_out(targets: Tensor, fraction: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """The indices to keep and those to hold out, both in order; at least one sample is held out.

    `targets` are class indices (N,), which are held out in proportion (largest remainder), except that one sample
    of each class is always kept; or real values, of which any are taken.
    """
    count = max(1, round(fraction * len(targets)))
    held_out = _draw(targets, count, generator, keep_one=True)
    if not len(held_out):
        what = f"{len(targets)} samples are too few to hold any out: one of each class must stay"
        raise DataError(what, fix="give more samples, or a fraction of 0")
    kept = torch.ones(len(targets), dtype=torch.bool)
    kept[held_out] = False
    return kept.nonzero().squeeze(-1), held_out


def limit(targets: Tensor, count: int, generator: Generator) -> Tensor:
    """The indices of `count` samples in order, classes in proportion (largest remainder); of all if there are fewer."""
    return _draw(targets, min(count, len(targets)), generator, keep_one=False)


def _draw(targets: Tensor, count: int, generator: Generator, keep_one: bool) -> Tensor:
    """The indices of samples drawn without replacement, in order; `keep_one` leaves one of each class."""
    classes = torch.zeros(len(targets), dtype=torch.int64) if targets.is_floating_point() else targets
    sizes = classes.bincount()
    shares = _shares(sizes, count, (sizes - int(keep_one)).clamp(min=0))
    shuffled = torch.randperm(len(classes), generator=generator)
    by_class = shuffled[classes[shuffled].argsort(stable=True)]
    place_in_class = torch.arange(len(classes)) - (sizes.cumsum(0) - sizes)[classes[by_class]]
    return by_class[place_in_class < shares[classes[by_class]]].sort().values


def _shares(sizes: Tensor, count: int, largest: Tensor) -> Tensor:
    """How many of each class (K,) make `count` in proportion to the classes' sizes, with no more than `largest`."""
    total = int(sizes.sum())
    shares = (count * sizes).div(max(total, 1), rounding_mode="floor").minimum(largest)
    remainders = count * sizes - shares * total
    least = torch.iinfo(torch.int64).min
    while (missing := count - int(shares.sum())) > 0 and bool((shares < largest).any()):
        room = shares < largest
        order = remainders.where(room, least).argsort(descending=True, stable=True)[: min(missing, int(room.sum()))]
        shares[order] += 1
        remainders[order] -= total
    return shares
