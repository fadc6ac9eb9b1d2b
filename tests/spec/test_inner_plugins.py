"""Plugins that are parameters of plugins: read with all problems at their paths, written back, described, asked."""

from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path

import jsonschema
import pytest
import torch
from helpers.commands import last_error, run
from helpers.places import HELPERS, TOY_PLUGINS

import ensemblekit as ek
from ensemblekit.api import run_spec
from ensemblekit.core.errors import PluginError, SpecError
from ensemblekit.core.parameters import parameters
from ensemblekit.core.registry import PluginInfo, Registry, discover
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.run import read_spec
from ensemblekit.spec.keys import spec_keys
from ensemblekit.spec.overview import spec_overview
from ensemblekit.spec.reader import load_spec
from ensemblekit.spec.resolution import with_absolute_paths
from ensemblekit.spec.schema import spec_schema

WRAPPERS = HELPERS / "wrappers.py"
NESTED = {
    "name": "wrapper",
    "model": {"name": "wrapper", "model": {"name": "picky", "width": 2}, "lambda": 2.0},
    "others": ["linear", {"name": "wrapper", "model": "linear"}],
    "maybe": {"name": "linear", "bias": False},
    "loss": "mse",
}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return discover([TOY_PLUGINS, WRAPPERS])


def tables(model=NESTED, **training):
    return {"data": "blobs", "model": copy.deepcopy(model), "training": {"epochs": 1, **training}}


def problems(registry, model=NESTED, overrides=None, **training) -> dict[str, str]:
    with pytest.raises(SpecError) as error:
        load_spec(tables(model, **training), overrides, registry)
    return {problem.path: f"{problem.what}; {problem.fix}" for problem in error.value.problems}


def test_plugins_in_plugins_are_read_to_any_depth_by_name_or_table(registry):
    model = load_spec(tables(), None, registry).model
    assert model.model.model.width == 2
    assert [other.name for other in model.others] == ["linear", "wrapper"]
    assert model.others[1].model.name == "linear"
    assert (model.maybe.bias, model.loss.name) == (False, "mse")
    assert (model.usual.name, model.usual.width) == ("picky", 5)


def test_a_spec_with_inner_plugins_survives_toml(registry, tmp_path):
    spec = load_spec(tables(), None, registry)
    file = tmp_path / "spec.toml"
    file.write_text(spec.to_toml())
    again = load_spec(file, None, registry)
    assert again == spec
    assert again.to_toml() == spec.to_toml()
    assert again.model.key == spec.model.key


def test_the_key_of_a_plugin_depends_on_the_parameters_of_those_in_it(registry):
    spec = load_spec(tables(), None, registry)
    other = load_spec(tables(), {"model.model.model.width": 4}, registry)
    assert other.model.key != spec.model.key


def test_copies_and_pickles_keep_inner_plugins_and_their_names(registry):
    model = load_spec(tables(), None, registry).model
    assert copy.deepcopy(model) == model
    assert pickle.loads(pickle.dumps(model)) == model


def test_all_problems_of_inner_plugins_are_reported_at_once_at_their_paths(registry):
    changes = {
        "model.model.model.widht": 3,
        "model.model.lambda": -1,
        "model.others.0": "liner",
        "model.maybe": 3,
        "model.lambda": "x",
    }
    found = problems(registry, overrides=changes)
    assert set(found) == {
        "model.model.model.widht",
        "model.model.lambda",
        "model.others.0.name",
        "model.maybe",
        "model.lambda",
    }
    assert 'did you mean "width"' in found["model.model.model.widht"]
    assert 'did you mean "linear"' in found["model.others.0.name"]
    assert "neither a table nor a name" in found["model.maybe"]


def test_a_required_inner_plugin_that_is_missing_or_wrong_is_reported_once(registry):
    assert problems(registry, "wrapper") == {"model.model": "missing; allowed: name or table of a model"}
    assert set(problems(registry, {"name": "wrapper", "model": "nothing"})) == {"model.model.name"}
    assert set(problems(registry, {"name": "wrapper", "model": {"width": 2}})) == {"model.model.name"}
    assert "neither a table nor a name" in problems(registry, {"name": "wrapper", "model": ["linear"]})["model.model"]


