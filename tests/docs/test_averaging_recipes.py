"""The recipes of AdaBoost and of weight averaging compute what their formulas say."""

from __future__ import annotations

import pytest
import torch
from helpers.places import ROOT
from helpers.small_runs import assert_same_tensors, small_spec, training
from safetensors.torch import load_file as load_tensors

import ensemblekit as ek
from ensemblekit.core.registry import load_file

COOKBOOK = ROOT / "docs" / "cookbook"


def networks(path):
    """The tensors of the networks of a run's model."""
    return {name: value for name, value in load_tensors(path / "model.safetensors").items() if "members." in name}


def test_the_recipe_of_samme_trains_what_the_built_in_method_trains(tmp_path):
    settings = training(epochs=6, optimizer={"name": "sgd", "lr": 0.5})
    runs = [
        ek.train(small_spec(method=name, training=settings), tmp_path / name, progress=False, plugins=plugins)
        for name, plugins in (("adaboost", []), ("own_samme", [COOKBOOK / "samme.py"]))
    ]
    expected, found = networks(tmp_path / "adaboost"), networks(tmp_path / "own_samme")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
    votes = load_tensors(tmp_path / "own_samme" / "model.safetensors")["methods.own_samme.votes"]
    alphas = load_tensors(tmp_path / "adaboost" / "model.safetensors")["methods.adaboost.alphas"]
    torch.testing.assert_close(votes, alphas.float(), rtol=1e-4, atol=1e-5)
    assert alphas.min() > 0
    accuracies = [run.metrics["test_accuracy"] for run in runs]
    assert accuracies[0] == accuracies[1]


def test_the_recipe_of_swa_trains_what_the_built_in_method_trains(tmp_path):
    for name, start in (("swa", 0.75), ("own_swa", 0.5)):  # both average the weights after epochs 3 and 4
        spec = small_spec(method={"name": name, "start": start}, training=training(epochs=4))
        ek.train(spec, tmp_path / name, progress=False, plugins=[COOKBOOK / "swa.py"])
    assert_same_tensors(tmp_path / "swa" / "model.safetensors", tmp_path / "own_swa" / "model.safetensors")


def swag(model, **settings):
    (info,) = load_file(COOKBOOK / "swag.py")
    return info.load()(model=model, **settings)


@pytest.fixture
def model():
    return ek.models()["mlp"].load()(hidden=(3,), batch_norm=False)


def test_swag_samples_the_gaussian_of_the_weights_that_count(model):
    network = swag(model, start=3, every=2, rank=2).build_family((4,), 2, 5)
    inputs, history = torch.randn(6, 4), []
    for _ in range(8):
        history.append(torch.cat([weight.detach().flatten() for weight in network.parameters()]))
        outputs = network.train()(inputs)
        assert outputs.shape == (5, 6, 2)
        outputs.square().mean().backward()
        with torch.no_grad():
            for weight in network.parameters():
                weight -= 0.5 * weight.grad
    counted = torch.stack([history[2], history[4], history[6]])  # at steps 3, 5 and 7
    mean, variance = counted.mean(dim=0), counted.var(dim=0, unbiased=False)
    means = [counted[: number + 1].mean(dim=0) for number in range(3)]
    deviations = torch.stack([counted[2] - means[2], counted[1] - means[1]])  # the third takes the place of the first
    noise, low_rank = network.noise[:, :-2], network.noise[:, -2:]
    samples = mean + variance.sqrt() * noise / 2**0.5 + low_rank @ deviations / 2**0.5
    predicted = network.eval()(inputs)
    for sample, outputs in zip(samples, predicted, strict=True):
        plain = model.build((4,), 2)
        torch.nn.utils.vector_to_parameters(sample, plain.parameters())
        torch.testing.assert_close(plain.eval()(inputs), outputs, rtol=1e-3, atol=1e-5)
    assert not torch.allclose(predicted[0], predicted[1], atol=1e-3)


def test_swag_has_the_covariance_of_the_paper(model):
    """Of many samples: half of the variances, and half of the covariance of the deviations."""
    network = swag(model, start=1, every=1, rank=3).build_family((4,), 2, 20_000)
    with torch.no_grad():
        for _ in range(3):
            network.count(torch.randn(len(network.mean)))
    noise, low_rank = network.noise[:, :-3], network.noise[:, -3:]
    variance = network.square - network.mean.square()
    samples = (variance.sqrt() * noise + low_rank @ network.deviations / 2**0.5) / 2**0.5
    expected = (variance.diag() + network.deviations.T @ network.deviations / 2) / 2
    torch.testing.assert_close(samples.T.cov(), expected, rtol=0, atol=0.1)
    assert float(expected.abs().max()) > 0.3


def test_swag_trains_one_network_and_predicts_with_different_ones(tmp_path):
    table = {"name": "swag", "model": {"name": "mlp", "hidden": [16], "batch_norm": False}, "start": 4, "every": 1}
    data = {"name": "digits", "limit_train": 200, "limit_test": 100}
    plugins = [COOKBOOK / "swag.py"]
    run = ek.train(small_spec(model=table, data=data), tmp_path / "run", progress=False, plugins=plugins)
    plain = small_spec(model=table["model"], data=data, ensemble={"members": 1})
    alone = ek.train(plain, tmp_path / "plain", progress=False)
    objectives = [[row["train_objective"] for row in found.history] for found in (run, alone)]
    assert len(objectives[0]) == 3
    assert objectives[0] == pytest.approx(objectives[1], rel=1e-4)
    outputs = run.outputs("test").outputs
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)
