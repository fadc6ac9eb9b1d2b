"""Builds the members of an ensemble, each from its own seed, and checks them."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ensemblekit.core.dataset import DataInfo
from ensemblekit.core.errors import PluginError, UsageError, one_line
from ensemblekit.core.outputs import OutputLayout
from ensemblekit.core.plugin import Categories, Family, Model
from ensemblekit.core.seeds import derive_seed
from ensemblekit.members.stochastic import make_reproducible, stochastic_layers, stochastic_pass
from ensemblekit.spec.sections import NetworkPlan

SMALL_NETWORK = 100_000
"""Parameters of a network that is tried with real numbers."""


def build_network(
    plan: NetworkPlan, layout: OutputLayout, info: DataInfo, seed: int, tried: set[Hashable] | None = None
) -> nn.Module:
    """Build one network of a spec, of the sizes that its outputs have.

    Args:
        plan: the network's model and the index of its member.
        layout: the sizes of the outputs.
        info: the form of the data.
        seed: of the run.
        tried: see `build_member`.
    """
    group, size, members = plan.group, layout.num_outputs, plan.members
    if group.role == "auxiliary":
        size, members = next(rows.size for rows in layout.auxiliary if rows.name == group.name), 1
    return build_member(group.model, info.input_shape, size, seed, plan.index, members, info.categories, tried=tried)


def build_members(
    models: Sequence[Model], input_shape: tuple[int, ...], num_outputs: int, seed: int
) -> list[nn.Module]:
    """Build one network per model; raises a `PluginError` if two of them share weights or start with equal ones."""
    members: list[nn.Module] = []
    tried: set[Hashable] = set()
    for index, model in enumerate(models):
        member = build_member(model, input_shape, num_outputs, seed, index, tried=tried)
        check_independent(member, index, model, members)
        members.append(member)
    check_not_equal(list(zip(members, models, strict=True)))
    return members


def check_not_equal(members: Sequence[tuple[nn.Module, Model]]) -> None:
    """Raise a `PluginError` if two networks that are to learn start with equal weights."""
    first_with: dict[bytes, int] = {}
    for index, (member, model) in enumerate(members):
        twin = first_with.setdefault(_digest(member), index)
        # without weights, and before they are fitted, members may be equal
        if twin != index and member.state_dict() and not model.fitted:
            raise PluginError(
                f'members {twin} and {index} of model "{model.name}" start with equal weights and would stay equal',
                "build()",
                "initialise the weights with torch's global random generator, and do not seed it there",
            )


def check_independent(member: nn.Module, index: int, model: Model, others: Sequence[nn.Module]) -> None:
    """Raise a `PluginError` if the new network of a member shares a parameter or buffer with one of the others.

    Args:
        member: the network, as it was built.
        index: the member's index.
        model: the model that has built it.
        others: the networks of the members before it.
    """
    new = {address: name for name, address in reversed(_addresses(member))}  # the first name of each
    for other_index, other in enumerate(others):
        for _, address in _addresses(other):
            if address in new:
                what = f'members {other_index} and {index} of model "{model.name}" share "{new[address]}"'
                fix = "build a new network, with new layers, in each call of build() or of the function in model=…; "
                fix += "members that share layers are a family: derive the model from ensemblekit.Family"
                raise PluginError(f"{what} and would not be independent", "build()", fix, plugin=model.name)


def _addresses(network: nn.Module) -> list[tuple[str, int]]:
    """Return the name of each parameter and buffer that has memory, with the address of that."""
    tensors = [*network.named_parameters(), *network.named_buffers()]
    pairs = [(name, value.untyped_storage().data_ptr()) for name, value in tensors]
    return [(name, address) for name, address in pairs if address]


def build_member(
    model: Model,
    input_shape: tuple[int, ...],
    num_outputs: int,
    seed: int,
    member: int,
    num_members: int = 1,
    categories: Categories = (),
    *,
    tried: set[Hashable] | None = None,
) -> nn.Module:
    """Build one network (B, *input_shape) → (B, num_outputs), determined by the model, `seed` and the member's index.

    It is built on the CPU whatever the default device is, so that all devices agree, and the state of no random
    generator changes.

    Args:
        model: what to build.
        input_shape: shape of one input.
        num_outputs: columns of the prediction; the network has more if the model gives something beside it.
        seed: of the run.
        member: the index of the member, or of the first member of a family.
        num_members: the number of members, if the model is a family: the network maps to (num_members, B, num_outputs).
        categories: the inputs that are one-hot categories, as in `DataInfo.categories`; for models that use them.
        tried: the networks whose outputs have been checked, by model and shapes: those of another member with the same
            model and shapes are not checked again. Networks that are checked are added.

    Raises:
        PluginError: the model does not build a network of these sizes.
    """
    if num_outputs < 1 or not input_shape or min(input_shape) < 1:
        raise UsageError(
            f"no network can map inputs of shape {input_shape} to {num_outputs} outputs",
            f'model "{model.name}"',
            "give positive sizes, without the batch dimension",
        )
    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        # Not torch.manual_seed: it seeds the generators of all devices, and nothing would restore those.
        torch.default_generator.manual_seed(derive_seed(seed, "member", member))
        width = num_outputs + sum(model.extra_outputs(input_shape).values())
        if isinstance(model, Family):
            network = model.build_family_for(input_shape, num_outputs, num_members, categories)
            # as many samples as members would not show whether members or samples come first
            shape: tuple[int, ...] = (num_members, 3 if num_members == 2 else 2, width)
        else:
            network, shape = model.build_for(input_shape, num_outputs, member, categories), (2, width)
        form = _form(model, network, shape)
        if tried is None or form not in tried or model.depends_on_member:
            _check_outputs(model, network, input_shape, shape)
        if tried is not None:
            tried.add(form)
    return make_reproducible(network, seed, member)


def _form(model: Model, network: nn.Module, shape: tuple[int, ...]) -> Hashable:
    """Equal for networks of the same model and outputs whose parameters and buffers have the same shapes."""
    tensors = [*network.named_parameters(), *network.named_buffers()] if isinstance(network, nn.Module) else []
    return model.key, shape, tuple((name, value.shape) for name, value in tensors)


def _check_outputs(model: Model, network: nn.Module, input_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    batch = shape[-2]
    expected = f"{shape} for inputs of shape {(batch, *input_shape)}"
    if not isinstance(network, nn.Module):
        what = f'model "{model.name}" built a {type(network).__name__}'
        raise PluginError(what, plugin=model.name, expected="a torch.nn.Module")
    try:
        outputs = _trial_outputs(model, network, (batch, *input_shape))
    except Exception as error:  # a network may raise anything
        fix = "derive the layers' sizes from the input shape in build()"
        if "meta" in str(error) and "meta" not in model.unsupported():
            fix = "it is tried on the meta device: use register_buffer() for tensors that are not parameters, or "
            fix += 'let unsupported() return {"meta": "why"}'
        what = f'model "{model.name}" built a network that fails with {type(error).__name__}: {one_line(str(error))}'
        raise PluginError(what, fix=fix, plugin=model.name, expected=expected) from error
    got = tuple(outputs.shape) if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
    if got != shape:
        extra = " and those of extra_outputs()" if model.extra_outputs(input_shape) else ""
        builder, of_what = ("build_family", "each member and sample") if len(shape) == 3 else ("build", "each sample")
        raise PluginError(
            f'model "{model.name}" built a network whose output is {got}',
            fix=f"let {builder}() return a network with num_outputs outputs{extra} for {of_what}",
            plugin=model.name,
            expected=expected,
        )


def _trial_outputs(model: Model, network: nn.Module, shape: tuple[int, ...]) -> object:
    """Run the network on a batch in training mode: on the meta device, without arithmetic, if the model allows it.

    A small network of torch's own layers is run as it is: its first operation on the meta device would import torch's
    compiler, which takes longer than a small training.
    """
    state: dict[str, Tensor] = dict([*network.named_parameters(), *network.named_buffers()])
    if "meta" in model.unsupported() or _is_small_and_plain(network):
        # copies of the buffers, so that this batch does not enter the batch-norm statistics
        state = {name: value.detach().clone() for name, value in state.items()}
        inputs = torch.zeros(shape)
    else:
        state = {name: torch.empty_like(value, device="meta") for name, value in state.items()}
        inputs = torch.empty(shape, device="meta")
    with torch.no_grad():
        return functional_call(network, state, (inputs,))


def _is_small_and_plain(network: nn.Module) -> bool:
    size = sum(value.numel() for value in network.parameters())
    return size < SMALL_NETWORK and all(type(layer).__module__.startswith("torch.nn.") for layer in network.modules())


def _digest(network: nn.Module) -> bytes:
    """Return a hash of the names and values of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, value in network.state_dict().items():
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)}".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy())
    return digest.digest()


def uses_global_rng(network: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Return whether a forward pass in training uses torch's global random generator; the network is not changed."""
    state = {name: value.detach().clone() for name, value in [*network.named_parameters(), *network.named_buffers()]}
    with torch.random.fork_rng(devices=()), torch.no_grad():
        before = torch.get_rng_state()
        functional_call(network, state, (torch.zeros(2, *input_shape),))
        return not torch.equal(before, torch.get_rng_state())


def samples_in_passes(network: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Return whether a stochastic pass in evaluation mode samples anything; the network is then in evaluation mode."""
    with torch.no_grad(), stochastic_pass(network.eval(), 0):
        network(torch.zeros(1, *input_shape))
        return any(layer.calls for layer in stochastic_layers(network))
