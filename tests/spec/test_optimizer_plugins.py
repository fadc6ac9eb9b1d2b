"""Optimizers of plugins: named in a spec like those of torch, on every engine, with a contract that finds mistakes."""

from __future__ import annotations

import json
from typing import ClassVar

import jsonschema
import pytest
import torch

import ensemblekit as ek
from ensemblekit.core.errors import SpecError
from ensemblekit.core.registry import discover
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.spec.pages import section_page
from ensemblekit.spec.reader import load_spec
from ensemblekit.spec.schema import spec_schema
from ensemblekit.testing import run_contract

SPEC = {
    "data": {"name": "digits", "limit_train": 100, "limit_test": 50},
    "model": {"name": "mlp", "hidden": [8]},
    "method": {"name": "gncl"},
    "ensemble": {"members": 2},
    "training": {"epochs": 2, "batch_size": 32, "optimizer": {"name": "counting_sgd", "lr": 0.1}},
    "engine": {"name": "sequential", "device": "cpu"},
}


class CountingSGDStep(torch.optim.Optimizer):
    """Gradient descent whose rate falls with a count of steps, kept as a plain number."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for value in group["params"]:
                state = self.state[value]
                state["steps"] = state.get("steps", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(value))
                mean.mul_(0.5).add_(self.direction(value.grad))
                value.sub_(mean, alpha=group["lr"] / state["steps"] ** 0.5)

    def direction(self, gradient):
        return gradient


class CountingSGD(ek.OptimizerPlugin):
    """Gradient descent with a plain number in its state."""

    elementwise: ClassVar[bool] = True

    def build(self, parameters):
        return CountingSGDStep(parameters, self.lr)


class NormalisedStep(CountingSGDStep):
    def direction(self, gradient):
        return gradient / gradient.norm()


class Normalised(ek.OptimizerPlugin):
    """Goes along the normalised gradient, which is not element-wise."""

    elementwise: ClassVar[bool] = True

    def build(self, parameters):
        return NormalisedStep(parameters, self.lr)


class NormalisedByTensor(Normalised):
    """Says that it is not element-wise."""

    elementwise: ClassVar[bool] = False


class UndeclaredCount(ek.OptimizerPlugin):
    """Keeps its count of steps in a tensor of another name, as torch's Adam would."""

    elementwise: ClassVar[bool] = True
    per_tensor_state: ClassVar[frozenset[str]] = frozenset()

    def build(self, parameters):
        return torch.optim.Adam(parameters, lr=self.lr)


class Adam(CountingSGD):
    """Has the name of a built-in optimizer."""


def registry(*classes):
    return discover().with_classes(classes or [CountingSGD])


def failures(plugin) -> dict[str, str]:
    return {result.name: result.message for result in run_contract(plugin) if result.passed is False}


def weights(path) -> dict[str, torch.Tensor]:
    return RunDirectory.open(path).read_model()[0]


@pytest.mark.parametrize("plugin", [CountingSGD, NormalisedByTensor], ids=lambda plugin: plugin.__name__)
def test_correct_optimizers_pass_their_contract(plugin):
    assert [f"{result.name}\n{result.message}" for result in run_contract(plugin) if not result.passed] == []


def test_an_optimizer_that_is_not_element_wise_but_says_so_is_found():
    found = failures(Normalised)
    assert "set elementwise = False" in found.pop("it is element-wise if it says so")
    assert not found  # the checks that need this one are skipped


def test_state_that_is_kept_once_per_tensor_has_to_be_declared():
    assert 'set per_tensor_state = frozenset({"step"})' in failures(UndeclaredCount)["its state can be saved"]


def test_an_optimizer_that_ignores_the_learning_rate_of_its_groups_is_found():
    class Stubborn(CountingSGD):
        """Multiplies by a rate of its own."""

        def build(self, parameters):
            optimizer = CountingSGDStep(parameters, self.lr)
            step = optimizer.step

            def stubborn(closure=None):
                for group in optimizer.param_groups:
                    group["lr"] = 0.1
                step()

            optimizer.step = stubborn
            return optimizer

    assert "half the learning rate" in failures(Stubborn)["its steps follow the learning rate of the parameter groups"]


def test_plain_numbers_in_the_state_give_the_same_result_on_every_engine(tmp_path):
    for engine in ("sequential", "threaded", "stacked"):
        tables = {**SPEC, "engine": {"name": engine, "device": "cpu"}}
        ek.train(tables, tmp_path / engine, plugins=[CountingSGD], progress=False)
    expected = weights(tmp_path / "sequential")
    for engine in ("threaded", "stacked"):
        for name, value in weights(tmp_path / engine).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_a_spec_names_an_optimizer_of_a_plugin_like_one_of_torch():
    spec = load_spec(SPEC, {"training.optimizer.lr": 0.25}, registry())
    assert (spec.optimizer.name, spec.optimizer.learning_rate, spec.optimizer.elementwise) == (
        "counting_sgd",
        0.25,
        True,
    )
    assert load_spec(spec.to_dict(), None, registry()) == spec
    assert dict(spec.plugins())["training.optimizer"] is spec.optimizer
    jsonschema.validate(json.loads(json.dumps(spec.to_dict())), spec_schema(registry(), pytest.fail))


def test_inspect_lists_the_optimizers_of_plugins_with_those_of_torch():
    names = section_page("training.optimizer", registry())["names"]
    assert {"counting_sgd", "adam", "adabelief"} <= set(names)


@pytest.mark.parametrize(
    ("classes", "name", "what"),
    [
        ([CountingSGD], "counting_sg", 'there is no optimizer "counting_sg"'),
        ([Adam], "adam", 'two optimizers are called "adam"'),
    ],
)
def test_unknown_and_ambiguous_names_are_errors(classes, name, what):
    with pytest.raises(SpecError) as caught:
        load_spec(SPEC, {"training.optimizer": {"name": name}}, registry(*classes))
    assert what in caught.value.problems[0].what


def test_a_wrong_parameter_is_named():
    with pytest.raises(SpecError) as caught:
        load_spec(SPEC, {"training.optimizer.lr": -1.0}, registry())
    assert caught.value.problems[0].path == "training.optimizer.lr"
