"""Loads the ensemble that a run has trained, from the run directory or from a model folder."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.errors import UsageError
from ensemblekit.core.plugin import Method
from ensemblekit.core.registry import Registry
from ensemblekit.data.scaling import TargetScaling
from ensemblekit.data.transforms import ImageTransform
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.inference.kept_calibration import KeptCalibration
from ensemblekit.inference.metadata import read_info
from ensemblekit.members.build import build_network
from ensemblekit.members.growing import load_weights
from ensemblekit.members.layout import output_layout
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.json_files import as_written
from ensemblekit.runs.model_folder import is_model_folder, read_model_folder
from ensemblekit.runs.own_files import CONFIG, MODEL
from ensemblekit.runs.run import read_folder_spec, read_spec
from ensemblekit.spec.sections import Spec
from ensemblekit.training.environment import choose_device
from ensemblekit.training.life_cycle import method_tensors, restore_methods


@dataclass(frozen=True)
class TrainedModel:
    """What an ensemble is built from: read from a run, or from a model folder."""

    file: Path
    """The file of the metadata, for errors."""
    spec: Spec
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]
    kept: KeptCalibration


def load_ensemble(path: Path, registry: Registry, device: str | torch.device = "cpu") -> Ensemble:
    """Load the trained ensemble of a run or a model folder to a device, in evaluation mode; nothing is unpickled."""
    target = inference_device(device)
    model = _read_folder(path, registry) if is_model_folder(path) else _read_run(path, registry)
    ensemble = assemble(model.spec, model.tensors, model.metadata, model.file)
    ensemble.calibration, ensemble.conformal = model.kept.calibration, model.kept.conformal
    ensemble.source = path
    return ensemble.to(target)


def _read_run(path: Path, registry: Registry) -> TrainedModel:
    directory = RunDirectory.open(path)
    spec = read_spec(directory, registry)
    tensors, metadata = directory.read_model()
    return TrainedModel(path / MODEL, spec, tensors, metadata, KeptCalibration.read(directory, spec.loss))


def _read_folder(path: Path, registry: Registry) -> TrainedModel:
    folder = read_model_folder(path)
    spec, saved = read_folder_spec(folder, registry), folder.calibration
    with as_written(path / CONFIG):
        kept = KeptCalibration() if saved is None else KeptCalibration.from_json(saved, spec.loss)
    return TrainedModel(path / CONFIG, spec, folder.read_weights(), folder.metadata, kept)


def assemble(spec: Spec, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], where: Path) -> Ensemble:
    """Build a trained ensemble, in evaluation mode on the CPU.

    Args:
        spec: what was trained.
        tensors: the weights, and what methods and the combiner have fitted.
        metadata: what else it takes to use them, as a run keeps it.
        where: the file of the metadata, for errors.
    """
    with as_written(where):
        info = read_info(metadata, tensors)
        classes = tuple(metadata["classes"]) if metadata["classes"] else None
        transform = ImageTransform.from_json(metadata["transform"]) if metadata["transform"] else None
        # runs of version 0.1.0 have neither of these
        saved = metadata.get("target_scaling")
        scaling = TargetScaling.from_json(saved) if saved else None
        preparation = metadata.get("preparation")
        by_index = {plan.index: plan for plan in spec.networks}
        plans = [by_index[seed_index] for seed_index in metadata["members"]]
    layout, networks = output_layout(spec, info), []
    tried: set[Hashable] = set()
    for index, plan in enumerate(plans):
        network = build_network(plan, layout, info, spec.seed, tried)
        load_weights(network, plan.group.model, tensors, f"members.{index}.")
        networks.append(network)
    combiner, methods = tensors.get("combiner"), trained_methods(spec, tensors, metadata)
    return Ensemble(networks, spec, info, classes, transform, combiner, scaling, preparation, plans, methods).eval()


def tensors_of(ensemble: Ensemble) -> dict[str, Tensor]:
    """Return the tensors that `assemble` needs to build the same ensemble again, on the CPU, as copies."""
    tensors = {f"members.{name}": value for name, value in ensemble.members.state_dict().items()}
    fitted = {} if ensemble.fitted is None else {"combiner": ensemble.fitted}
    together = tensors | method_tensors(ensemble.methods) | fitted
    return {name: value.detach().cpu().clone() for name, value in together.items()}


def trained_methods(spec: Spec, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> list[Method]:
    """Return copies of a spec's methods with what they remember from training."""
    methods = [method.model_copy(deep=True) for method in spec.methods]
    restore_methods(methods, tensors, metadata.get("methods", {}))
    return methods


def inference_device(device: str | torch.device) -> torch.device:
    """Return the device of a name; "auto" is the best available. A `UsageError` if it is unknown or not available."""
    try:
        return choose_device(str(device))
    except UsageError as error:
        raise UsageError(error.what, "device", error.fix) from error
    except RuntimeError as error:  # of torch, for a name that it does not know
        fix = "use auto, cpu, cuda, cuda:1 or mps"
        raise UsageError(f'"{device}" is not a device', "device", fix) from error
