"""The execution modes of engines and exporters, each as a function that raises if a network does not support it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ensemblekit.testing.reviews import mismatch

Members = list[nn.Module]
PRECISE, ROUGH = 1e-7, 1e-3
"""Relative tolerance between two execution modes in float64 and in float32."""


class WrongNumbers(AssertionError):
    """A network runs in an execution mode, but computes something else than it should."""


def run_meta(members: Members, inputs: Tensor) -> None:
    """Forward and backward on the meta device, where only shapes are computed."""
    network = members[0]
    network.to("meta")
    _gradients(network, network(inputs.to("meta")))


def run_channels_last(members: Members, inputs: Tensor) -> None:
    """Images in channels-last memory format give the same numbers; other inputs have no such format."""
    if inputs.ndim != 4:
        return
    [network], inputs = in_float64(members[:1], inputs)
    expected = copy.deepcopy(network)
    network.to(memory_format=torch.channels_last)
    outputs = network(inputs.to(memory_format=torch.channels_last))
    gradients = _gradients(network, outputs)
    if not is_stochastic(expected, inputs):
        plain = expected(inputs)
        _compare(outputs, plain, "outputs")
        for name, left, right in zip(_names(network), gradients, _gradients(expected, plain), strict=True):
            _compare(left, right, f"the gradient of {name}")


def run_autocast(members: Members, inputs: Tensor) -> None:
    """Forward and backward under autocast to bfloat16, with finite gradients."""
    network = members[0]
    with torch.autocast("cpu", torch.bfloat16):
        outputs = network(inputs)
    for name, gradient in zip(_names(network), _gradients(network, outputs.float()), strict=True):
        if not bool(gradient.isfinite().all()):
            raise WrongNumbers(f"the gradient of {name} is not finite")


def run_vmap(members: Members, inputs: Tensor) -> None:
    """Members stacked by torch.func have the outputs and gradients of members that run one by one.

    Stochastic members must sample different noise, even if their weights are equal.
    """
    members, inputs = in_float64(members, inputs)
    if is_stochastic(copy.deepcopy(members[0]), inputs):
        for member in members[1:]:
            member.load_state_dict(members[0].state_dict())
        outputs, parameters, _ = run_stacked(members, inputs)
        _gradients_of(outputs, list(parameters.values()))
        if torch.equal(outputs[0], outputs[1]):
            raise WrongNumbers("stacked members with equal weights sample the same noise")
        return
    perturb(members)
    single = copy.deepcopy(members)
    outputs, parameters, buffers = run_stacked(members, inputs)
    stacked = _gradients_of(outputs, list(parameters.values()))
    for index, member in enumerate(single):
        expected = member(inputs)
        _compare(outputs[index], expected, f"outputs of member {index}")
        for name, gradient, right in zip(parameters, stacked, _gradients(member, expected), strict=True):
            if gradient is not None:
                _compare(gradient[index], right, f"the gradient of {name} of member {index}")
        for name, buffer in member.named_buffers():
            _compare(buffers[name][index], buffer, f"buffer {name} of member {index}")


def run_export(members: Members, inputs: Tensor) -> None:
    """Exported by torch.export in evaluation mode, the network gives the same outputs; for any batch size if it can."""
    network = members[0]
    network.eval()
    any_size = ({0: torch.export.Dim("batch", min=1)},)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export warns about its own code
        try:
            exported = torch.export.export(network, (inputs,), dynamic_shapes=any_size)
        except torch._dynamo.exc.UserError:  # len(inputs) in forward() fixes the batch size; exports then say so
            exported = torch.export.export(network, (inputs,))
        else:
            _compare(exported.module()(inputs[:1]), network(inputs[:1]), "outputs of a single sample")
        _compare(exported.module()(inputs), network(inputs), "outputs")


EXECUTION_MODES: dict[str, Callable[[Members, Tensor], None]] = {
    "vmap": run_vmap,
    "channels_last": run_channels_last,
    "autocast": run_autocast,
    "meta": run_meta,
    "export": run_export,
}
"""The keys that `Model.unsupported` may return, and how each mode is tried: on two members and a batch of inputs."""


def run_stacked(members: Members, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Outputs (M, B, C), the stacked trainable parameters, and the stacked buffers after one pass in training mode."""
    parameters = {
        name: torch.stack([member.get_parameter(name).detach() for member in members]).requires_grad_(
            first.requires_grad
        )
        for name, first in members[0].named_parameters()
    }
    buffers = {
        name: torch.stack([member.get_buffer(name) for member in members]) for name, _ in members[0].named_buffers()
    }
    skeleton = copy.deepcopy(members[0]).to("meta")

    def member(parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
        outputs: Tensor = functional_call(skeleton, (parameters, buffers), (inputs,))
        return outputs

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch warns where it falls back to a loop over members
        outputs = vmap(member, in_dims=(0, 0, None), randomness="different")(parameters, buffers, inputs)
    return outputs, {name: value for name, value in parameters.items() if value.requires_grad}, buffers


def in_float64(members: Members, inputs: Tensor) -> tuple[Members, Tensor]:
    """Networks and inputs in float64, where rounding is not mistaken for a fault; unchanged if float32 only."""
    precise = [copy.deepcopy(member).double() for member in members]
    try:
        with torch.no_grad():
            copy.deepcopy(precise[0])(inputs.double())
    except RuntimeError:
        return members, inputs
    return precise, inputs.double()


def is_stochastic(network: nn.Module, inputs: Tensor) -> bool:
    """Whether two passes in training mode differ; updates the running statistics."""
    with torch.no_grad():
        return not torch.equal(network(inputs), network(inputs))


def perturb(members: Members) -> None:
    """Move away from the initial weights, where a batch norm does nothing and the sign of a zero is rounding."""
    with torch.no_grad():
        for parameter in (parameter for member in members for parameter in member.parameters()):
            parameter.add_(torch.randn_like(parameter), alpha=0.05)


def _names(network: nn.Module) -> list[str]:
    return [name for name, parameter in network.named_parameters() if parameter.requires_grad]


def _gradients(network: nn.Module, outputs: Tensor) -> list[Tensor]:
    """The gradient of each trainable parameter; zeros for one that the outputs do not depend on."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    gradients = _gradients_of(outputs, [*parameters])
    return [
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]


def _gradients_of(outputs: Tensor, parameters: list[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of tensors, none for one that the outputs do not depend on; a network may have nothing to learn."""
    return torch.autograd.grad(outputs.square().sum(), parameters, allow_unused=True) if parameters else ()


def _compare(actual: Tensor, expected: Tensor, label: str) -> None:
    tolerance = PRECISE if expected.dtype == torch.float64 else ROUGH
    if wrong := mismatch(actual.detach(), expected.detach(), tolerance):
        raise WrongNumbers(f"{label}: {wrong}")
