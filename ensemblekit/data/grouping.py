"""Whole groups of samples to hold out: the rows of a patient or the frames of a film are never divided."""

from __future__ import annotations

import numpy as np
import torch
from torch import Generator, Tensor

from ensemblekit.core.dataset import Splits
from ensemblekit.core.errors import PluginError


def hold_out_groups(targets: Tensor, fraction: float, generator: Generator, groups: Tensor) -> Tensor:
    """Choose groups so that each class has about its share of held-out samples; at least one sample of each stays.

    Groups are visited in random order. A group is held out if that reduces the distance Σ_c (h_c - fraction n_c)² / n_c
    of the numbers h_c of held-out samples from the share of the n_c samples of each class; if none does, the one that
    increases it least.

    Args:
        targets: Class indices, int64 (N,); or real values, which count as one class.
        fraction: Share of the samples to hold out.
        generator: Source of randomness.
        groups: The group of each sample, int64 (N,).

    Returns:
        The indices of the held-out samples, int64 and ascending; empty if no group can be held out.
    """
    classes = torch.zeros(len(targets), dtype=torch.int64) if targets.is_floating_point() else targets.cpu()
    numbers, own = groups.cpu().unique(return_inverse=True)
    members = _Groups(own.numpy(), classes.numpy())
    sizes = np.bincount(classes.numpy()).astype(np.float64)
    missing = fraction * sizes
    kept, chosen = sizes.copy(), np.zeros(len(numbers), dtype=bool)
    best: tuple[float, int] | None = None
    for group in torch.randperm(len(numbers), generator=generator).tolist():
        found, counts = members.of(group)
        if (kept[found] <= counts).any():
            continue
        change = float((counts * (counts - 2 * missing[found]) / sizes[found]).sum())
        if change < 0:
            chosen[group] = True
            missing[found] -= counts
            kept[found] -= counts
        elif best is None or change < best[0]:
            best = change, group
    if not chosen.any() and best is not None:
        chosen[best[1]] = True
    return torch.from_numpy(np.flatnonzero(chosen[own.numpy()]))


def check_groups(splits: Splits, where: str) -> None:
    """Raise a `PluginError` unless splits have no groups, or one group number for each training sample."""
    groups, train = splits.groups, splits.train
    count = len(train[0]) if isinstance(train, tuple) else len(train)  # type: ignore[arg-type]  # map-style data sets have a length
    if groups is not None and (groups.dtype != torch.int64 or groups.shape != (count,)):
        what = f"load() returned groups that cannot be used: {groups.dtype} {tuple(groups.shape)}"
        raise PluginError(what, where, "return one group number for each training sample, int64 (N,)")


class _Groups:
    """The numbers of samples of each group by class, only those that are not 0."""

    def __init__(self, groups: np.ndarray, classes: np.ndarray) -> None:
        num_classes = int(classes.max()) + 1
        pairs, self.counts = np.unique(groups * num_classes + classes, return_counts=True)
        self.classes = pairs % num_classes
        self.starts = np.searchsorted(pairs // num_classes, np.arange(int(groups.max()) + 2))

    def of(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the classes of a group, and the number of samples of each."""
        here = slice(self.starts[group], self.starts[group + 1])
        return self.classes[here], self.counts[here]
