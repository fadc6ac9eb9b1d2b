"""Models and plugin classes of a notebook: trained, recorded by name only, and needed again to load the run."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from functools import partial

import pytest
import torch
from helpers.commands import last_error, run
from pydantic import Field
from torch import Tensor, nn

import ensemblekit as ek
from ensemblekit.core.errors import PluginError, RunError, UsageError

INPUTS = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS.sum(dim=1) > 0).long()
DATA = (INPUTS, TARGETS)
SPEC = {"training": {"epochs": 1, "batch_size": 16}, "ensemble": {"members": 2}}


class Net(nn.Module):
    """What somebody writes in a cell, with a forward pass that only plain Python can follow."""

    def __init__(self, input_shape: tuple[int, ...] = (3,), num_outputs: int = 2, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(input_shape[0], width), nn.Linear(width, num_outputs)
        self.offset = torch.ones(1)  # not a buffer

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs) + self.offset
        return self.second(hidden.relu() if float(hidden.detach().sum()) > 0 else hidden.tanh())


class Linear(ek.Model):
    """One layer."""

    bias: bool = Field(True, description="whether to add a constant")

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        return nn.Linear(input_shape[0], num_outputs, bias=self.bias)


class Halved(ek.Method):
    """Half of each member's loss."""

    @ek.hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: ek.Loss) -> Tensor:
        return loss(outputs, target) / 2


def fixed_network() -> nn.Module:
    return nn.Linear(3, 2)


def train(path, model, spec=SPEC, **options) -> ek.Run:
    return ek.train(spec, path, data=DATA, model=model, progress=False, **options)


@pytest.mark.parametrize(
    "model",
    [
        Net,
        fixed_network,
        lambda: nn.Linear(3, 2),
        lambda num_outputs: nn.Linear(3, num_outputs),
        lambda **sizes: Net(**sizes, width=5),
        partial(Net, width=3),
    ],
    ids=["class", "function", "lambda", "one size", "both sizes", "partial"],
)
def test_a_network_class_or_function_is_a_model(model, tmp_path):
    trained = train(tmp_path / "run", model)
    assert trained.spec.model.name == "python"
    expected = trained.ensemble(INPUTS)
    assert torch.equal(ek.load(tmp_path / "run", model=model)(INPUTS), expected)
    assert torch.equal(ek.open_run(tmp_path / "run", model=model).ensemble(INPUTS), expected)
    assert ek.evaluate_run(tmp_path / "run", data=DATA, model=model)["test_accuracy"] >= 0
    assert ek.resume(tmp_path / "run", data=DATA, model=model, progress=False).status == "finished"


def test_a_run_keeps_the_name_of_a_model_but_nothing_that_could_be_imported(tmp_path):
    train(tmp_path / "run", Net)
    assert 'name = "python"\nfactory = "Net"' in (tmp_path / "run" / "spec.toml").read_text()
    plugins = json.loads((tmp_path / "run" / "environment.json").read_text())["plugins"]
    assert {"kind": "model", "name": "python", "package": "model=Net", "version": ""} in plugins


def test_without_its_model_a_run_says_in_the_terms_of_the_caller_what_to_pass(tmp_path):
    train(tmp_path / "run", Net)
    for use in (ek.load, ek.open_run, ek.evaluate_run, ek.resume):
        with pytest.raises(PluginError, match=r"(?s)passed in Python.*hint: pass it again: model=Net"):
            use(tmp_path / "run")
    result = run("evaluate", str(tmp_path / "run"))
    assert result.exit_code == PluginError.exit_code
    assert "use the run from Python: ensemblekit.load(RUN, model=Net)" in last_error(result)


def test_weights_of_another_network_are_not_loaded(tmp_path):
    train(tmp_path / "run", Net)
    with pytest.raises(ek.EnsemblekitError, match=r"shape|missing|not part"):
        ek.load(tmp_path / "run", model=fixed_network)


@pytest.fixture(scope="module")
def run_of_net(tmp_path_factory) -> ek.Run:
    spec = {**SPEC, "data": {"validation_fraction": 0.4}}
    return train(tmp_path_factory.mktemp("python") / "run", Net, spec)


