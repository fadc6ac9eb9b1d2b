"""Builds the members of an ensemble, each from its own seed and each checked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ensemblekit.core.errors import PluginError, UsageError
from ensemblekit.core.faults import one_line
from ensemblekit.core.plugin import Model
from ensemblekit.core.seeds import derive_seed
from ensemblekit.members.stochastic import with_own_noise


def build_members(
    models: Sequence[Model], input_shape: tuple[int, ...], num_outputs: int, seed: int
) -> list[nn.Module]:
    """One network for each entry of `models`; no two of them start equal."""
    members: list[nn.Module] = []
    first_with: dict[bytes, int] = {}
    for index, model in enumerate(models):
        member = build_member(model, input_shape, num_outputs, seed, index)
        twin = first_with.setdefault(_digest(member), index)
        if twin != index:
            raise PluginError(
                f'members {twin} and {index} of model "{model.name}" start equal, so they would stay equal',
                "build()",
                "initialise the weights from torch's own random numbers, and seed nothing there",
            )
        members.append(member)
    return members


def build_member(model: Model, input_shape: tuple[int, ...], num_outputs: int, seed: int, member: int) -> nn.Module:
    """One network (B, *input_shape) → (B, num_outputs), a function of the model, `seed` and the member's index.

    It is built on the CPU whatever the default device is, so that devices agree, and the state of no
    random number generator changes.
    """
    if num_outputs < 1 or not input_shape or min(input_shape) < 1:
        raise UsageError(
            f"no network maps inputs of shape {input_shape} to {num_outputs} outputs",
            f'model "{model.name}"',
            "give positive sizes, without the batch",
        )
    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        # Not torch.manual_seed: it seeds the generators of all devices, and nothing would restore those.
        torch.default_generator.manual_seed(derive_seed(seed, "member", member))
        network = model.build(input_shape, num_outputs)
        _check_outputs(model, network, input_shape, num_outputs)
    return with_own_noise(network, seed, member)


def _check_outputs(model: Model, network: nn.Module, input_shape: tuple[int, ...], num_outputs: int) -> None:
    batch = 2
    where = f"expected ({batch}, {num_outputs}) for inputs of shape {(batch, *input_shape)}"
    if not isinstance(network, nn.Module):
        raise PluginError(f'model "{model.name}" built a {type(network).__name__}', "expected a torch.nn.Module")
    try:
        outputs = _try_out(model, network, (batch, *input_shape))
    except Exception as error:  # whatever a network raises, its model is to blame
        fix = "derive the layers' sizes from the input shape in build()"
        if "meta" in str(error) and "meta" not in model.unsupported():
            fix = "it is tried without values, on the meta device: register_buffer() what it needs, or "
            fix += 'let unsupported() return {"meta": "why"}'
        what = f'model "{model.name}" built a network that fails: {type(error).__name__}: {one_line(str(error))}'
        raise PluginError(what, where, fix) from error
    got = tuple(outputs.shape) if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
    if got != (batch, num_outputs):
        raise PluginError(
            f'model "{model.name}" built a network whose output is {got}',
            where,
            "let build() return a network with num_outputs outputs for each sample",
        )


def _try_out(model: Model, network: nn.Module, shape: tuple[int, ...]) -> object:
    """What the network returns for a batch in training: computed without any arithmetic if the model allows it."""
    state: dict[str, Tensor] = dict([*network.named_parameters(), *network.named_buffers()])
    if "meta" in model.unsupported():
        # On copies of the statistics that a network keeps in training, which this batch is no part of.
        state = {name: value.detach().clone() for name, value in state.items()}
        inputs = torch.zeros(shape)
    else:
        state = {name: torch.empty_like(value, device="meta") for name, value in state.items()}
        inputs = torch.empty(shape, device="meta")
    with torch.no_grad():
        return functional_call(network, state, (inputs,))


def _digest(network: nn.Module) -> bytes:
    """Equal for equal parameters and buffers of equal names, and only for those."""
    digest = hashlib.sha256()
    for name, value in network.state_dict().items():
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)}".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy())
    return digest.digest()
