"""Loads the ensemble that a run has trained, and evaluates it on data."""

from __future__ import annotations

from pathlib import Path

import torch

from ensemblekit.core.errors import UsageError
from ensemblekit.core.metrics import evaluate, flat_metrics
from ensemblekit.core.plugin import DataInfo
from ensemblekit.core.registry import Registry
from ensemblekit.data.fingerprint import check_same_data
from ensemblekit.data.loading import Data, load_data
from ensemblekit.data.scaling import TargetScaling
from ensemblekit.data.transforms import ImageTransform
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.inference.tables import data_of_file
from ensemblekit.members.build import build_member
from ensemblekit.members.growing import load_weights
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.json_files import as_written
from ensemblekit.runs.run import read_spec


def load_ensemble(path: Path, registry: Registry) -> Ensemble:
    """Load the trained ensemble of a run, in evaluation mode; nothing is unpickled."""
    directory = RunDirectory.open(path)
    spec = read_spec(directory, registry)
    tensors, metadata = directory.read_model()
    with as_written(path / "model.json"):
        info = DataInfo(metadata["task"], tuple(metadata["input_shape"]), metadata["num_outputs"])
        classes = tuple(metadata["classes"]) if metadata["classes"] else None
        transform = ImageTransform.from_json(metadata["transform"]) if metadata["transform"] else None
        # runs of version 0.1.0 have neither of these
        saved = metadata.get("target_scaling")
        scaling = TargetScaling.from_json(saved) if saved else None
        preparation = metadata.get("preparation")
        models = [(seed_index, spec.member_models[seed_index]) for seed_index in metadata["members"]]
    num_outputs = spec.loss.num_outputs(info)
    networks = []
    for index, (seed_index, model) in enumerate(models):
        network = build_member(model, info.input_shape, num_outputs, spec.seed, seed_index)
        load_weights(network, model, tensors, f"members.{index}.")
        networks.append(network)
    combiner = tensors.get("combiner")
    return Ensemble(networks, spec, info, classes, transform, combiner, scaling, preparation).eval()


def evaluate_run(path: Path, data: Data | Path | None, registry: Registry) -> dict[str, float]:
    """Compute the metrics of a run's ensemble on the test split of its own data, or on other data of the same form.

    Args:
        path: the run directory.
        data: other data, or a file that is prepared as the run's training table was.
        registry: the installed plugins.
    """
    ensemble = load_ensemble(path, registry)
    if isinstance(data, Path):
        data = data_of_file(ensemble, data)
    elif data is None:
        data = load_data(ensemble.spec.data, ensemble.spec.seed)
        recorded = RunDirectory.open(path).environment.get("data")
        check_same_data(recorded, data.fingerprint, ensemble.spec.data.name)
    if (data.info.input_shape, data.info.num_outputs) != (ensemble.info.input_shape, ensemble.info.num_outputs):
        what = f"the data has {data.info.form}, but the run was trained on {ensemble.info.form}"
        raise UsageError(what, str(path), "give data with inputs and outputs of the same shape")
    with torch.no_grad():
        batches = data.test.batches(ensemble.spec.training.batch_size)
        outputs = torch.cat([ensemble.learned_outputs(batch.inputs) for batch in batches], dim=1)
        combined = ensemble.combine_learned(outputs)
    scaling, targets = ensemble.target_scaling, data.test.targets
    if data.target_scaling != scaling:  # other data: in the units that the members learnt
        targets = targets if data.target_scaling is None else data.target_scaling.restore(targets)
        targets = (targets if scaling is None else scaling.standardise(targets)).to(outputs.dtype)
    restore = None if scaling is None else scaling.restore
    return flat_metrics(evaluate(outputs, targets, ensemble.loss, combined, restore))
