"""Loads the ensemble that a run has trained, and evaluates it on data."""

from __future__ import annotations

from pathlib import Path

import torch

from ensemblekit.core.errors import UsageError
from ensemblekit.core.metrics import evaluate, flat_metrics
from ensemblekit.core.registry import Registry
from ensemblekit.data.fingerprint import check_same_data
from ensemblekit.data.loading import Data, load_data
from ensemblekit.data.transforms import ImageTransform
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.inference.metadata import read_info
from ensemblekit.members.build import build_member
from ensemblekit.members.growing import load_weights
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.json_files import as_written
from ensemblekit.runs.run import read_spec
from ensemblekit.training.evaluation import check_outputs


def load_ensemble(path: Path, registry: Registry) -> Ensemble:
    """Load the trained ensemble of a run, in evaluation mode; nothing is unpickled."""
    directory = RunDirectory.open(path)
    spec = read_spec(directory, registry)
    tensors, metadata = directory.read_model()
    with as_written(path / "model.json"):
        info = read_info(metadata, tensors)
        classes = tuple(metadata["classes"]) if metadata["classes"] else None
        transform = ImageTransform.from_json(metadata["transform"]) if metadata["transform"] else None
        models = [(seed_index, spec.member_models[seed_index]) for seed_index in metadata["members"]]
    num_outputs = spec.loss.num_outputs(info)
    networks = []
    for index, (seed_index, model) in enumerate(models):
        network = build_member(model, info.input_shape, num_outputs, spec.seed, seed_index)
        load_weights(network, model, tensors, f"members.{index}.")
        networks.append(network)
    return Ensemble(networks, spec, info, classes, transform, tensors.get("combiner")).eval()


def evaluate_run(path: Path, data: Data | None, registry: Registry) -> dict[str, float]:
    """Compute the metrics of a run's ensemble on the test split of its own data, or of other data of the same form."""
    ensemble = load_ensemble(path, registry)
    if data is None:
        data = load_data(ensemble.spec.data, ensemble.spec.seed)
        recorded = RunDirectory.open(path).environment.get("data")
        check_same_data(recorded, data.fingerprint, ensemble.spec.data.name)
    if (data.info.input_shape, data.info.num_outputs) != (ensemble.info.input_shape, ensemble.info.num_outputs):
        what = f"the data has {data.info.form}, but the run was trained on {ensemble.info.form}"
        raise UsageError(what, str(path), "give data with inputs and outputs of the same shape")
    with torch.no_grad():
        batches = data.test.batches(ensemble.spec.training.batch_size)
        outputs = torch.cat([ensemble.member_outputs(batch.inputs) for batch in batches], dim=1)
    check_outputs(outputs, "test", len(ensemble.members), str(path))
    return flat_metrics(evaluate(outputs, data.test.targets, ensemble.loss, ensemble.combine(outputs)))
