"""Files of new rows, prepared as the rows of the run's training table were."""

from __future__ import annotations

from pathlib import Path

from ensemblekit.core.dataset import Prepared
from ensemblekit.core.errors import DataError
from ensemblekit.data.loading import Data, Split
from ensemblekit.data.sources import check_targets
from ensemblekit.inference.ensemble import Ensemble


def prepare_file(ensemble: Ensemble, path: Path) -> Prepared | None:
    """Read a file and prepare it from what the run has saved; None if its data set has nothing to prepare.

    Runs of version 0.1.0 saved no preparation: their data set fits it again, on the training file.

    Raises:
        DataError: The file cannot be read, or does not have the columns of the training data.
    """
    spec, shape = ensemble.spec, ensemble.info.input_shape
    if ensemble.preparation is not None:
        prepared: Prepared | None = spec.data.prepare(path, ensemble.preparation)
    else:
        features = spec.data.read_features(path, spec.seed)
        prepared = None if features is None else Prepared(features)
    if prepared is not None and prepared.inputs.shape[1:] != shape:
        what = f"expected {shape} features of the run, got {tuple(prepared.inputs.shape[1:])}"
        raise DataError(what, str(path), f'restore the training data of data set "{spec.data.name}"')
    return prepared


def data_of_file(ensemble: Ensemble, path: Path) -> Data:
    """Return the rows of a file as data to evaluate an ensemble on; each split has all of them.

    Raises:
        DataError: The file cannot be prepared, or has no targets.
    """
    prepared = prepare_file(ensemble, path) if ensemble.preparation is not None else None
    if prepared is None:
        what = "the run cannot be evaluated on a file: its data set saved no preparation of new files"
        raise DataError(what, str(path), "name a data set: --data NAME")
    return data_of(ensemble, prepared, str(path))


def data_of(ensemble: Ensemble, prepared: Prepared, where: str) -> Data:
    """Return prepared rows as data to evaluate an ensemble on; each split has all of them.

    Raises:
        DataError: They have no targets.
    """
    if prepared.targets is None:
        raise prepared.no_targets or DataError("the rows have no targets", where, "add the column to predict")
    targets = check_targets(prepared.targets, ensemble.info, where)
    if ensemble.target_scaling is not None:
        targets = ensemble.target_scaling.standardise(targets)
    if targets.is_floating_point():
        targets = targets.float()
    split = Split(prepared.inputs, targets, None)
    return Data(ensemble.info, ensemble.classes, split, None, split, target_scaling=ensemble.target_scaling)
