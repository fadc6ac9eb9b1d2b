"""Which execution modes a model supports, and why not the others, for `inspect` and `bench`."""

from __future__ import annotations

from pydantic import ValidationError
from torch import nn

from ensemblekit.core.errors import EnsemblekitError
from ensemblekit.core.plugin import Model, Plugin
from ensemblekit.engines.stacked_layers import StackedNetwork
from ensemblekit.members.build import build_member, uses_global_rng
from ensemblekit.members.folding import folded

TYPICAL_SHAPES = ((3, 32, 32), (1, 8, 8), (3, 224, 224), (16,))
"""Inputs to try a model with if its data is unknown."""
NUM_OUTPUTS = 10


def default_capabilities(model_class: type[Plugin]) -> dict[str, str]:
    """Return the capabilities of a model with its default parameters; empty if it has required parameters."""
    try:
        model = model_class()
    except ValidationError:
        return {}
    return capabilities(model) if isinstance(model, Model) else {}


def capabilities(model: Model, input_shape: tuple[int, ...] | None = None) -> dict[str, str]:
    """Describe how far a model supports each execution mode; empty if it accepts no typical inputs."""
    for shape in (input_shape,) if input_shape else TYPICAL_SHAPES:
        try:
            network = build_member(model, shape, NUM_OUTPUTS, seed=0, member=0)
        except EnsemblekitError:
            continue
        return {
            "threads": _threads(network, shape),
            "layout": _layout(model, shape),
            "stacked": _stacked(model, network),
            "folding": _folding(network),
            "bf16": _declared(model, "autocast"),
        }
    return {}


def _declared(model: Model, way: str) -> str:
    reason = model.unsupported().get(way)
    return f"no: {reason}" if reason else "yes"


def _layout(model: Model, shape: tuple[int, ...]) -> str:
    if len(shape) != 3:
        return "unchanged (inputs are not images)"
    declared = _declared(model, "channels_last")
    return "channels_last" if declared == "yes" else f"not channels_last: {declared.removeprefix('no: ')}"


def _threads(network: nn.Module, shape: tuple[int, ...]) -> str:
    if uses_global_rng(network, shape):
        return "no: it uses torch's global random generator, which threads share"
    return "yes: one member per core"


def _stacked(model: Model, network: nn.Module) -> str:
    declared = _declared(model, "vmap")
    if declared != "yes":
        return declared
    vmapped = StackedNetwork(network).vmapped_layers()
    return f"yes: {', '.join(vmapped)} by torch.func.vmap" if vmapped else "yes: every layer by one operation"


def _folding(network: nn.Module) -> str:
    norms = sum(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in network.modules())
    if not norms:
        return "no: it has no batch norm"
    _, count = folded(network)
    if not count:
        return "no: no batch norm directly follows its layer in an nn.Sequential"
    return f"yes: {count} of {norms} batch norms in predictions"
