"""The small MobileNetV3 is the paper's, and its bottlenecks are torchvision's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ensemblekit_models.mobilenet import BOTTLENECKS, STEM_CHANNELS, _InvertedResidual
from torch import nn
from torchvision.models.mobilenetv3 import InvertedResidual, InvertedResidualConfig
from torchvision.ops.misc import SqueezeExcitation

import ensemblekit as ek


def test_mobilenet_v3_tiny_has_131586_parameters():
    network = ek.build_model("mobilenet_v3_tiny", (3, 128, 128), 10)
    assert sum(parameter.numel() for parameter in network.parameters()) == 131_586


@pytest.mark.parametrize("index", range(len(BOTTLENECKS)))
def test_each_bottleneck_computes_what_torchvisions_does(index):
    shape = BOTTLENECKS[index]
    inputs = BOTTLENECKS[index - 1].out if index else STEM_CHANNELS
    torch.manual_seed(index)
    ours = _InvertedResidual(inputs, shape)
    activation = "HS" if shape.activation is nn.Hardswish else "RE"
    config = InvertedResidualConfig(
        inputs, shape.kernel, shape.expanded, shape.out, shape.squeeze, activation, shape.stride, 1, 1.0
    )

    def squeeze(channels: int, _: int) -> SqueezeExcitation:  # torchvision rounds the reduced size to a multiple of 8
        layer = SqueezeExcitation(channels, channels // 4, scale_activation=nn.Hardsigmoid)
        for biased in (layer.fc1, layer.fc2):
            biased.bias = None
        return layer

    theirs = InvertedResidual(config, norm_layer=partial(nn.BatchNorm2d), se_layer=squeeze)
    values = list(ours.state_dict().values())
    names = list(theirs.state_dict())
    theirs.load_state_dict(
        {name: value.reshape(theirs.state_dict()[name].shape) for name, value in zip(names, values, strict=True)}
    )
    images = torch.randn(4, inputs, 9, 11)
    torch.testing.assert_close(ours(images), theirs(images))


@pytest.mark.parametrize(("side", "halvings"), [(32, 2), (64, 2), (65, 4), (128, 4)])
def test_small_images_are_halved_two_times_less(side, halvings):
    network = ek.build_model("mobilenet_v3_tiny", (3, side, side), 10)
    sizes = []
    network[-5].register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[-1]))
    network(torch.rand(2, 3, side, side))
    assert sizes == [-(-side // 2**halvings)]


def test_mobilenet_takes_a_single_pixel():
    assert ek.build_model("mobilenet_v3_tiny", (1, 1, 1), 3)(torch.rand(4, 1, 1, 1)).shape == (4, 3)
