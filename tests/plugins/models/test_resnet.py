"""The residual network is exactly the paper's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import ensemblekit as ek


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("width", "input_shape", "num_outputs", "parameters"),
    [
        (32, (3, 32, 32), 100, 88_100),
        (96, (3, 32, 32), 100, 706_468),
        (32, (1, 28, 28), 10, 74_954),
    ],
)
def test_resnet_has_the_parameters_of_the_paper(width, input_shape, num_outputs, parameters):
    network = ek.build_model({"name": "resnet", "width": width}, input_shape, num_outputs)
    assert count(network) == parameters


@pytest.mark.parametrize("name", ["resnet", "mobilenet_v3_tiny"])
def test_dropout_stands_before_the_linear_layer_adds_no_parameters_and_is_no_layer_at_all_if_it_is_zero(name):
    plain, dropping = (ek.build_model({"name": name, "dropout": share}, (3, 32, 32), 10).eval() for share in (0.0, 0.5))
    assert isinstance(dropping[-2], ek.Noise)
    assert len(dropping) == len(plain) + 1
    assert not any(isinstance(layer, ek.Noise | nn.Dropout) for layer in plain.modules())
    for left, right in zip(plain.parameters(), dropping.parameters(), strict=True):
        assert torch.equal(left, right)
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(plain(images), dropping(images))


def test_resnet_computes_what_its_formula_says():
    network = ek.build_model({"name": "resnet", "width": 5, "blocks": 2}, (2, 9, 12), 3).eval()
    state = iter(network.state_dict().values())

    def norm(images):
        weight, bias, mean, variance, _ = (next(state)[..., None, None] for _ in range(5))
        return (images - mean) / (variance + 1e-5).sqrt() * weight + bias

    images = torch.rand(4, 2, 9, 12)
    hidden = norm(functional.conv2d(images, next(state), next(state), padding=1)).relu()
    for _ in range(2):
        once = norm(functional.conv2d(hidden, next(state), padding=1)).relu()
        twice = norm(functional.conv2d(once, next(state), padding=1)).relu()
        hidden = functional.max_pool2d(hidden + twice, 2)
    expected = hidden.flatten(1) @ next(state).T + next(state)
    torch.testing.assert_close(network(images), expected)


@pytest.mark.parametrize("name", ["resnet", "binary_resnet"])
def test_images_that_vanish_are_refused_with_the_number_of_blocks_that_fit(name):
    with pytest.raises(ek.UsageError, match=r"(?s)8×8 can be halved only 3 times.*blocks.*set blocks to 3 or less"):
        ek.build_model({"name": name, "blocks": 4}, (1, 8, 8), 10)
    ek.build_model({"name": name, "blocks": 3, "width": 2}, (1, 8, 8), 10)


@pytest.mark.parametrize("name", ["resnet", "binary_resnet", "mobilenet_v3_tiny", "torchvision"])
def test_a_table_is_refused_by_a_convolutional_network(name):
    with pytest.raises(ek.UsageError, match=r"(?s)needs images .* but inputs have shape \(64,\).*mlp"):
        ek.build_model(name, (64,), 10)


STUB_DATASET = """
import ensemblekit as ek

class Stub(ek.Dataset):
    'Knows at most its shape.'

    shape: tuple[int, ...] | None = None

    @property
    def info(self):
        return self.shape and ek.DataInfo("classification", self.shape, 10)

    def load(self, seed):
        raise AssertionError("loaded")
"""


@pytest.mark.parametrize(
    ("model", "shape", "problem"),
    [
        ("resnet", [1, 8, 8], r"model\.blocks: 4, but images of 8×8 can be halved only 3 times"),
        ("binary_resnet", [10], "model: .* needs images"),
        ("torchvision", [3, 32], "model: .* needs images"),
        ("resnet", [1, 16, 16], None),
        ("resnet", None, None),
        ("mlp", [10], None),
    ],
)
def test_inputs_that_do_not_fit_are_found_in_the_spec_before_data_is_loaded(tmp_path, model, shape, problem):
    file = tmp_path / "stub.py"
    file.write_text(STUB_DATASET)
    data = {"name": "stub"} if shape is None else {"name": "stub", "shape": shape}
    tables = {"data": data, "model": {"name": model}}
    if problem is None:
        assert ek.load_spec(tables, plugins=[file]).model.name == model
    else:
        with pytest.raises(ek.EnsemblekitError, match=problem):
            ek.load_spec(tables, plugins=[file])