def test_everything_that_reads_a_run_takes_its_model(run_of_net, tmp_path):
    path, data = shutil.copytree(run_of_net.path, tmp_path / "run"), DATA
    assert ek.calibrate(path, model=Net).path == path
    assert ek.conform(path, error=0.3, model=Net).path == path
    assert ek.undo_conform(path, model=Net)
    assert ek.undo_calibrate(path, model=Net)
    assert len(ek.compare([path], model=Net).table()) == 1
    chosen = ek.select(path, members=1, out=tmp_path / "chosen", model=Net).run
    assert torch.equal(ek.load(chosen.path, model=Net)(INPUTS), chosen.ensemble(INPUTS))
    assert ek.resume(path, data=data, model=Net, epochs=2, progress=False).status == "finished"


def test_a_run_without_a_name_for_its_model_says_what_to_pass(tmp_path):
    trained = train(tmp_path / "run", lambda: Net())
    with pytest.raises(PluginError, match="pass it again: model=lambda: …"):
        ek.load(trained.path)
    assert train(tmp_path / "other", partial(Net, width=2)).spec.model.factory == "Net"


def test_resuming_with_another_network_leaves_a_finished_run_as_it_is(run_of_net, tmp_path):
    path = shutil.copytree(run_of_net.path, tmp_path / "run")
    with pytest.raises(RunError, match=r"tensor members\.0\.first\.bias has shape \(4,\), expected \(5,\)"):
        ek.resume(path, data=DATA, model=partial(Net, width=5), epochs=3, progress=False)
    assert ek.open_run(path, model=Net).status == "finished"
    assert torch.equal(ek.load(path, model=Net)(INPUTS), run_of_net.ensemble(INPUTS))


def test_runs_of_different_networks_cannot_be_pooled(run_of_net, tmp_path):
    other = train(tmp_path / "other", fixed_network, {**SPEC, "data": {"validation_fraction": 0.4}})
    with pytest.raises(UsageError, match=r"passed in Python \(Net, fixed_network\) differ"):
        ek.select([run_of_net.path, other.path], members=2, out=tmp_path / "chosen", model=Net)


def test_a_run_of_a_network_is_distilled_into_another_one(run_of_net, tmp_path):
    options = {"out": tmp_path / "student", "data": DATA, "progress": False}
    with pytest.raises(PluginError, match="pass the model of the run too: teacher_model="):
        ek.distil(run_of_net.path, fixed_network, **options)
    student = ek.distil(run_of_net.path, fixed_network, teacher_model=Net, **options)
    assert torch.equal(student.teacher.ensemble(INPUTS), run_of_net.ensemble(INPUTS))
    assert ek.load(student.path, model=fixed_network).member_outputs(INPUTS).shape == (1, 40, 2)


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (Net(), "single network, but every member needs one of its own"),
        (3, "a model cannot be of type int"),
        (lambda width, num_outputs: None, "needs values for width"),
    ],
)
def test_what_cannot_build_networks_is_refused_with_what_to_pass(model, what, tmp_path):
    with pytest.raises(UsageError, match=what) as caught:
        train(tmp_path / "run", model)
    assert "model=lambda" in str(caught.value) or "function" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_function_that_builds_no_network_is_a_plugin_error(tmp_path):
    with pytest.raises(PluginError, match="built a dict"):
        train(tmp_path / "run", dict)


@pytest.mark.parametrize("model", [Linear, Linear(bias=False)], ids=["class", "instance"])
def test_a_model_plugin_needs_no_entry_point(model, tmp_path):
    trained = train(tmp_path / "run", model)
    assert trained.spec.model.name == "linear"
    assert trained.spec.model.bias == (model is Linear)
    for options in ({"model": Linear}, {"plugins": [Linear]}):
        assert torch.equal(ek.load(tmp_path / "run", **options)(INPUTS), trained.ensemble(INPUTS))
    with pytest.raises(PluginError, match=re.escape("pass it again: plugins=[Linear]")):
        ek.load(tmp_path / "run")


def test_an_installed_model_can_be_passed_as_an_object_name_or_table(tmp_path):
    mlp = type(ek.load_spec({"data": "digits", "model": "mlp"}).model)
    for index, model in enumerate((mlp, mlp(hidden=(3,)), "mlp", {"name": "mlp", "hidden": [3]})):
        trained = train(tmp_path / str(index), model)
        assert trained.spec.model.name == "mlp"
        assert ek.load(tmp_path / str(index)).predict(INPUTS).shape == (40,)


