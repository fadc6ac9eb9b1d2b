"""Gives a run prediction sets or intervals: fits their threshold to its validation outputs, and keeps it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ensemblekit.core.errors import DataError, UsageError, choices
from ensemblekit.core.losses import pick
from ensemblekit.inference.combining import Combiner
from ensemblekit.inference.conformal import (
    CLASS_SCORES,
    LEAST_SPREAD,
    VALUE_SCORES,
    Conformal,
    at_least,
    class_scores,
    quantile,
    quantile_rank,
    uniform_by_position,
)
from ensemblekit.inference.coverage import values_and_spreads
from ensemblekit.inference.cross_fitting import checked_classes, cross_fitted
from ensemblekit.inference.kept_calibration import KeptCalibration
from ensemblekit.inference.kept_outputs import RunLoader
from ensemblekit.inference.outputs import check_finite
from ensemblekit.runs.outputs import KeptOutputs
from ensemblekit.runs.own_files import CALIBRATION

SCORES: Mapping[str, tuple[str, ...]] = {"classification": CLASS_SCORES, "regression": VALUE_SCORES}
"""By task; the first is the default."""


@dataclass(frozen=True)
class ConformalResult:
    """The prediction sets or intervals of a run, and what coverage to expect of them."""

    path: Path
    conformal: Conformal
    combiner: str
    """The name of the combination that they are for."""
    calibration: str | None
    """The kind of the calibration that is applied first; None if the run is not calibrated."""
    mean_size: float
    """The mean number of classes in a set, or the mean width of an interval, on the validation data."""
    notices: tuple[str, ...] = ()

    @property
    def coverage_law(self) -> tuple[int, int]:
        """The parameters a and b of the Beta distribution of the coverage on new data, over validation data."""
        rank = quantile_rank(self.conformal.num_samples, self.conformal.error)
        return rank, self.conformal.num_samples + 1 - rank

    @property
    def expected_coverage(self) -> float:
        """The mean of the coverage's distribution, at least 1 - error."""
        a, b = self.coverage_law
        return a / (a + b)

    @property
    def coverage_deviation(self) -> float:
        """The standard deviation of the coverage's distribution: how much the choice of validation samples matters."""
        a, b = self.coverage_law
        return math.sqrt(a * b / ((a + b) ** 2 * (a + b + 1)))

    def to_dict(self) -> dict[str, Any]:
        """Return one flat object."""
        conformal = self.conformal
        several = len(conformal.thresholds) > 1
        thresholds = {f"threshold_{i}" if several else "threshold": each for i, each in enumerate(conformal.thresholds)}
        size = "mean_set_size" if conformal.is_for_classes else "mean_interval_width"
        return {
            "score": conformal.score,
            "error": conformal.error,
            "combiner": self.combiner,
            "calibration": self.calibration,
            "samples": conformal.num_samples,
            **thresholds,
            "expected_coverage": self.expected_coverage,
            "coverage_deviation": self.coverage_deviation,
            size: self.mean_size,
            "path": str(self.path),
        }


def conform_run(loader: RunLoader, error: float, score: str | None = None, data: Any = None) -> ConformalResult:
    """Fit prediction sets or intervals to the validation outputs of a run, and keep them in the run directory.

    Args:
        loader: that of the run.
        error: the probability of a miss, between 0 and 1.
        score: "lac", "aps" or "raps" for classes, "absolute" or "normalised" for values. Default: the first of these.
        data: the same data as for training, if it was passed in Python and the run has kept no outputs.

    Raises:
        UsageError: the error or the score cannot be used, there is no validation data, or too little for the error.
        DataError: there are validation samples of one class only.
        NumericError: an output is not finite.
    """
    directory = loader.directory
    scores = SCORES.get(loader.info.task, ())
    if not scores:
        what = f"there are no prediction sets for the task {loader.info.task}"
        raise UsageError(what, str(directory.path), f"use a run for {' or '.join(SCORES)}")
    score = score or scores[0]
    if score not in scores:
        what = f'no score "{score}" for {loader.info.task}'
        raise UsageError(what, "conform", choices(score, scores))
    if not 0 < error < 1:
        raise UsageError(f"the error is {error}", "conform", "give a probability between 0 and 1, such as 0.1")
    combiner, kept = loader.plain_combiner(), loader.outputs("validation", data)
    previous = KeptCalibration.read(directory, combiner.loss)
    conformal = fit_conformal(loader, previous, kept, error, score)
    renewed = replace(previous, combiner=combiner.name, conformal=conformal)
    renewed.write(directory)
    used = replace(combiner, calibration=renewed.calibration)
    calibration = None if renewed.calibration is None else renewed.calibration.kind
    size = _mean_size(conformal, used, kept)
    return ConformalResult(
        directory.path, conformal, combiner.name, calibration, size, tuple(_notices(used, calibration, error))
    )


