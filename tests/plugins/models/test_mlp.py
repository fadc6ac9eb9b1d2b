"""The multi-layer perceptron has the layers that its parameters say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ensemblekit as ek


def test_mlp_has_the_parameters_of_its_layers():
    network = ek.build_model({"name": "mlp", "hidden": [7, 5], "batch_norm": True}, (1, 8, 8), 10)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    assert parameters == (64 * 7 + 7) + 2 * 7 + (7 * 5 + 5) + 2 * 5 + (5 * 10 + 10)


def test_mlp_without_hidden_layers_is_linear_in_its_flattened_input():
    network = ek.build_model({"name": "mlp", "hidden": []}, (2, 3), 4)
    weight, bias = network.parameters()
    inputs = torch.rand(5, 2, 3)
    torch.testing.assert_close(network(inputs), inputs.flatten(1) @ weight.T + bias)


def test_mlp_without_batch_norm_and_dropout_has_none():
    kinds = {type(layer) for layer in ek.build_model({"name": "mlp", "batch_norm": False}, (3,), 2).modules()}
    assert kinds == {nn.Sequential, nn.Flatten, nn.Linear, nn.ReLU}


def test_dropout_drops_its_share_of_the_hidden_units_in_training_only():
    network = ek.build_model({"name": "mlp", "hidden": [4000], "batch_norm": False, "dropout": 0.25}, (3,), 2)
    inputs = torch.rand(8, 3)
    hidden = network[:3](inputs)
    torch.manual_seed(0)
    dropped = ((network[:-1](inputs) == 0) & (hidden > 0)).sum() / (hidden > 0).sum()
    assert float(dropped) == pytest.approx(0.25, abs=0.02)
    network.eval()
    torch.testing.assert_close(network[:-1](inputs), hidden)


@pytest.mark.parametrize("bad", [{"hidden": [0]}, {"dropout": 1.0}, {"hidden": 3}])
def test_impossible_layers_are_refused(bad):
    with pytest.raises(ek.EnsemblekitError, match=next(iter(bad))):
        ek.build_model({"name": "mlp", **bad}, (3,), 2)
