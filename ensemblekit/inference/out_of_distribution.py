"""Out-of-distribution detection: how well an ensemble's uncertainty tells other data from its own test data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from ensemblekit.core.dataset import Dataset
from ensemblekit.core.errors import DataError
from ensemblekit.core.losses import Loss
from ensemblekit.core.metrics import flat_metrics, uncertainty
from ensemblekit.core.plugin import Task
from ensemblekit.core.ranking import auroc, average_precision, false_positive_rate
from ensemblekit.data.arrays import is_array
from ensemblekit.data.image_dataset import ImageDataset
from ensemblekit.data.loading import Split, load_data
from ensemblekit.data.python_data import split_parts
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.inference.evaluation import Evaluation, by_class, is_path, python_data
from ensemblekit.inference.files import opened
from ensemblekit.inference.inputs import prepared_frame
from ensemblekit.inference.kept_outputs import RunLoader
from ensemblekit.inference.outputs import check_finite
from ensemblekit.inference.prediction import extensions, input_batches
from ensemblekit.spec.reader import build_plugin

MEASURES = {"auroc": auroc, "aupr": average_precision, "fpr95": false_positive_rate}
"""How a score is judged, by the name in `ood_auroc_entropy`."""
SCORES = ("max_probability", "entropy", "mutual_information", "variance")
"""All scores, by the name in `ood_auroc_entropy`."""


def evaluate_ood(ensemble: Ensemble, loader: RunLoader, data: Any, per_class: bool = False) -> Evaluation:
    """Compare a run's own test data with other data by the uncertainty of the ensemble.

    Args:
        ensemble: the ensemble of the run.
        loader: of the run, whose kept outputs on the test data are used.
        data: the other data: see `ensemblekit.evaluate_run`.
        per_class: as for `evaluate_on`.

    Returns:
        The metrics of the test data, and `ood_auroc_SCORE`, `ood_aupr_SCORE` and `ood_fpr95_SCORE` of each score,
        where samples of the other data are the positive ones, and their number `ood_samples`.

    Raises:
        DataError: the other data cannot be read, or has inputs of another shape.
        NumericError: an output is not finite.
    """
    combiner, kept = ensemble.combiner, loader.outputs("test")
    combined = combiner.combine_kept(kept)
    own = uncertainty_scores(combiner.learned(kept.outputs), combined, combiner.loss, ensemble.info.task)
    other = _scores_of(ensemble, other_inputs(ensemble, data, loader))
    metrics: dict[str, Any] = flat_metrics(combiner.metrics(kept)) | separation(own, other)
    if per_class:
        metrics |= by_class(combiner.loss, kept.outputs, combined, kept.targets, ensemble.classes)
    return Evaluation(metrics, len(kept), ensemble.spec.data.name)


def separation(own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    """Measure how well each score (N,) tells other samples, the positive ones, from a run's own."""
    found: dict[str, float] = {}
    for name, negative in own.items():
        scores = torch.cat([negative.cpu(), other[name].cpu()])
        positive = torch.arange(len(scores)) >= len(negative)
        found |= {f"ood_{key}_{name}": float(measure(scores, positive)) for key, measure in MEASURES.items()}
    return {**found, "ood_samples": float(len(next(iter(other.values()))))}


def uncertainty_scores(outputs: Tensor, combined: Tensor, loss: Loss, task: Task) -> dict[str, Tensor]:
    """Return the scores of each sample (N,), higher for stranger ones; in regression only the variance.

    Args:
        outputs: the members' outputs (M, N, C), as they learnt them.
        combined: the ensemble's outputs (N, C), as it learnt them.
        loss: defines what outputs mean.
        task: of the run.
    """
    if task == "regression":
        return {"variance": loss.point(outputs.double()).var(dim=0, correction=0).mean(dim=-1)}
    # float64, since probabilities close to 1 are equal in float32
    members = torch.stack([loss.probabilities(member.double()) for member in outputs])
    uncertain = uncertainty(members)
    return {
        "max_probability": 1 - loss.probabilities(combined.double()).amax(dim=-1),
        "entropy": uncertain.entropy,
        "mutual_information": uncertain.mutual_information,
        "variance": members.var(dim=0, correction=0).mean(dim=-1),
    }


