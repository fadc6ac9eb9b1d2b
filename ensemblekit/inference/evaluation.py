"""Evaluates a trained ensemble on data: its own test data, another data set, or data passed in Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.confusion import class_report, confusion_matrix, label_report
from ensemblekit.core.dataset import Dataset
from ensemblekit.core.errors import DataError, UsageError
from ensemblekit.core.label_metrics import predicted_labels
from ensemblekit.core.losses import Loss
from ensemblekit.core.metrics import evaluate, flat_metrics
from ensemblekit.core.out_of_fold import OUT_OF_FOLD
from ensemblekit.core.registry import Registry
from ensemblekit.core.tasks import task_of
from ensemblekit.data.arrays import frames_of
from ensemblekit.data.fingerprint import check_same_data
from ensemblekit.data.image_dataset import ImageDataset
from ensemblekit.data.loading import Data, Split, load_data
from ensemblekit.data.python_data import read_parts, split_parts
from ensemblekit.data.sources import TensorSource, make_source
from ensemblekit.inference.combining import Combiner
from ensemblekit.inference.coverage import Coverage, measure_coverage
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.inference.inputs import prepared_frame
from ensemblekit.inference.kept_outputs import RunLoader
from ensemblekit.inference.outputs import check_finite
from ensemblekit.inference.tables import data_of, data_of_file
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.run import read_spec
from ensemblekit.spec.reader import build_plugin


def evaluation_data(ensemble: Ensemble, path: Path, data: Any, registry: Registry) -> Data:
    """Load the data that the ensemble of a run is evaluated on."""
    if isinstance(data, Path) or (isinstance(data, str) and is_path(data, registry)):
        return data_of_file(ensemble, Path(data))
    frames = frames_of(data)
    if frames and (prepared := prepared_frame(ensemble.spec.data, ensemble.preparation, frames[-1])) is not None:
        return data_of(ensemble, prepared, "the frame")
    if data is not None and not isinstance(data, str | Mapping):
        return python_data(ensemble, split_parts(data)[-1])
    dataset = ensemble.spec.data if data is None else build_plugin(Dataset, data, registry)
    loaded = load_data(dataset, ensemble.spec.seed)
    if data is None:
        check_same_data(RunDirectory.open(path).environment.get("data"), loaded.fingerprint, dataset.name)
    check_form(ensemble, loaded)
    return loaded


def is_path(data: str, registry: Registry) -> bool:
    """Whether a text is the path of a file or a folder rather than the name of a data set."""
    return data not in registry.plugins("dataset") and ("." in data or "/" in data or Path(data).exists())


class Evaluation(dict[str, Any]):
    """Metrics by name, and what they were computed of.

    Args:
        metrics: the metrics.
        num_samples: the number of samples.
        trained_on: name of the data set that the run was trained on.
        combiner: how the members' outputs were combined, and calibrated.
    """

    def __init__(
        self, metrics: Mapping[str, Any], num_samples: int, trained_on: str, combiner: Combiner | None = None
    ) -> None:
        super().__init__(metrics)
        self.num_samples, self.trained_on = num_samples, trained_on
        self.combiner = "" if combiner is None else combiner.name
        calibration = None if combiner is None else combiner.calibration
        self.calibration = None if calibration is None else calibration.kind
        self.conformal = None if combiner is None else combiner.conformal
        self.is_plain = combiner is None or not (combiner.is_chosen or calibration)
        """Whether the methods combine, and nothing is calibrated."""


def check_form(ensemble: Ensemble, data: Data) -> None:
    """Raise a `UsageError` unless data has inputs and outputs like an ensemble's."""
    if (data.info.input_shape, data.info.num_outputs) != (ensemble.info.input_shape, ensemble.info.num_outputs):
        what = f"the data has {data.info.form}, but the run was trained on {ensemble.info.form}"
        raise UsageError(what, "data", "give data with inputs and outputs of the same shape")


def python_data(ensemble: Ensemble, part: Any) -> Data:
    """Return all samples of a pair (X, y) or a data set, prepared as the run's test data.

    Raises:
        DataError: a sample does not fit the ensemble.
    """
    label = "data"
    (samples,) = read_parts([part], [label], ensemble.classes)
    dataset = ensemble.spec.data
    size = dataset.size if isinstance(dataset, ImageDataset) else None
    source = make_source(samples.source, ensemble.info, size, label)
    source = source.checked(source.example(), in_memory=False)
    shape = tuple(source.example().shape)
    expected = ensemble.info.input_shape if ensemble.transform is None else ensemble.transform.stored_shape
    if shape != expected:
        raise DataError(f"expected inputs of shape {expected}, got {shape}", label, "give inputs like the run's")
    inputs = source.inputs if isinstance(source, TensorSource) else source
    split = Split(inputs, source.targets, ensemble.transform)
    return Data(ensemble.info, ensemble.classes, split, None, split)


