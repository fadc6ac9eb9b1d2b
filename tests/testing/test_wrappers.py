"""The contract kit gives simple plugins to a plugin whose required parameters are plugins."""

from __future__ import annotations

import json

import pytest
from helpers.commands import run
from helpers.places import HELPERS
from helpers.wrappers import Scaled, Wrapper
from pydantic import Field
from torch import nn

from ensemblekit import Model
from ensemblekit.testing import contract, run_contract
from ensemblekit.testing.toy_run import ToyNetwork, required_plugins

ROUND_TRIP = "it round-trips through a spec"


class Around(Model):
    """Any model."""

    model: Model = Field(description="the model that is built")

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        return self.model.build(input_shape, num_outputs)


class Several(Model):
    """Needs plugins in lists and tables."""

    models: tuple[Model, ...] = Field(min_length=2, description="models in a row")
    pair: tuple[Model, Model] = Field(description="two models")
    by_name: dict[str, Model] = Field(description="models by name")

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        first, second = self.pair
        assert len(self.models) >= 2
        assert self.by_name
        return nn.Sequential(first.build(input_shape, num_outputs), second.build((num_outputs,), num_outputs))


class Forgetful(Wrapper):
    """Writes a table without the model in it."""

    def to_table(self):
        return {key: value for key, value in super().to_table().items() if key != "maybe"}


@pytest.mark.parametrize("plugin_class", [Around, Several, Scaled], ids=lambda cls: cls.__name__)
def test_a_class_with_required_plugins_is_checked_with_simple_ones(plugin_class):
    results = run_contract(plugin_class)
    assert len(results) > 10
    assert {result.name: result.message for result in results if not result.passed} == {}


def test_required_plugins_are_the_simplest_of_their_kinds():
    values = required_plugins(Several)
    assert values["models"] == [ToyNetwork(), ToyNetwork()]
    assert values["pair"] == [ToyNetwork(), ToyNetwork()]
    assert values["by_name"] == {"toy": ToyNetwork()}


def test_a_table_that_loses_an_inner_plugin_does_not_round_trip():
    (check,) = [
        check for check in contract(Forgetful(model=ToyNetwork(), maybe=ToyNetwork())) if str(check) == ROUND_TRIP
    ]
    assert check.result().passed is False
    (check,) = [
        check for check in contract(Wrapper(model=ToyNetwork(), maybe=ToyNetwork())) if str(check) == ROUND_TRIP
    ]
    assert check.result().passed is True


def test_the_command_checks_a_wrapper_of_the_given_plugin(tmp_path):
    file = tmp_path / "wrapping.py"
    text = (HELPERS / "wrappers.py").read_text()
    head, classes = text.split("class Picky", 1)[0], text.split("class Scaled", 1)[1].split("class Fitted", 1)[0]
    file.write_text(f"{head}class Scaled{classes}")
    rows = json.loads(run("check", str(file), "--json").stdout)
    assert rows
    assert all(row["passed"] for row in rows)
    given = json.loads(run("check", str(file), "--set", "method=bagging", "--json").stdout)
    assert all(row["passed"] for row in given)
    wrong = run("check", str(file), "--set", "method=baging")
    assert 'did you mean "bagging"' in wrong.stderr
