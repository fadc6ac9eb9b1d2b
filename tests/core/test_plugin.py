"""What every plugin has in common: parameters that do not change, and plugins as parameters."""

from __future__ import annotations

import pytest
from helpers.wrappers import Picky, Wrapper
from pydantic import Field, PrivateAttr, ValidationError
from torch import Tensor

import ensemblekit as ek
from ensemblekit import Loss, Method, hookimpl
from ensemblekit.core.errors import PluginError


class Warming(Method):
    """Changes a parameter during a run, which is not possible."""

    lam: float = Field(0.5, description="weight of the loss")
    _calls: int = PrivateAttr(0)

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        self._calls += 1
        if self._calls > 1:
            self.lam = 0.9
        return self.lam * loss(outputs, target)


@pytest.mark.parametrize("name", ["lam", "strength"])
def test_setting_a_parameter_says_how_to_change_something_over_time(name):
    method = Warming()
    with pytest.raises(PluginError) as error:
        setattr(method, name, 0.9)
    assert error.value.what == f"self.{name} cannot be set: parameters do not change during a run"
    assert error.value.where == 'method "warming"'
    for word in ("`progress`", "`epoch`", f"_{name} = PrivateAttr", "state()", "load_state()"):
        assert word in error.value.fix
    assert method.lam == 0.5


def test_a_private_attribute_may_change():
    method = Warming()
    method._calls = 7
    assert method._calls == 7


def test_a_hook_that_sets_a_parameter_ends_the_run_with_that_advice(tmp_path):
    spec = {
        "data": {"name": "digits", "limit_train": 40},
        "model": {"name": "mlp", "hidden": [3]},
        "method": "warming",
        "training": {"epochs": 2},
        "engine": {"name": "sequential", "device": "cpu"},
    }
    with pytest.raises(PluginError, match="parameters do not change during a run"):
        ek.train(spec, tmp_path / "run", progress=False, plugins=[Warming])


def test_inner_plugins_come_with_their_paths():
    wrapper = Wrapper(model=Picky(), others=(Picky(width=1), Picky(width=2)))
    assert [path for path, _ in wrapper.inner_plugins()] == ["model", "others.0", "others.1", "usual"]


@pytest.mark.parametrize("value", ["picky", {"name": "picky"}, 3, Warming()])
def test_in_python_an_inner_plugin_is_an_instance_of_its_kind(value):
    with pytest.raises(ValidationError, match="is not a Model"):
        Wrapper(model=value)
