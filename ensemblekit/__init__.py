"""Plugin-based ensemble learning for deep networks. Start with `ensemblekit.api`.

The public names are imported when they are first used, so that ``import ensemblekit`` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ensemblekit.after_training import calibrate, conform, distil, select, undo_calibrate, undo_conform
    from ensemblekit.analysis.comparison import Comparison
    from ensemblekit.analysis.run_list import ListedRun, list_runs
    from ensemblekit.analysis.sweeps import Sweep, open_sweep
    from ensemblekit.api import (
        compare,
        datasets,
        evaluate_run,
        load,
        load_spec,
        methods,
        models,
        open_run,
        report,
        resume,
        sweep,
        train,
    )
    from ensemblekit.core.augmentation import Augmentation, BatchAugmentation
    from ensemblekit.core.dataset import DataInfo, Dataset, Prepared, Splits
    from ensemblekit.core.decomposition import Decomposition
    from ensemblekit.core.errors import DataError, EnsemblekitError, PluginError, Problem, UsageError, did_you_mean
    from ensemblekit.core.files import atomic_write, sha256_of_file
    from ensemblekit.core.hookspecs import GrowingEnsemble, hookimpl
    from ensemblekit.core.input_network import GraphInput, InputNetwork
    from ensemblekit.core.losses import MSE, Loss
    from ensemblekit.core.memory import fits_in_memory, keep_freed_memory, memory_limit
    from ensemblekit.core.metrics import Metric
    from ensemblekit.core.plugin import Combination, Extension, Family, Method, Model
    from ensemblekit.core.ranking import auroc, average_precision
    from ensemblekit.core.seeds import generator
    from ensemblekit.core.waiting import limit_spinning
    from ensemblekit.core.weights import fit_weights
    from ensemblekit.data.augmentation import Augmentations
    from ensemblekit.data.cache import cache_directory
    from ensemblekit.data.decoding import Decoding
    from ensemblekit.data.image_dataset import ImageDataset
    from ensemblekit.data.in_memory import data_from_datasets
    from ensemblekit.data.loading import Batch, Data, Split, load_data
    from ensemblekit.data.scaling import TargetScaling
    from ensemblekit.data.splitting import hold_out
    from ensemblekit.export.exporting import export
    from ensemblekit.export.formats import Exported
    from ensemblekit.formulas import build_model, decompose, draw_sample_weights, evaluate, objective
    from ensemblekit.inference.calibrating import CalibrationResult
    from ensemblekit.inference.combining import Combiner
    from ensemblekit.inference.conforming import ConformalResult
    from ensemblekit.inference.ensemble import Ensemble
    from ensemblekit.inference.selecting import Selection
    from ensemblekit.inference.students import DistilledRun
    from ensemblekit.members.fused_layers import norm_relu
    from ensemblekit.members.stochastic import Noise
    from ensemblekit.runs.outputs import KeptOutputs
    from ensemblekit.runs.run import Run
    from ensemblekit.spec.optimizers import OptimizerPlugin
    from ensemblekit.spec.schedules import Schedule
    from ensemblekit.spec.sections import Spec

__all__ = [
    "MSE",
    "Augmentation",
    "Augmentations",
    "Batch",
    "BatchAugmentation",
    "CalibrationResult",
    "Combination",
    "Combiner",
    "Comparison",
    "ConformalResult",
    "Data",
    "DataError",
    "DataInfo",
    "Dataset",
    "Decoding",
    "Decomposition",
    "DistilledRun",
    "Ensemble",
    "EnsemblekitError",
    "Exported",
    "Extension",
    "Family",
    "GraphInput",
    "GrowingEnsemble",
    "ImageDataset",
    "InputNetwork",
    "KeptOutputs",
    "ListedRun",
    "Loss",
    "Method",
    "Metric",
    "Model",
    "Noise",
    "OptimizerPlugin",
    "PluginError",
    "Prepared",
    "Problem",
    "Run",
    "Schedule",
    "Selection",
    "Spec",
    "Split",
    "Splits",
    "Sweep",
    "TargetScaling",
    "UsageError",
    "atomic_write",
    "auroc",
    "average_precision",
    "build_model",
    "cache_directory",
    "calibrate",
    "compare",
    "conform",
    "data_from_datasets",
    "datasets",
    "decompose",
    "did_you_mean",
    "distil",
    "draw_sample_weights",
    "evaluate",
    "evaluate_run",
    "export",
    "fit_weights",
    "fits_in_memory",
    "generator",
    "hold_out",
    "hookimpl",
    "keep_freed_memory",
    "limit_spinning",
    "list_runs",
    "load",
    "load_data",
    "load_spec",
    "memory_limit",
    "methods",
    "models",
    "norm_relu",
    "objective",
    "open_run",
    "open_sweep",
    "report",
    "resume",
    "select",
    "sha256_of_file",
    "sweep",
    "train",
    "undo_calibrate",
    "undo_conform",
]

_HOMES = {
    "api": "compare datasets evaluate_run load load_spec methods models open_run report resume sweep train",
    "after_training": "calibrate conform distil select undo_calibrate undo_conform",
    "formulas": "build_model decompose draw_sample_weights evaluate objective",
    "analysis.comparison": "Comparison",
    "analysis.sweeps": "Sweep open_sweep",
    "analysis.run_list": "ListedRun list_runs",
    "core.augmentation": "Augmentation BatchAugmentation",
    "core.decomposition": "Decomposition",
    "core.errors": "DataError EnsemblekitError PluginError Problem UsageError did_you_mean",
    "core.files": "atomic_write sha256_of_file",
    "core.hookspecs": "GrowingEnsemble hookimpl",
    "core.input_network": "GraphInput InputNetwork",
    "core.losses": "MSE Loss",
    "core.memory": "fits_in_memory keep_freed_memory memory_limit",
    "core.waiting": "limit_spinning",
    "core.metrics": "Metric",
    "core.dataset": "DataInfo Dataset Prepared Splits",
    "core.plugin": "Combination Extension Family Method Model",
    "core.ranking": "auroc average_precision",
    "core.seeds": "generator",
    "core.weights": "fit_weights",
    "data.augmentation": "Augmentations",
    "data.cache": "cache_directory",
    "data.decoding": "Decoding",
    "data.image_dataset": "ImageDataset",
    "data.in_memory": "data_from_datasets",
    "data.loading": "Batch Data Split load_data",
    "data.scaling": "TargetScaling",
    "data.splitting": "hold_out",
    "export.exporting": "export",
    "export.formats": "Exported",
    "inference.calibrating": "CalibrationResult",
    "inference.combining": "Combiner",
    "inference.conforming": "ConformalResult",
    "inference.ensemble": "Ensemble",
    "inference.selecting": "Selection",
    "inference.students": "DistilledRun",
    "members.fused_layers": "norm_relu",
    "members.stochastic": "Noise",
    "runs.outputs": "KeptOutputs",
    "runs.run": "Run",
    "spec.optimizers": "OptimizerPlugin",
    "spec.schedules": "Schedule",
    "spec.sections": "Spec",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import version

        return version("ensemblekit")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ensemblekit' has no attribute {name!r}")
    return getattr(import_module(f"ensemblekit.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