@torch.no_grad()
def _scores_of(ensemble: Ensemble, batches: Iterable[Tensor]) -> dict[str, Tensor]:
    networks = torch.cat([ensemble.network_outputs(inputs).cpu() for inputs in batches], dim=1)
    outputs = ensemble.predictions_of(networks)
    check_finite(outputs, lambda index: f"sample {index} of the other data")
    return uncertainty_scores(outputs, ensemble.combine_networks(networks), ensemble.loss, ensemble.info.task)


def other_inputs(ensemble: Ensemble, data: Any, loader: RunLoader) -> Iterator[Tensor]:
    """Yield batches of the inputs of other data, prepared as the run's test data; targets are not used.

    Raises:
        DataError: the data cannot be read, or has inputs of another shape.
    """
    if isinstance(data, Path) or (isinstance(data, str) and is_path(data, loader.registry)):
        yield from _inputs_of_files(ensemble, str(data))
        return
    if (prepared := prepared_frame(ensemble.spec.data, ensemble.preparation, data)) is not None:
        yield from prepared.inputs.split(ensemble.spec.training.batch_size)
        return
    if isinstance(data, str | Mapping):
        split = _split_of_dataset(ensemble, build_plugin(Dataset, data, loader.registry))
    else:
        split = python_data(ensemble, _without_targets(ensemble, data)).test
    for batch in split.to(ensemble.device).batches(ensemble.spec.training.batch_size):
        yield batch.inputs


def _inputs_of_files(ensemble: Ensemble, path: str) -> Iterator[Tensor]:
    with opened([path], extensions(ensemble)) as (files, failures):
        if failures:
            raise failures[0]
        for _, inputs in input_batches(ensemble, files, failures):
            if failures:
                raise failures[0]
            yield inputs
        if failures:
            raise failures[0]


def _split_of_dataset(ensemble: Ensemble, dataset: Dataset) -> Split:
    """Return the test samples of a data set; images are normalised as the run's own, not by their own statistics."""
    split, transform = load_data(dataset, ensemble.spec.seed).test, ensemble.transform
    stored = split.inputs[:1].shape[1:] if isinstance(split.inputs, Tensor) else split.inputs.example().shape
    expected = ensemble.info.input_shape if transform is None else transform.stored_shape
    if tuple(stored) != expected:
        what = f"expected inputs of shape {expected}, as in the run, got {tuple(stored)}"
        fix = "give data with inputs of the same shape"
        same_channels = transform is not None and len(stored) == 3 and stored[0] == expected[0]
        if same_channels and isinstance(dataset, ImageDataset) and expected[1] == expected[2]:
            fix = f'resize them: {{name="{dataset.name}", size={expected[1]}}}'
        raise DataError(what, f'data set "{dataset.name}"', fix)
    return Split(split.inputs, split.targets, transform)


def _without_targets(ensemble: Ensemble, data: Any) -> Any:
    """Return Python data with targets that fit any run: the classes of other data are not those of the run."""
    inputs = data if is_array(data) else split_parts(data)[-1]
    if not is_array(inputs) and isinstance(inputs, tuple | list) and len(inputs) == 2:
        inputs = inputs[0]
    shape = (len(inputs),) if ensemble.info.task == "classification" else (len(inputs), ensemble.info.num_outputs)
    dtype = torch.int64 if ensemble.info.task == "classification" else torch.float64
    targets = torch.zeros(shape, dtype=dtype)
    return (inputs, targets) if is_array(inputs) else _InputsOnly(inputs, targets)


class _InputsOnly(TorchDataset[Any]):
    """The inputs of a map-style data set, with other targets."""

    def __init__(self, dataset: Any, targets: Tensor) -> None:
        self.dataset, self.targets = dataset, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index][0], self.targets[index]