def evaluate_on(
    ensemble: Ensemble,
    data: Data,
    per_class: bool = False,
    combiner: Combiner | None = None,
    inputs: Iterable[Tensor] | None = None,
) -> Evaluation:
    """Compute the metrics of an ensemble on the test split of data.

    Args:
        ensemble: the trained ensemble.
        data: with inputs and outputs like the ensemble's; real targets in any units.
        per_class: whether to add `classes`, for classes and labels, `confusion`, for classes, and `set_sizes` if the
            run has prediction sets.
        combiner: how to combine the members' outputs. Default: as the ensemble does.
        inputs: batches of network inputs in place of those of the test split, in the order of its samples.

    Raises:
        NumericError: an output is not finite.
    """
    combiner = combiner or ensemble.combiner
    split = data.test.to(ensemble.device)
    with torch.no_grad():
        if inputs is None:
            inputs = (batch.inputs for batch in split.batches(ensemble.spec.training.batch_size))
        networks = torch.cat([ensemble.network_outputs(batch) for batch in inputs], dim=1)
        outputs = ensemble.predictions_of(networks)
        check_finite(outputs, lambda index: f"sample {index} of the evaluation data")
        used = networks if combiner.objective.combines_more else outputs
        combined = combiner.combine_networks(used, len(outputs) // combiner.num_members)
    targets = _learned_targets(ensemble, data, split.targets)
    metrics = _metrics(combiner, outputs, combined, targets, ensemble.classes, per_class)
    return Evaluation(metrics, len(targets), ensemble.spec.data.name, combiner)


def evaluate_kept(loader: RunLoader, combiner: Combiner, per_class: bool = False) -> Evaluation:
    """Compute the metrics of a run's kept test outputs, combined in some way; arguments as for `evaluate_on`."""
    kept = loader.outputs("test")
    if combiner.objective.combines_more and kept.networks is None:
        what = f'the combiner "{combiner.name}" needs more than the members\' outputs, and the run has not kept it'
        raise UsageError(what, str(loader.directory.path), "train with this combiner: ensemble.combiner")
    outputs, targets = combiner.learned(kept.outputs), combiner.learned_targets(kept.targets)
    metrics = _metrics(combiner, outputs, combiner.combine_kept(kept), targets, loader.classes, per_class)
    if read_spec(loader.directory, loader.registry).data.folds is not None:
        metrics |= flat_metrics(combiner.metrics(loader.outputs(OUT_OF_FOLD)), OUT_OF_FOLD)
    return Evaluation(metrics, len(kept), read_spec(loader.directory, loader.registry).data.name, combiner)


def recorded_out_of_fold(directory: RunDirectory) -> dict[str, float]:
    """Return the metrics of a run's out-of-fold predictions, as its result has them; empty if it has no folds."""
    metrics = (directory.read_result() or {}).get("metrics", {})
    return {name: value for name, value in metrics.items() if name.startswith(f"{OUT_OF_FOLD}_")}


def _metrics(
    combiner: Combiner,
    outputs: Tensor,
    combined: Tensor,
    targets: Tensor,
    classes: tuple[str, ...] | None,
    per_class: bool,
) -> dict[str, Any]:
    """Compute all metrics of outputs (M, N, C) and what they combine to (N, C), as the members learnt them."""
    scaling = combiner.target_scaling
    restore = None if scaling is None else scaling.restore
    found = evaluate(outputs, targets, combiner.loss, combined, restore, combiner.extra_metrics)
    coverage = measure_coverage(combiner, outputs, combined, targets)
    metrics: dict[str, Any] = flat_metrics(found if coverage is None else found | coverage.metrics())
    return metrics | (by_class(combiner.loss, outputs, combined, targets, classes, coverage) if per_class else {})


def _learned_targets(ensemble: Ensemble, data: Data, targets: Tensor) -> Tensor:
    """Convert real targets to the units that the members learnt; class indices stay as they are."""
    if not targets.is_floating_point():
        return targets
    if data.target_scaling != ensemble.target_scaling:
        targets = targets if data.target_scaling is None else data.target_scaling.restore(targets)
        targets = targets if ensemble.target_scaling is None else ensemble.target_scaling.standardise(targets)
    return targets.to(ensemble.dtype)


def by_class(
    loss: Loss,
    outputs: Tensor,
    combined: Tensor,
    targets: Tensor,
    names: tuple[str, ...] | None,
    coverage: Coverage | None = None,
) -> dict[str, Any]:
    """Return `classes`, for classes and labels, `confusion`, for classes, and `set_sizes` of prediction sets."""
    task = task_of(loss, outputs, targets)
    if task.name == "multilabel":
        return {"classes": label_report(predicted_labels(loss.probabilities(combined)), targets.bool(), names)}
    if task.name != "classification":
        return {}
    probabilities, classes = loss.probabilities(combined), task.target_for_metrics(targets, loss)
    confusion = confusion_matrix(probabilities.argmax(dim=-1), classes, probabilities.shape[-1]).cpu()
    found: dict[str, Any] = {"classes": class_report(confusion, names), "confusion": confusion.tolist()}
    if coverage is not None:
        for row, share in zip(found["classes"], coverage.by_class(len(confusion)), strict=True):
            row["coverage"] = share
        found["set_sizes"] = coverage.by_size()
    return found