def test_an_inner_plugin_is_named_by_the_registry_and_never_by_an_import_path(registry):
    for path in ("torch.nn:Linear", "ensemblekit_models.mlp:MLP", "../evil.py"):
        found = problems(registry, {"name": "wrapper", "model": path})
        assert "not a path or an import" in found["model.model.name"]


def test_the_number_that_stands_for_a_plugin_inside_cannot_be_written_in_a_spec(registry):
    assert "model.model.name" in problems(registry, {"name": "wrapper", "model": {"$plugin": 0}, "maybe": "linear"})


def test_a_plugin_of_another_class_than_the_field_has_is_refused_by_its_name(registry):
    found = problems(registry, {"name": "of_families", "family": "linear"})
    assert found == {"model.family": '"linear" is not a Family; allowed: name or table of a model'}


def test_overrides_reach_inner_plugins_that_are_given_by_name_or_by_default(registry):
    changes = {"model.model.width": 9, "model.usual.width": 8, "model.others.0.bias": False}
    model = load_spec(tables({"name": "wrapper", "model": "picky", "others": ["linear"]}), changes, registry).model
    assert (model.model.width, model.usual.width, model.others[0].bias) == (9, 8, False)


def test_a_key_of_an_inner_plugin_in_the_wrong_table_is_named_with_its_path(registry):
    found = problems(registry, {"name": "wrapper", "model": "picky", "width": 3})
    assert 'did you mean "model.model.width"' in found["model.width"]


def test_the_checks_of_inner_plugins_are_asked_with_their_paths_unless_a_wrapper_overrides_them(registry):
    found = problems(registry, {"name": "wrapper", "model": "picky", "usual": "linear"}, epochs=99)
    assert set(found) == {"model.model.width", "training.epochs"}
    data = {"data.num_classes": 3}
    assert set(problems(registry, {"name": "wrapper", "model": "linear"}, data)) == {"model.usual"}
    load_spec(tables({"name": "lenient", "model": "picky"}, epochs=99), None, registry)


def test_a_model_that_has_to_be_fitted_is_refused_in_a_wrapper_that_does_not_fit_it(registry):
    found = problems(registry, {"name": "wrapper", "model": "fitted"})
    assert "has to be fitted" in found["model.model"]
    load_spec(tables("fitted"), None, registry)


def test_notes_and_what_a_model_says_of_itself_come_from_the_models_in_it(registry):
    spec = load_spec(tables(NESTED), None, registry)
    rows = spec_overview(spec)
    assert ("note", "picky of width 2") in rows
    assert "maybe = linear (bias = false)" in dict(rows)["model"]
    assert spec.model.unsupported() == {"autocast": "it is picky"}
    assert not spec.model.gives_probabilities()
    sevens = {"name": "wrapper", "model": {"name": "picky", "width": 7}, "usual": {"name": "picky", "width": 7}}
    assert load_spec(tables(sevens, loss="nll"), None, registry).model.gives_probabilities()
    assert load_spec(tables({**sevens, "name": "lenient"}, loss="nll"), None, registry).model.unsupported() == {}


def test_the_schema_describes_inner_plugins(registry):
    schema = spec_schema(registry, on_broken=lambda error: None)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(tables())
    wrong = [
        {**NESTED, "model": {"name": "picky", "widht": 3}},
        {**NESTED, "model": "nothing"},
        {**NESTED, "others": ["linear", {"name": "wrapper"}]},
        {**NESTED, "loss": "picky"},
    ]
    for model in wrong:
        assert not validator.is_valid(tables(model))
    assert validator.is_valid(load_spec(tables(), None, registry).to_dict())
    assert '"plugin":' not in json.dumps(schema)


def test_parameters_that_are_plugins_are_described_in_words(registry):
    described = {field.name: field for field in parameters(registry.get("model", "wrapper").load())}
    assert (described["model"].type, described["model"].required) == ("model", True)
    assert described["others"].allowed == "list of name or table of a model"
    assert described["usual"].default == {"name": "picky", "width": 5}
    page = run("inspect", "wrapper", "--plugin", str(WRAPPERS)).stdout
    assert "# required: name or table of a model" in page
    assert 'usual = { name = "picky", width = 5 }' in page


