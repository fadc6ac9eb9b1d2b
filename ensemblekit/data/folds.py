"""Folds of the training samples, for members that are each trained without one of them."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from ensemblekit.core.dataset import Dataset
from ensemblekit.core.errors import DataError, PluginError
from ensemblekit.core.seeds import generator as seeded
from ensemblekit.data.sources import Source


def train_folds(groups: Tensor | None, train: Source, dataset: Dataset, seed: int) -> Tensor | None:
    """Return the fold of each training sample (N,) if a data set asks for folds; None if it does not.

    Args:
        groups: those of all training samples, as `Splits.groups`.
        train: the training samples that are left after others were held out or left out.
        dataset: their data set.
        seed: of the splits.

    Raises:
        DataError: there are fewer samples, or groups of samples, than folds.
        PluginError: the data set returned groups that cannot be used.
    """
    if dataset.folds is None:
        return None
    own = None
    if groups is not None:
        if groups.dtype != torch.int64 or groups.ndim != 1 or len(groups) <= int(train.indices.max()):
            what = f"load() returned groups that cannot be used: {groups.dtype} {tuple(groups.shape)}"
            fix = "return one group number for each training sample, int64 (N,)"
            raise PluginError(what, f'data set "{dataset.name}"', fix, plugin=dataset.name)
        own = groups.cpu()[train.indices]
    try:
        return make_folds(train.targets.cpu(), dataset.folds, seeded(seed, "folds"), own)
    except DataError as error:
        raise DataError(error.what, f'data set "{dataset.name}", train', error.fix) from None


def make_folds(targets: Tensor, num_folds: int, generator: Generator, groups: Tensor | None = None) -> Tensor:
    """Divide samples into folds of about the same size.

    Args:
        targets: Class indices, int64 (N,), which are stratified: every fold has about the same number of each class.
            Real values or labels are not stratified.
        num_folds: Number of folds, at least 2.
        generator: Source of randomness, as of `ensemblekit.generator`.
        groups: Group number of each sample, int64 (N,): all samples of a group are in one fold. None: no groups.

    Returns:
        The fold of each sample, from 0, int64 (N,).

    Raises:
        DataError: There are fewer samples, or fewer groups, than folds.
    """
    is_classes = targets.ndim == 1 and not targets.is_floating_point()
    classes = targets if is_classes else torch.zeros(len(targets), dtype=torch.int64)
    units, count = ("samples", len(targets)) if groups is None else ("groups of samples", len(groups.unique()))
    if count < num_folds:
        what = f"{count} {units} cannot be divided into {num_folds} folds"
        raise DataError(what, "data.folds", f"set data.folds to at most {count}" if count > 1 else "remove data.folds")
    if groups is not None:
        return _grouped(classes, num_folds, generator, groups)
    shuffled = torch.randperm(len(classes), generator=generator)
    by_class = shuffled[classes[shuffled].argsort(stable=True)]
    folds = torch.empty_like(classes)
    # dealt out like cards, one class after the other: folds differ by at most one sample of each class and in all
    folds[by_class] = torch.arange(len(classes)) % num_folds
    return folds


def _grouped(classes: Tensor, num_folds: int, generator: Generator, groups: Tensor) -> Tensor:
    """Put each group, the largest first, into the fold where the classes stay most evenly spread."""
    _, numbers = groups.unique(return_inverse=True)
    num_groups, num_classes = int(numbers.max()) + 1, int(classes.max()) + 1
    counts = torch.zeros(num_groups, num_classes, dtype=torch.float64)
    counts.index_put_((numbers, classes), torch.ones(len(classes), dtype=torch.float64), accumulate=True)
    # the samples of all classes count like one more class, so that folds are of the same size and none stays empty
    counts = torch.cat([counts, counts.sum(dim=1, keepdim=True)], dim=1)
    shares = counts / counts.sum(dim=0).clamp_min(1)
    order = torch.randperm(num_groups, generator=generator)
    order = order[counts[order, -1].argsort(descending=True, stable=True)]
    filled = torch.zeros(num_folds, num_classes + 1, dtype=torch.float64)
    fold_of = torch.empty(num_groups, dtype=torch.int64)
    for group in order.tolist():
        # the sum of squared shares grows by 2 filled · share + share²: least where there is least of the same classes
        fold_of[group] = fold = int((filled @ shares[group]).argmin())
        filled[fold] += shares[group]
    return fold_of[numbers]
