"""Parameters of every type that TOML has work in a run, and the kit tries the values of the plugin that it gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from helpers.broken_methods import RESUMES, Good
from helpers.broken_models import TRAINS, GoodModel
from helpers.broken_others import DATA_TRAINS, FINISHES, LOSS_TRAINS, GoodData, GoodExtension, GoodLoss
from pydantic import Field
from torch import Tensor, nn

from ensemblekit import Loss, hookimpl
from ensemblekit.core.plugin import Plugin
from ensemblekit.spec.sections import ENGINES
from ensemblekit.testing import contract
from ensemblekit.testing.toy_run import toy_registry, toy_spec, train_with_every_engine


class Layered(GoodModel):
    """Has hidden layers of the sizes in a list, and a table of options."""

    hidden: list[int] = Field([4, 3], description="sizes of the hidden layers")
    options: dict[str, bool] = Field({"bias": True}, description="options of all layers")

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for size in self.hidden:
            layers += [nn.LazyLinear(size, bias=self.options["bias"]), nn.Tanh()]
        network = nn.Sequential(*layers, nn.LazyLinear(num_outputs))
        network(Tensor(2, *input_shape).zero_())  # gives the lazy layers their size
        return network


class Weighted(Good):
    """Weights the members by a list."""

    weights: list[float] = Field([1.0, 2.0, 3.0], description="weight of each member")
    options: dict[str, float] = Field({"scale": 1.0}, description="factor of the loss")

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return self.options["scale"] * loss(outputs, target) * outputs.new_tensor(self.weights[:1])


class Listed(GoodData):
    """Has a list and a table of parameters."""

    columns: list[int] = Field([0, 1], description="columns to read")
    options: dict[str, str] = Field({"separator": ","}, description="options of the reader")


class Logs(GoodExtension):
    """Has a list and a table of parameters."""

    names: list[str] = Field(["epoch"], description="metrics to log")
    options: dict[str, str] = Field({"level": "info"}, description="options of the logger")

    @hookimpl
    def epoch_finished(self, metrics: Mapping[str, Any]) -> None:
        assert all(name in metrics for name in self.names)


class Scaled(GoodLoss):
    """Has a list and a table of parameters."""

    factors: list[float] = Field([2.0], description="factors of the loss")
    options: dict[str, float] = Field({"shift": 0.0}, description="constant to add")

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        return self.factors[0] * super().per_sample(outputs, target) + self.options["shift"]


@pytest.mark.parametrize(
    ("plugin", "trains"),
    [
        (Layered(hidden=[5]), TRAINS),
        (Weighted(), RESUMES),
        (Listed(), DATA_TRAINS),
        (Logs(), FINISHES),
        (Scaled(), LOSS_TRAINS),
    ],
    ids=lambda value: value.kind if isinstance(value, Plugin) else None,
)
def test_a_plugin_with_a_list_and_a_table_as_parameters_trains(plugin, trains):
    checks = {check.name: check for check in contract(plugin)}
    checks[trains]()


def test_a_model_is_trained_with_the_given_parameters_by_every_engine(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1}, raising=False)
    built: list[list[int]] = []
    build = Layered.build
    monkeypatch.setattr(Layered, "build", lambda model, *sizes: built.append(model.hidden) or build(model, *sizes))
    registry = toy_registry(Layered())
    spec = toy_spec(registry, {"model": Layered(hidden=[7]).to_table()})
    assert set(train_with_every_engine(spec, registry)) == set(ENGINES)
    assert built
    assert all(hidden == [7] for hidden in built)
