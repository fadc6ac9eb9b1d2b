"""Binary blocks trained with 8-bit integers compute what they compute with floating-point numbers."""

from __future__ import annotations

import pytest
import torch
from ensemblekit_models import binary_resnet, binary_training
from ensemblekit_models.binary_prediction import has_integer_convolutions
from torch import Tensor, nn

import ensemblekit as ek
from ensemblekit.members.build import build_member
from ensemblekit.testing.execution_modes import run_stacked

pytestmark = pytest.mark.skipif(not has_integer_convolutions(), reason="no 8-bit convolutions here")


def network(stochastic: bool = True) -> nn.Module:
    """A network in channels_last whose batch norms have slopes of both signs and one of zero."""
    model = ek.models()["binary_resnet"].load()(width=5, blocks=2, stochastic=stochastic)
    built = build_member(model, (3, 9, 8), 4, 0, 0).to(memory_format=torch.channels_last).train()
    with torch.no_grad():
        for layer in built.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.weight.copy_(torch.linspace(-1, 1, 5))
    return built


def images() -> Tensor:
    return torch.randn(6, 3, 9, 8, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=torch.channels_last
    )


def step(member: nn.Module, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs and the gradients of a loss."""
    outputs = member(inputs)
    return outputs, list(torch.autograd.grad(outputs.square().sum(), list(member.parameters())))


@pytest.fixture
def calls(monkeypatch) -> list[torch.Size]:
    """The shapes of what is convolved with integers."""
    shapes = []

    class Recorded(binary_training.SignConvolution):
        @staticmethod
        def forward(ctx, values, thresholds, signs):
            shapes.append(values.shape)
            return binary_training.SignConvolution.forward(ctx, values, thresholds, signs)

    monkeypatch.setattr(binary_resnet, "SignConvolution", Recorded)
    return shapes


@pytest.mark.parametrize("stochastic", [True, False])
def test_outputs_are_those_of_the_float_computation_and_gradients_too_up_to_rounding(stochastic, calls, monkeypatch):
    outputs, gradients = step(network(stochastic), images())
    assert len(calls) == 4
    monkeypatch.setattr(binary_resnet, "trains_with_integers", lambda values: False)
    expected, expected_gradients = step(network(stochastic), images())
    assert len(calls) == 4
    assert torch.equal(outputs, expected)
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5 * largest)


def test_gradients_pass_where_values_are_at_most_one():
    values = torch.tensor([-1.5, -1.0, 0.5, 1.0, 1.0000001, 2.0]).view(1, 1, 2, 3).requires_grad_()
    sums = binary_training.SignConvolution.apply(values, 0.0, torch.ones(2, 1, 3, 3))
    sums.sum().backward()
    assert (values.grad != 0).flatten().tolist() == [False, True, True, True, False, False]


def test_other_layouts_types_stacks_and_watched_layers_use_floating_point_numbers(calls):
    step(network().to(memory_format=torch.contiguous_format), images().contiguous())
    step(network().double(), images().double())
    with torch.autocast("cpu", torch.bfloat16):
        network()(images())
    run_stacked([network(), network()], images())
    seen: list[Tensor] = []
    watched = network()
    watched[1].residual[2].register_forward_hook(lambda layer, inputs, outputs: seen.append(outputs))
    watched[2].residual[0].register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    step(watched, images())
    assert len(seen) == 2
    assert not calls


@pytest.mark.parametrize("name", ["0.weight", "1.residual.0.weight", "1.residual.2.weight", "2.residual.3.bias"])
def test_nan_is_not_hidden_by_signs(name, calls):
    member = network()
    with torch.no_grad():
        member.get_parameter(name)[1] = torch.nan
    assert member(images()).isnan().any()
    assert calls
