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
        load_spec,
        methods,
        models,
        objective,
    )
    from ensemblekit.data import Batch, Data, Split, load_data
    from ensemblekit.decomposition import Decomposition
    from ensemblekit.errors import DataError, EnsemblekitError, Problem, UsageError, did_you_mean
    from ensemblekit.given import data_from_datasets
    from ensemblekit.hookspecs import GrowingEnsemble, hookimpl
    from ensemblekit.losses import MSE, Loss
    from ensemblekit.memory import fits_in_memory
    from ensemblekit.plugin import DataInfo, Dataset, Extension, ImageDataset, Method, Model, Splits
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
    "Decomposition",
    "EnsemblekitError",
    "Extension",
    "GrowingEnsemble",
    "ImageDataset",
    "Loss",
    "Method",
    "Model",
    "Problem",
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
    "fits_in_memory",
    "generator",
    "hold_out",
    "hookimpl",
    "load_data",
    "load_spec",
    "methods",
    "models",
    "objective",
]

_HOMES = {
    "data": "Batch Data Split load_data",
    "given": "data_from_datasets",
    "api": "build_model datasets decompose draw_sample_weights evaluate load_spec methods models objective",
    "decomposition": "Decomposition",
    "errors": "DataError EnsemblekitError Problem UsageError did_you_mean",
    "hookspecs": "GrowingEnsemble hookimpl",
    "losses": "MSE Loss",
    "memory": "fits_in_memory",
    "plugin": "DataInfo Dataset Extension ImageDataset Method Model Splits",
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
