"""Loads the ensemble that a run has trained."""

from __future__ import annotations

from pathlib import Path

import torch

from ensemblekit.core.errors import UsageError
from ensemblekit.core.registry import Registry
from ensemblekit.data.scaling import TargetScaling
from ensemblekit.data.transforms import ImageTransform
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.inference.metadata import read_info
from ensemblekit.members.build import build_member
from ensemblekit.members.growing import load_weights
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.json_files import as_written
from ensemblekit.runs.run import read_spec
from ensemblekit.training.environment import choose_device


def load_ensemble(path: Path, registry: Registry, device: str | torch.device = "cpu") -> Ensemble:
    """Load the trained ensemble of a run to a device, in evaluation mode; nothing is unpickled."""
    target = inference_device(device)
    directory = RunDirectory.open(path)
    spec = read_spec(directory, registry)
    tensors, metadata = directory.read_model()
    with as_written(path / "model.json"):
        info = read_info(metadata, tensors)
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
    ensemble = Ensemble(networks, spec, info, classes, transform, combiner, scaling, preparation)
    return ensemble.eval().to(target)


def inference_device(device: str | torch.device) -> torch.device:
    """Return the device of a name; "auto" is the best available. A `UsageError` if it is unknown or not available."""
    try:
        return choose_device(str(device))
    except UsageError as error:
        raise UsageError(error.what, "device", error.fix) from error
    except RuntimeError as error:  # of torch, for a name that it does not know
        fix = "use auto, cpu, cuda, cuda:1 or mps"
        raise UsageError(f'"{device}" is not a device', "device", fix) from error