def undo_conform(loader: RunLoader) -> bool:
    """Remove the prediction sets or intervals of a run; returns whether there were any."""
    directory, loss = loader.directory, loader.plain_combiner().loss
    previous = KeptCalibration.read_intact(directory, loss)
    damaged = os.path.lexists(directory.path / CALIBRATION) and not previous.combiner
    if previous.conformal is None and not damaged:
        return False
    previous.without_conformal().write(directory)
    return True


def fit_conformal(
    loader: RunLoader, calibrated: KeptCalibration, kept: KeptOutputs, error: float, score: str
) -> Conformal:
    """Fit prediction sets or intervals to validation outputs, after the calibration if there is one."""
    combiner, where = loader.plain_combiner(), str(loader.directory.path)
    fitted = Conformal(score, error, (math.inf,), len(kept), loader.seed)
    if not fitted.is_for_classes:
        check_finite(kept.outputs, lambda index: f"sample {index} of the validation data of {where}")
        _check_count(len(kept), error, where)
        return _fit_intervals(fitted, combiner, kept, where)
    classes = checked_classes(combiner, kept, where)
    _check_count(len(kept), error, where)
    calibration = calibrated.calibration
    if calibration is None:
        logs = combiner.log_probabilities(kept)
    else:
        # by folds: a sample must not have helped to calibrate its own probabilities
        members = len(calibration.member_temperatures) > 1
        logs = cross_fitted(calibration.kind, members, combiner, kept, loader.seed)
    uniform = uniform_by_position(loader.seed, "validation", len(kept))
    scores = pick(class_scores(score, logs.exp(), uniform), classes)
    return replace(fitted, thresholds=(quantile(scores, error),))


def _fit_intervals(fitted: Conformal, combiner: Combiner, kept: KeptOutputs, where: str) -> Conformal:
    values, spreads = _values_and_spreads(combiner, kept)
    errors = (kept.targets.reshape(len(kept), -1).double() - values).abs()
    least: tuple[float, ...] = ()
    if fitted.score == "normalised":
        least = tuple((LEAST_SPREAD * spreads.median(dim=0).values).tolist())
        if min(least) <= 0:
            what = "the members do not differ: errors cannot be divided by their spread"
            raise DataError(what, where, "use --score absolute, or more than one member")
        errors = errors / at_least(spreads, least)
    thresholds = tuple(quantile(column, fitted.error) for column in errors.unbind(dim=-1))
    return replace(fitted, thresholds=thresholds, least_spreads=least)


def _values_and_spreads(combiner: Combiner, kept: KeptOutputs) -> tuple[Tensor, Tensor]:
    return values_and_spreads(combiner, combiner.learned(kept.outputs), combiner.combine_kept(kept))


def _check_count(num_samples: int, error: float, where: str) -> None:
    """Refuse an error that so few samples cannot guarantee: every set would hold every class."""
    if quantile_rank(num_samples, error) > num_samples:
        least = math.ceil(1e4 / (num_samples + 1)) / 1e4
        needed = math.ceil(round(1 / error, 9)) - 1
        what = f"{num_samples} validation samples are too few for an error of {error:g}: {needed} are needed, "
        what += "else only sets of all classes, or infinite intervals, have this guarantee"
        fix = f"use --error {least:g} or more, or train with more validation data: data.validation_fraction"
        raise UsageError(what, where, fix)


def _mean_size(conformal: Conformal, combiner: Combiner, kept: KeptOutputs) -> float:
    if conformal.is_for_classes:
        uniform = uniform_by_position(conformal.seed, "validation", len(kept))
        return float(conformal.sets(combiner.log_probabilities(kept).exp(), uniform).sum(dim=-1).double().mean())
    return float(2 * conformal.half_widths(_values_and_spreads(combiner, kept)[1]).mean())


def _notices(combiner: Combiner, calibration: str | None, error: float) -> Iterator[str]:
    fitted = [f"the calibration ({calibration})"] if calibration is not None else []
    fitted += [f"the combination ({combiner.name})"] if combiner.fitted is not None else []
    if calibration is not None:
        yield f"applied after the calibration ({calibration}), which was cross-fitted for the threshold"
    if fitted:
        yield (
            f"{' and '.join(fitted)} and the threshold use the same validation data: "
            f"a coverage of {1 - error:g} is then close, not guaranteed"
        )
