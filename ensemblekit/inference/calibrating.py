"""Calibrates a run: fits a calibration to its validation outputs, measures it by cross-fitting, and keeps it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ensemblekit.core.errors import UsageError, choices
from ensemblekit.inference.calibration import Calibration
from ensemblekit.inference.calibrators import CALIBRATORS, Temperature
from ensemblekit.inference.conforming import fit_conformal
from ensemblekit.inference.cross_fitting import FOLDS, checked_classes, cross_fitted, fit_calibration
from ensemblekit.inference.kept_calibration import KeptCalibration
from ensemblekit.inference.kept_outputs import RunLoader
from ensemblekit.inference.reliability import ReliabilityBin, probability_scores, reliability_table
from ensemblekit.runs.own_files import CALIBRATION


@dataclass(frozen=True)
class CalibrationResult:
    """What a calibration does to the probabilities of a run, measured by cross-fitting on its validation data."""

    path: Path
    calibration: Calibration
    """Fitted to all validation data."""
    combiner: str
    """The name of the combination that is calibrated."""
    num_samples: int
    """Validation samples."""
    before: dict[str, float]
    """nll, ece, adaptive_ece, brier and accuracy without calibration."""
    after: dict[str, float]
    """The same of probabilities that were calibrated by a fit without the sample's own fold."""
    reliability_before: list[ReliabilityBin] = field(repr=False)
    reliability_after: list[ReliabilityBin] = field(repr=False)
    notices: tuple[str, ...] = ()

    @property
    def temperature(self) -> float | None:
        """The temperature, if there is a single one."""
        return self.calibration.temperature

    def to_dict(self) -> dict[str, Any]:
        """Return one flat object: method, combiner, temperature, and every score before and after."""
        values: dict[str, Any] = {"method": self.calibration.kind, "combiner": self.combiner}
        if self.temperature is not None:
            values["temperature"] = self.temperature
        elif self.calibration.member_temperatures:
            values |= {f"temperature_{i}": value for i, value in enumerate(self.calibration.member_temperatures)}
        values |= {"samples": self.num_samples, "folds": FOLDS}
        for name, value in self.before.items():
            values |= {f"{name}_before": value, f"{name}_after": self.after[name]}
        return values | {"path": str(self.path)}


def calibrate_run(loader: RunLoader, kind: str, members: bool = False, data: Any = None) -> CalibrationResult:
    """Fit a calibration to the validation outputs of a run, and keep it in the run directory.

    Prediction sets that the run has are fitted again.

    Raises:
        UsageError: the calibration is unknown, or the run has no classes or no validation data.
        DataError: there are too few validation samples, or those of one class only.
        NumericError: an output is not finite.
    """
    directory = loader.directory
    _check(loader, kind, members)
    combiner, kept = loader.plain_combiner(), loader.outputs("validation", data)
    classes = checked_classes(combiner, kept, str(directory.path))
    calibration = fit_calibration(kind, members, combiner, kept)
    before = combiner.log_probabilities(kept)
    after = cross_fitted(kind, members, combiner, kept, loader.seed)
    scores = probability_scores(before, classes), probability_scores(after, classes)
    previous = KeptCalibration.read_intact(directory, combiner.loss)
    facts = {"num_samples": len(classes), "before": scores[0], "after": scores[1]}
    renewed = replace(previous, combiner=combiner.name, calibration=calibration, facts=facts)
    _fitted_again(loader, renewed, data).write(directory)
    return CalibrationResult(
        directory.path,
        calibration,
        combiner.name,
        len(classes),
        *scores,
        reliability_table(before.exp(), classes),
        reliability_table(after.exp(), classes),
        tuple(_notices(calibration, *scores, previous)),
    )


def undo_calibration(loader: RunLoader, data: Any = None) -> bool:
    """Remove the calibration of a run, damaged or not; returns whether there was one.

    Prediction sets that the run has are fitted again.
    """
    directory, loss = loader.directory, loader.plain_combiner().loss
    previous = KeptCalibration.read_intact(directory, loss)
    damaged = os.path.lexists(directory.path / CALIBRATION) and not previous.combiner
    if previous.calibration is None and not damaged:
        return False
    _fitted_again(loader, previous.without_calibration(), data).write(directory)
    return True


def _check(loader: RunLoader, kind: str, members: bool) -> None:
    path = loader.directory.path
    if kind not in CALIBRATORS:
        raise UsageError(f'there is no calibration "{kind}"', "calibrate", choices(kind, CALIBRATORS))
    if members and kind != Temperature.name:
        what = f'only a temperature can be fitted to each member, not "{kind}"'
        raise UsageError(what, "calibrate", "leave out members, or use temperature")
    if loader.info.task != "classification":
        what = f"only probabilities of classes can be calibrated, but the task of the run is {loader.info.task}"
        intervals = f"for intervals of values: ensemblekit conform {path}"
        is_regression = loader.info.task == "regression"
        raise UsageError(what, str(path), intervals if is_regression else "use a run for classification")


def _fitted_again(loader: RunLoader, renewed: KeptCalibration, data: Any) -> KeptCalibration:
    """Fit prediction sets again, if there are any: the probabilities are others."""
    old = renewed.conformal
    if old is None:
        return renewed
    kept = loader.outputs("validation", data)
    return replace(renewed, conformal=fit_conformal(loader, renewed, kept, old.error, old.score))


def _notices(
    calibration: Calibration, before: Mapping[str, float], after: Mapping[str, float], previous: KeptCalibration
) -> Iterator[str]:
    if calibration.problem:
        yield calibration.problem
    elif after["nll"] > before["nll"]:
        yield "on samples that it was not fitted to, this calibration makes the NLL worse; --undo removes it"
    if previous.conformal is not None:
        yield f"the prediction sets ({previous.conformal.score}) were fitted again"
