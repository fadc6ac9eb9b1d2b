"""Which fast ways of running a model supports, and why not the others: what `inspect` and `bench` say of it."""

from __future__ import annotations

from pydantic import ValidationError
from torch import nn

from ensemblekit.core.errors import EnsemblekitError
from ensemblekit.core.plugin import Model, Plugin
from ensemblekit.engines.stacked_layers import StackedNetwork
from ensemblekit.members.build import build_member
from ensemblekit.members.folding import folded
from ensemblekit.members.growing import draws_globally

TYPICAL_SHAPES = ((3, 32, 32), (1, 8, 8), (3, 224, 224), (16,))
"""What a model is tried with where its data is not known."""
NUM_OUTPUTS = 10


def default_paths(model_class: type[Plugin]) -> dict[str, str]:
    """The same for a model with its default parameters; empty if it has required ones."""
    try:
        model = model_class()
    except ValidationError:
        return {}
    return fast_paths(model) if isinstance(model, Model) else {}


def fast_paths(model: Model, input_shape: tuple[int, ...] | None = None) -> dict[str, str]:
    """For each way of running, how far the model supports it, or why not; empty if it takes no typical inputs."""
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
        return "as it is: its inputs are no images"
    declared = _declared(model, "channels_last")
    return "channels_last" if declared == "yes" else f"not channels_last: {declared.removeprefix('no: ')}"


def _threads(network: nn.Module, shape: tuple[int, ...]) -> str:
    if draws_globally(network, shape):
        return "no: it draws random numbers from the one generator that all threads share"
    return "yes: one member on each core"


def _stacked(model: Model, network: nn.Module) -> str:
    declared = _declared(model, "vmap")
    if declared != "yes":
        return declared
    left = StackedNetwork(network).vmapped_layers()
    return f"yes: by torch.func.vmap for {', '.join(left)}" if left else "yes: every layer by one operation"


def _folding(network: nn.Module) -> str:
    norms = sum(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in network.modules())
    if not norms:
        return "no: it has no batch norm"
    _, count = folded(network)
    if not count:
        return "no: no batch norm directly follows its layer in an nn.Sequential"
    return f"yes: {count} of {norms} batch norms in predictions"
