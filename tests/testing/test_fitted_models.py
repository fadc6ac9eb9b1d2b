"""The kit understands models that are fitted once or know their outputs: their faults are found, one check each."""

from __future__ import annotations

from math import prod

import pytest
import torch
from ensemblekit_models.predictions import Predictions
from ensemblekit_models.sklearn_estimators import KINDS
from ensemblekit_models.sklearn_model import Sklearn
from safetensors.torch import save_file
from torch import nn

import ensemblekit as ek
from ensemblekit.core.plugin import Plugin
from ensemblekit.testing import contract, run_contract

EFFECT = "fitting changes its outputs"
REPRODUCIBLE = "fitting is reproducible and has no side effects"
WEIGHTS = "sample weights change what is fitted"
RESTORED = "a fitted member is restored from its buffers"
RUNS = "it is part of runs with every supported engine"
KNOWN = "known outputs are those of the samples asked for"


class Shares(nn.Module):
    """Gives the same outputs for all inputs."""

    def __init__(self, num_outputs):
        super().__init__()
        self.register_buffer("outputs", torch.zeros(num_outputs))

    def forward(self, inputs):
        return self.outputs.expand(len(inputs), -1) + 0


class GoodFit(ek.Model):
    """Predicts the shares of the classes."""

    fitted = True

    def build(self, input_shape, num_outputs):
        return Shares(num_outputs)

    def shares(self, targets, weights, num_outputs):
        weights = torch.ones(len(targets)) if weights is None else weights
        counts = torch.zeros(max(num_outputs, 2)).index_add(0, targets, weights)
        return (counts + 1) / (counts + 1).sum()

    def fit(self, network, inputs, targets, weights, loss, seed):
        network.outputs = loss.from_probabilities(self.shares(targets, weights, len(network.outputs)))


class WithoutEffect(GoodFit):
    """Forgets what it has learnt."""

    def fit(self, network, inputs, targets, weights, loss, seed):
        self.shares(targets, weights, len(network.outputs))


class WithoutWeights(GoodFit):
    """Ignores the weights."""

    def fit(self, network, inputs, targets, weights, loss, seed):
        super().fit(network, inputs, targets, None, loss, seed)


class WithGlobalNoise(GoodFit):
    """Samples from a generator that nobody has seeded."""

    def fit(self, network, inputs, targets, weights, loss, seed):
        super().fit(network, inputs, targets, weights, loss, seed)
        network.outputs = network.outputs + torch.rand(len(network.outputs), generator=UNSEEDED)


class ChangesInputs(GoodFit):
    """Centres the samples of all members in place."""

    def fit(self, network, inputs, targets, weights, loss, seed):
        inputs -= inputs.mean(dim=0)
        super().fit(network, inputs, targets, weights, loss, seed)


class Hidden(Shares):
    def forward(self, inputs):
        return super().forward(inputs) * getattr(self, "factor", 1.0)


class OutsideBuffers(GoodFit):
    """Keeps something outside the buffers."""

    def build(self, input_shape, num_outputs):
        return Hidden(num_outputs)

    def fit(self, network, inputs, targets, weights, loss, seed):
        super().fit(network, inputs, targets, weights, loss, seed)
        network.factor = 2.0


class LateBuffer(GoodFit):
    """Registers a buffer only when it is fitted."""

    def fit(self, network, inputs, targets, weights, loss, seed):
        super().fit(network, inputs, targets, weights, loss, seed)
        network.register_buffer("scale", torch.ones(1))


class Values(ek.Model):
    """Predicts the mean of real values."""

    fitted = True

    def build(self, input_shape, num_outputs):
        assert prod(input_shape)
        return Shares(num_outputs)

    def fit(self, network, inputs, targets, weights, loss, seed):
        weights = torch.ones(len(targets)) if weights is None else weights
        network.outputs = (weights @ targets) / weights.sum()

    def check_data(self, spec, info):
        if info.task == "classification":
            yield ek.Problem("", "predicts real values", "use other data")


UNSEEDED = torch.Generator()
FAULTS = [
    (WithoutEffect, {EFFECT}),
    (WithoutWeights, {WEIGHTS}),
    (WithGlobalNoise, {REPRODUCIBLE}),
    (ChangesInputs, {REPRODUCIBLE}),
    (OutsideBuffers, {RESTORED}),
    (LateBuffer, {RESTORED}),
]


def failures(plugin: Plugin | type[Plugin]) -> dict[str, str]:
    return {result.name: result.message for result in run_contract(plugin) if result.passed is False}


@pytest.mark.faults
@pytest.mark.parametrize(("broken", "failing"), FAULTS, ids=[broken.__name__ for broken, _ in FAULTS])
def test_a_fault_in_fitting_fails_its_check_and_no_others_and_is_located(broken, failing):
    found = failures(broken)
    assert set(found) == failing, found
    (message,) = found.values()
    assert "test_fitted_models.py:" in message


@pytest.mark.parametrize("good", [GoodFit, Values])
def test_a_fitted_model_without_a_fault_passes_all_checks(good):
    assert failures(good) == {}
    names = {check.name for check in contract(good)}
    assert names >= {EFFECT, REPRODUCIBLE, WEIGHTS, RESTORED, RUNS}
    assert not names & {"every parameter receives a gradient", "it trains with every supported engine"}


@pytest.mark.contract
@pytest.mark.parametrize("name", KINDS)
def test_every_estimator_of_scikit_learn_passes_all_checks(name):
    small = (
        {"n_estimators": 3} if "estimators" in str(KINDS[name].parameter_names(bool(KINDS[name].classifier))) else {}
    )
    assert failures(Sklearn(estimator=name, parameters=small)) == {}


@pytest.mark.contract
def test_a_fitted_model_that_gives_probabilities_passes_all_checks():
    assert failures(Sklearn(estimator="gaussian_nb", softmax=True)) == {}


def test_known_outputs_are_checked_by_their_own_contract(tmp_path):
    save_file({"train": torch.rand(3, 4), "test": torch.rand(3, 4)}, tmp_path / "file.safetensors")
    good = Predictions(path=tmp_path / "file.safetensors").named("predictions")
    assert failures(good) == {}
    assert KNOWN in {check.name for check in contract(good)}

    class InAnyOrder(Predictions):
        """Sorts the samples."""

        def known_outputs(self, split, indices, loss=None):
            return super().known_outputs(split, indices.sort().values, loss)

    class OneShort(Predictions):
        """Loses a sample."""

        def known_outputs(self, split, indices, loss=None):
            return super().known_outputs(split, indices, loss)[1:]

    for broken in (InAnyOrder, OneShort):
        assert set(failures(broken(path=tmp_path / "file.safetensors"))) == {KNOWN}
