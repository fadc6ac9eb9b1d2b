"""Plugin-based ensemble learning for deep networks. Start with `ensemblekit.api`.

The public names are imported when they are first used, so that ``import ensemblekit`` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ensemblekit.api import (
        build_model,
        datasets,
        decompose,
        draw_sample_weights,
        evaluate,
        evaluate_run,
        load,
        load_spec,
        methods,
        models,
        objective,
        resume,
        train,
    )
    from ensemblekit.data import Batch, Data, Split, load_data
    from ensemblekit.decoding import Decoding
    from ensemblekit.decomposition import Decomposition
    from ensemblekit.ensemble import Ensemble
    from ensemblekit.errors import DataError, EnsemblekitError, PluginError, Problem, UsageError, did_you_mean
    from ensemblekit.given import data_from_datasets
    from ensemblekit.hookspecs import GrowingEnsemble, hookimpl
    from ensemblekit.losses import MSE, Loss
    from ensemblekit.memory import fits_in_memory
    from ensemblekit.noise import Noise
    from ensemblekit.plugin import DataInfo, Dataset, Extension, ImageDataset, Method, Model, Splits
    from ensemblekit.runs import Run
    from ensemblekit.seeding import generator
    from ensemblekit.spec import Spec
    from ensemblekit.splitting import hold_out

__all__ = [
    "MSE",
    "Batch",
    "Data",
    "DataError",
    "DataInfo",
    "Dataset",
    "Decoding",
    "Decomposition",
    "Ensemble",
    "EnsemblekitError",
    "Extension",
    "GrowingEnsemble",
    "ImageDataset",
    "Loss",
    "Method",
    "Model",
    "Noise",
    "PluginError",
    "Problem",
    "Run",
    "Spec",
    "Split",
    "Splits",
    "UsageError",
    "build_model",
    "data_from_datasets",
    "datasets",
    "decompose",
    "did_you_mean",
    "draw_sample_weights",
    "evaluate",
    "evaluate_run",
    "fits_in_memory",
    "generator",
    "hold_out",
    "hookimpl",
    "load",
    "load_data",
    "load_spec",
    "methods",
    "models",
    "objective",
    "resume",
    "train",
]

_HOMES = {
    "api": (
        "build_model datasets decompose draw_sample_weights evaluate evaluate_run load load_spec methods models "
        "objective resume train"
    ),
    "data": "Batch Data Split load_data",
    "decoding": "Decoding",
    "decomposition": "Decomposition",
    "ensemble": "Ensemble",
    "errors": "DataError EnsemblekitError PluginError Problem UsageError did_you_mean",
    "given": "data_from_datasets",
    "hookspecs": "GrowingEnsemble hookimpl",
    "losses": "MSE Loss",
    "memory": "fits_in_memory",
    "noise": "Noise",
    "plugin": "DataInfo Dataset Extension ImageDataset Method Model Splits",
    "runs": "Run",
    "seeding": "generator",
    "spec": "Spec",
    "splitting": "hold_out",
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
