"""Binary blocks computed with 8-bit integers give what the float computation gives."""

from __future__ import annotations

import pytest
import torch
from ensemblekit_models import binary_resnet
from ensemblekit_models.binary_prediction import IntegerBlock, has_integer_convolutions

import ensemblekit as ek
from ensemblekit.members.build import build_member
from ensemblekit.members.folding import FoldedMember, folded


def network(width: int = 5) -> torch.nn.Module:
    """A network whose batch norms have slopes of both signs and one of zero."""
    built = build_member(ek.models()["binary_resnet"].load()(width=width, blocks=2), (3, 9, 8), 4, 0, 0).train()
    with torch.no_grad():
        for layer in built.modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                layer.weight.copy_(torch.linspace(-1, 1, width))
                layer.bias.uniform_(-0.5, 0.5)
        built(torch.randn(16, 3, 9, 8))
    return built.eval()


@pytest.mark.parametrize("batch", [1, 11])
def test_integer_blocks_give_the_outputs_of_the_float_network(batch):
    member, inputs = network(), torch.randn(batch, 3, 9, 8)
    ready = FoldedMember(member, channels_last=True)
    assert sum(isinstance(layer, IntegerBlock) for layer in ready.network.modules()) == 2 * has_integer_convolutions()
    with torch.no_grad():
        torch.testing.assert_close(ready(inputs)[0], member(inputs), rtol=1e-5, atol=1e-5)
    assert torch.equal(ready(inputs), ready(inputs))


def test_stochastic_passes_double_precision_and_missing_operators_keep_the_float_network(monkeypatch):
    member = network()

    def uses_integers(copy: torch.nn.Module) -> bool:
        return any(isinstance(layer, IntegerBlock) for layer in copy.modules())

    assert not uses_integers(folded(member, stochastic=True)[0])
    assert not uses_integers(folded(network().double())[0])
    monkeypatch.setattr(binary_resnet, "has_integer_convolutions", lambda: False)
    copy, _ = folded(member)
    assert not uses_integers(copy)
    inputs = torch.randn(3, 3, 9, 8)
    with torch.no_grad():
        torch.testing.assert_close(copy(inputs), member(inputs), rtol=1e-5, atol=1e-5)


def test_weights_that_are_not_finite_are_not_hidden_by_signs():
    member = network()
    with torch.no_grad():
        member[1].residual[2].weight[0, 0, 0, 0] = torch.nan
        assert not FoldedMember(member, channels_last=True)(torch.randn(2, 3, 9, 8)).isfinite().all()