def test_a_model_replaces_that_of_a_spec_that_was_read_before(tmp_path):
    spec = ek.load_spec(SPEC | {"model": "mlp", "data": "digits"})
    assert train(tmp_path / "run", Net, spec).spec.model.factory == "Net"
    groups = ek.load_spec({"ensemble": {"groups": [{"members": 2}]}, "model": "mlp", "data": "digits"})
    with pytest.raises(UsageError, match="groups"):
        train(tmp_path / "other", Net, groups)
    assert ek.load_spec(SPEC, model=Net, in_memory=True).model.factory == "Net"


def test_plugin_classes_are_named_after_their_class(tmp_path):
    spec = SPEC | {"model": "linear", "method": "halved"}
    trained = ek.train(spec, tmp_path / "run", data=DATA, plugins=[Linear, Halved], progress=False)
    assert [method.name for method in trained.spec.methods] == ["halved"]
    loaded = ek.load(tmp_path / "run", plugins=[Halved, Linear])
    assert torch.equal(loaded(INPUTS), trained.ensemble(INPUTS))
    with pytest.raises(PluginError, match=r"plugins=\[Halved\]"):
        ek.load(tmp_path / "run", plugins=[Linear])


def test_a_class_that_is_no_plugin_or_has_a_taken_name_is_an_error():
    with pytest.raises(PluginError, match="is not a plugin class"):
        ek.load_spec({"data": "digits", "model": "mlp"}, plugins=[Net])

    class MLP(Linear):
        pass

    with pytest.raises(ek.EnsemblekitError, match=r"(?s)2 plugins are registered.*give the class in plugins=\[MLP\]"):
        ek.load_spec({"data": "digits", "model": "mlp"}, plugins=[MLP])


def test_a_missing_file_of_plugins_is_named_in_the_terms_of_the_caller(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import ensemblekit as ek\nfrom torch import nn\n"
        "class Mine(ek.Model):\n"
        "    def build(self, input_shape, num_outputs):\n        return nn.Linear(input_shape[0], num_outputs)\n"
    )
    ek.train(SPEC | {"model": "mine"}, tmp_path / "run", data=DATA, plugins=[file], progress=False)
    with pytest.raises(PluginError, match=re.escape(f'hint: pass the file: plugins=["{file}"]')):
        ek.load(tmp_path / "run")
    assert f"add --plugin {file}" in last_error(run("evaluate", str(tmp_path / "run")))


def test_an_ensemble_of_a_model_from_python_can_be_pickled(tmp_path):
    ensemble = train(tmp_path / "run", Net).ensemble
    twin = pickle.loads(pickle.dumps(ensemble))
    assert torch.equal(twin(INPUTS), ensemble(INPUTS))
    assert twin.spec.to_dict() == ensemble.spec.to_dict()


def test_an_instance_of_a_plugin_is_not_a_plugin_class():
    plugin = ek.methods()["gncl"].load()()
    with pytest.raises(ek.UsageError, match="expected a plugin class or the path of a file, got a GNCL"):
        ek.load_spec({"data": "digits", "model": "mlp"}, plugins=[plugin])


class SharesALayer(nn.Module):
    """A network whose last layer is made once, with the class."""

    last = nn.Linear(4, 2)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = type(self).last

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs))


ONE_NETWORK = nn.Linear(3, 2)


@pytest.mark.parametrize("method", ["independent", {"name": "boosting", "schedule": "stagewise"}], ids=str)
@pytest.mark.parametrize(
    ("model", "shared"), [(lambda: ONE_NETWORK, "weight"), (SharesALayer, "last.weight")], ids=["network", "layer"]
)
def test_members_that_share_parameters_are_refused(model, shared, method, tmp_path):
    with pytest.raises(PluginError, match=rf'members 0 and 1 of model "python" share "{shared}"') as error:
        train(tmp_path / "run", model, {**SPEC, "training": {"epochs": 2, "batch_size": 16}, "method": method})
    assert "would not be independent" in error.value.what
    assert "build a new network" in error.value.fix
