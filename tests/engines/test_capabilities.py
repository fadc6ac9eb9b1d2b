"""What is said of a model's fast ways of running is so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ensemblekit as ek
from ensemblekit.engines.capabilities import capabilities, default_capabilities


def paths(name: str, **parameters) -> dict[str, str]:
    return capabilities(ek.models()[name].load()(**parameters))


def test_a_perceptron_is_stacked_layer_by_layer():
    found = paths("mlp", dropout=0.1)
    assert found["stacked"] == "yes: every layer by one operation"
    assert found["folding"] == "yes: 2 of 2 batch norms in predictions"
    assert paths("mlp", batch_norm=False)["folding"] == "no: it has no batch norm"


def test_layers_that_are_left_to_vmap_are_named():
    assert paths("resnet")["stacked"] == "yes: Conv2d, ResidualBlock by torch.func.vmap"


class Drawing(nn.Module):
    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.last = nn.LazyLinear(num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(inputs.flatten(1)) * torch.rand(1)


class Odd(ek.Model):
    """Supports nothing."""

    def unsupported(self) -> dict[str, str]:
        return {way: f"not {way}" for way in ("vmap", "channels_last", "autocast", "meta")}

    def build(self, input_shape, num_outputs):
        network = Drawing(num_outputs)
        network(torch.zeros(1, *input_shape))
        return network


def test_reasons_are_given_where_a_way_is_not_supported():
    assert capabilities(Odd()) == {
        "threads": "no: it uses torch's global random generator, which threads share",
        "layout": "not channels_last: not channels_last",
        "stacked": "no: not vmap",
        "folding": "no: it has no batch norm",
        "bf16": "no: not autocast",
    }


def test_inputs_that_are_no_images_have_no_layout():
    assert capabilities(ek.models()["mlp"].load()(), (16,))["layout"] == "unchanged (inputs are not images)"


@pytest.mark.parametrize("name", sorted(ek.models()))
def test_every_model_can_be_asked(name):
    model_class = ek.models()[name].load()
    needs_parameters = any(field.is_required() for field in model_class.model_fields.values())
    assert (default_capabilities(model_class) == {}) == needs_parameters