def test_completion_knows_the_keys_of_inner_plugins_without_importing_them(registry, monkeypatch):
    monkeypatch.syspath_prepend(str(HELPERS))
    infos = [
        PluginInfo("model", "wrapper", "wrappers:Wrapper", "x", ""),
        PluginInfo("model", "picky", "wrappers:Picky", "x", ""),
    ]
    keys = spec_keys(tables({"name": "wrapper", "model": {"name": "wrapper", "model": "picky"}}), Registry(infos))
    assert {"model.model.lambda", "model.model.model.width", "model.maybe.name", "model.loss.name"} <= set(keys)


def test_relative_paths_of_inner_plugins_become_absolute(registry):
    model = {"name": "wrapper", "model": {"name": "picky", "file": "a.csv"}, "others": [{"name": "picky", "file": "b"}]}
    resolved = with_absolute_paths(load_spec(tables(model), None, registry)).model
    assert resolved.model.file == Path(os.path.abspath("a.csv"))
    assert resolved.others[0].file == Path(os.path.abspath("b"))
    assert resolved.model.name == "picky"


def test_a_run_names_the_packages_of_inner_plugins_and_says_what_to_install(registry, tmp_path):
    third = registry.get("model", "picky").load()
    theirs = PluginInfo("model", "theirs", "x:Theirs", "their-package", "1.0", local_class=third)
    everything = registry.with_plugins([theirs])
    spec = load_spec(tables({"name": "wrapper", "model": "theirs"}, batch_size=8), None, everything)
    run_spec(spec, everything, tmp_path / "run")
    directory = RunDirectory.open(tmp_path / "run")
    packages = {entry["name"]: entry["package"] for entry in directory.environment["plugins"]}
    assert packages["theirs"] == "their-package"
    assert packages["picky"] == str(WRAPPERS)
    assert read_spec(directory, everything).model.model.name == "theirs"
    with pytest.raises(PluginError, match="pip install their-package"):
        read_spec(directory, registry)


def test_a_wrapper_of_python_classes_is_recorded_and_loaded_again(tmp_path):
    class Inner(ek.Model):
        """One layer."""

        def build(self, input_shape, num_outputs):
            return torch.nn.Linear(input_shape[0], num_outputs)

    class Outer(ek.Model):
        """Another model in a sequence."""

        parts: tuple[ek.Model, ...]

        def build(self, input_shape, num_outputs):
            return torch.nn.Sequential(*(part.build(input_shape, num_outputs) for part in self.parts))

    inputs = torch.randn(20, 2)
    spec = {"training": {"epochs": 1}, "ensemble": {"members": 2}, "engine": {"name": "sequential", "device": "cpu"}}
    model = Outer(parts=(Inner(), ek.models()["mlp"].load()(hidden=(3,))))
    trained = ek.train(spec, tmp_path / "run", data=(inputs, (inputs[:, 0] > 0).long()), model=model, progress=False)
    assert [part.name for part in trained.spec.model.parts] == ["inner", "mlp"]
    again = ek.load(tmp_path / "run", plugins=[Outer, Inner])
    torch.testing.assert_close(again(inputs), trained.ensemble(inputs))


def test_a_sweep_varies_a_parameter_of_an_inner_plugin(tmp_path):
    model = {"name": "wrapper", "model": "picky"}
    spec = {"data": "blobs", "model": model, "training": {"epochs": 1}, "ensemble": {"members": 1}}
    grid = {"model.model.width": [2, 4]}
    sweep = ek.sweep(spec, grid=grid, out=tmp_path / "sweep", plugins=[TOY_PLUGINS, WRAPPERS])
    widths = [ek.open_run(run.path, plugins=[TOY_PLUGINS, WRAPPERS]).spec.model.model.width for run in sweep.runs]
    assert sorted(widths) == [2, 4]


def test_the_command_line_reads_and_overrides_inner_plugins(tmp_path):
    file = tmp_path / "spec.toml"
    file.write_text('data = "blobs"\n[model]\nname = "wrapper"\nmodel = "picky"\n')
    files = ["--plugin", str(TOY_PLUGINS), "--plugin", str(WRAPPERS)]
    result = run("validate", str(file), *files, "--set", "model.model.width=6")
    assert result.exit_code == 0, result.output
    assert "model = picky (width = 6)" in result.stdout
    wrong = run("validate", str(file), *files, "--set", "model.model.width=0")
    assert wrong.exit_code == 2
    assert "model.model.width: 0 should be greater than or equal to 1" in last_error(wrong)
