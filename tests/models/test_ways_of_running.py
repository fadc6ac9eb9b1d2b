"""Every installed model runs in every way that engines use, or says which it cannot take."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

import ensemblekit as ek
from ensemblekit.members import build_member, build_members
from ensemblekit.plugin import Model

SHAPE, NUM_OUTPUTS, BATCH = (3, 32, 32), 5, 4
DEFAULTS = [{"name": name} for name in ek.models()]
DETERMINISTIC = [
    {"name": "resnet", "width": 8},
    {"name": "binary_resnet", "width": 8, "stochastic": False},
    {"name": "mobilenet_v3_tiny"},
    {"name": "mlp"},
    {"name": "torchvision", "arch": "shufflenet_v2_x0_5"},
]
RANDOM = [
    {"name": "binary_resnet", "width": 8, "stochastic": True},
    {"name": "mlp", "dropout": 0.5},
    {"name": "torchvision", "arch": "squeezenet1_1"},
]


@pytest.fixture(autouse=True)
def one_thread():
    """Batches this small only wait for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def label(table: dict[str, object]) -> str:
    return "-".join(str(value) for value in table.values())


def plugin(table: dict[str, object]) -> Model:
    parameters = {key: value for key, value in table.items() if key != "name"}
    return ek.models()[str(table["name"])].load()(**parameters)


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(BATCH, *SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)


def gradients(network: nn.Module, outputs: Tensor) -> list[Tensor]:
    assert outputs.shape == (BATCH, NUM_OUTPUTS)
    return list(torch.autograd.grad(outputs.square().sum(), list(network.parameters())))


def run_meta(network: nn.Module) -> None:
    network.to("meta")
    gradients(network, network(images().to("meta")))


def run_channels_last(network: nn.Module) -> None:
    expected = copy.deepcopy(network).double()
    network.double().to(memory_format=torch.channels_last)
    inputs = images(torch.float64)
    torch.manual_seed(0)
    outputs = network(inputs.to(memory_format=torch.channels_last))
    found = gradients(network, outputs)
    if not has_random_parts(network):
        torch.testing.assert_close(outputs, expected(inputs))
        torch.testing.assert_close(found, gradients(expected, expected(inputs)))


def run_autocast(network: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        outputs = network(images())
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(network, outputs))


def run_vmap(network: nn.Module) -> None:
    members = [network, copy.deepcopy(network)]
    outputs, parameters, _ = run_stacked(members, images())
    found = torch.autograd.grad(outputs.square().sum(), list(parameters.values()))
    assert all(bool(gradient.isfinite().all()) for gradient in found)


def run_stacked(members: list[nn.Module], inputs: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Outputs (M, B, C), stacked parameters and the buffers as one training step leaves them."""
    parameters, buffers = stack_module_state(members)
    skeleton = copy.deepcopy(members[0]).to("meta")

    def member(parameters, buffers, inputs):
        return functional_call(skeleton, (parameters, buffers), (inputs,))

    outputs = vmap(member, in_dims=(0, 0, None), randomness="different")(parameters, buffers, inputs)
    return outputs, parameters, buffers


def has_random_parts(network: nn.Module) -> bool:
    torch.manual_seed(1)
    first = network(images(torch.float64))
    return not torch.equal(first, network(images(torch.float64)))


WAYS = {"meta": run_meta, "channels_last": run_channels_last, "autocast": run_autocast, "vmap": run_vmap}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("table", [*DEFAULTS, DETERMINISTIC[1], *RANDOM[1:]], ids=label)
def test_a_model_runs_forward_and_backward_or_declares_that_it_cannot(table, way):
    model = plugin(table)
    network = ek.build_model(model, SHAPE, NUM_OUTPUTS).train()
    if way in model.unsupported():
        with pytest.raises((RuntimeError, UserWarning)):
            WAYS[way](network)
    else:
        WAYS[way](network)


@pytest.mark.parametrize("table", DETERMINISTIC, ids=label)
def test_stacked_members_compute_what_they_compute_one_by_one(table):
    model = plugin(table)
    members = [member.double().train() for member in build_members([model] * 3, SHAPE, NUM_OUTPUTS, seed=0)]
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in (parameter for member in members for parameter in member.parameters()):
            # Away from the start: there a batch norm neither scales nor shifts, and signs of exact zeros are rounding.
            parameter += 0.05 * torch.randn_like(parameter)
    single = copy.deepcopy(members)
    inputs = images(torch.float64)

    outputs, parameters, buffers = run_stacked(members, inputs)
    stacked_gradients = torch.autograd.grad(outputs.square().sum(), list(parameters.values()))

    expected = torch.stack([member(inputs) for member in single])
    torch.testing.assert_close(outputs, expected)
    for index, member in enumerate(single):
        found = torch.autograd.grad(expected[index].square().sum(), list(member.parameters()), retain_graph=True)
        torch.testing.assert_close([gradient[index] for gradient in stacked_gradients], list(found))
        for name, buffer in member.named_buffers():
            torch.testing.assert_close(buffers[name][index], buffer)
            if name.endswith("running_mean"):
                assert bool((buffer != 0).any())


@pytest.mark.parametrize("table", RANDOM, ids=label)
def test_stacked_members_draw_their_own_random_numbers(table):
    first, second = (build_member(plugin(table), SHAPE, NUM_OUTPUTS, seed=0, member=index).train() for index in (0, 1))
    second.load_state_dict(first.state_dict())
    outputs, _, _ = run_stacked([first, second], images())
    assert not torch.equal(outputs[0], outputs[1])


def test_vmap_really_refuses_stochastic_depth():
    model = plugin({"name": "torchvision", "arch": "efficientnet_b0"})
    network = ek.build_model(model, SHAPE, NUM_OUTPUTS).train()
    assert "vmap" in model.unsupported()
    with pytest.raises(RuntimeError, match="randomness"):
        run_vmap(network)


@pytest.mark.parametrize("arch", ["convnext_tiny", "efficientnet_v2_s", "maxvit_t", "swin_t", "vit_b_16", "resnet50"])
def test_the_networks_of_torchvision_that_vmap_refuses_say_why(arch):
    reasons = plugin({"name": "torchvision", "arch": arch}).unsupported()
    assert set(reasons) == (set() if arch == "resnet50" else {"vmap"})
    assert all("vmap" in reason for reason in reasons.values())
