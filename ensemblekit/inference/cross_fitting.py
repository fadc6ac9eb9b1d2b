"""Fits calibrations to kept outputs: to all samples, or by folds, so that no sample is calibrated by its own label."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from ensemblekit.core.errors import DataError
from ensemblekit.core.seeds import generator
from ensemblekit.inference.calibration import Calibration, logits_of
from ensemblekit.inference.calibrators import CALIBRATORS, Temperature
from ensemblekit.inference.combining import Combiner
from ensemblekit.inference.outputs import check_finite
from ensemblekit.runs.outputs import KeptOutputs

FOLDS = 5
MIN_SAMPLES = 10


def true_classes(combiner: Combiner, kept: KeptOutputs) -> Tensor:
    """Return the true classes of kept outputs, int64 (N,)."""
    return (kept.targets.flatten() > 0 if combiner.loss.takes == "margins" else kept.targets).long()


def checked_classes(combiner: Combiner, kept: KeptOutputs, where: str) -> Tensor:
    """Return the true classes of validation outputs that something is to be fitted to.

    Raises:
        DataError: there are too few samples, samples of one class only, or several classes for one sample.
        NumericError: an output is not finite.
    """
    check_finite(kept.outputs, lambda index: f"sample {index} of the validation data of {where}")
    fix = "train with more validation data: data.validation_fraction"
    if len(kept) < MIN_SAMPLES:
        raise DataError(f"{len(kept)} validation samples are too few: at least {MIN_SAMPLES} are needed", where, fix)
    if kept.targets.ndim > 1 and kept.targets.shape[1:] != (1,):
        what = f"each sample has {kept.targets.shape[1]} targets, but one class is expected"
        raise DataError(what, where, "use a run with one class for each sample")
    classes = true_classes(combiner, kept)
    if len(classes.unique()) == 1:
        what = (
            f"all {len(classes)} validation samples are of class {int(classes[0])}: nothing can be fitted to one class"
        )
        raise DataError(what, where, fix)
    return classes


def fit_calibration(kind: str, members: bool, combiner: Combiner, kept: KeptOutputs) -> Calibration:
    """Fit a calibration to kept outputs.

    Args:
        kind: one of `CALIBRATORS`.
        members: whether to fit a temperature to each member instead of one calibration to the ensemble.
        combiner: the combination that is calibrated, itself uncalibrated.
        kept: outputs and targets.
    """
    loss, classes = combiner.loss, true_classes(combiner, kept)
    passes = len(kept.outputs) // combiner.num_members
    if members:
        each = logits_of(kept.outputs, loss).double().unflatten(0, (passes, -1)).transpose(0, 1).flatten(1, 2)
        fits = [Temperature.fit(logits, classes.repeat(passes)) for logits in each]
        undetermined = any(fit.is_undetermined for fit in fits)
        return Calibration(kind, loss, None, tuple(fit.temperature for fit in fits), undetermined)
    if kind == Temperature.name and combiner.mixes_probabilities:
        fit = _mixture_temperature(combiner, kept, classes, passes)
        return Calibration(kind, loss, None, (fit.temperature,), fit.is_undetermined)
    logits = logits_of(combiner.combine_kept(kept), loss).double()
    return Calibration(kind, loss, CALIBRATORS[kind].fit(logits, classes))


def _mixture_temperature(combiner: Combiner, kept: KeptOutputs, classes: Tensor, passes: int) -> Temperature:
    """Fit the joint temperature of the members' outputs, after which their probabilities are averaged."""
    networks = (kept.outputs if kept.networks is None else kept.networks).double()

    def nll(temperature: Tensor) -> Tensor:
        scaled = combiner.scaled_networks(networks, temperature.reshape(1), passes)
        return functional.nll_loss(combiner.loss.log_probabilities(combiner.combine_networks(scaled, passes)), classes)

    return Temperature.minimising(nll, logits_of(kept.outputs, combiner.loss))


def cross_fitted(kind: str, members: bool, combiner: Combiner, kept: KeptOutputs, seed: int) -> Tensor:
    """Return the log-probabilities (N, K), float64, of samples calibrated by a fit to the other folds.

    Args:
        kind: as for `fit_calibration`, like the next ones.
        members: as for `fit_calibration`.
        combiner: as for `fit_calibration`.
        kept: outputs and targets.
        seed: that of the run, from which the folds are sampled.
    """
    folds = stratified_folds(true_classes(combiner, kept), FOLDS, seed)
    parts: list[tuple[Tensor, Tensor]] = []
    for fold in range(FOLDS):
        rest, own = (folds != fold).nonzero().flatten(), (folds == fold).nonzero().flatten()
        calibrated = replace(combiner, calibration=fit_calibration(kind, members, combiner, take(kept, rest)))
        parts.append((own, calibrated.log_probabilities(take(kept, own))))
    values = torch.cat([part for _, part in parts])
    return torch.empty_like(values).index_copy(0, torch.cat([own for own, _ in parts]), values)


def stratified_folds(classes: Tensor, num_folds: int, seed: int) -> Tensor:
    """Return the fold of each sample (N,): random, with the samples of each class dealt out evenly."""
    random = torch.randperm(len(classes), generator=generator(seed, "calibration", "folds"))
    by_class = random[classes[random].argsort(stable=True)]
    folds = torch.empty(len(classes), dtype=torch.int64)
    folds[by_class] = torch.arange(len(classes)) % num_folds
    return folds


def take(kept: KeptOutputs, index: Tensor) -> KeptOutputs:
    """Return the kept outputs of some samples."""
    networks = None if kept.networks is None else kept.networks[:, index]
    return KeptOutputs(kept.outputs[:, index], kept.targets[index], kept.index[index], networks)
