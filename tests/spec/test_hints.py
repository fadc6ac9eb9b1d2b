"""Problems name their own source: the file or the override; an unknown key leads to the key that was meant."""

from __future__ import annotations

import json

import pytest
from helpers.commands import last_error, run

from ensemblekit.core.errors import SpecError
from ensemblekit.spec.reader import load_spec
from ensemblekit.spec.tables import parse_override


def errors(tables, registry, *settings) -> SpecError:
    with pytest.raises(SpecError) as error:
        load_spec(tables, dict(map(parse_override, settings)), registry)
    return error.value


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("lambda=0.3", '"method.lambda"'),
        ("lamda=0.3", '"method.lambda"'),
        ("members=3", '"ensemble.members"'),
        ("epochs=3", '"training.epochs"'),
        ("lr=0.1", '"training.optimizer.lr"'),
        ("training.lr=0.1", '"training.optimizer.lr"'),
        ("optimizer=sgd", '"training.optimizer"'),
        ("momentum=0.9", '"training.optimizer.momentum"'),
        ("device=cpu", '"engine.device"'),
        ("model.members=3", '"ensemble.members"'),
    ],
)
def test_a_key_of_another_section_is_suggested_with_its_section(tables, registry, setting, meant):
    tables |= {"method": "gncl", "training": {"optimizer": "sgd"}}
    error = errors(tables, registry, setting)
    assert error.line.startswith(f"{setting.partition('=')[0]}: unknown key; --set {setting}; did you mean {meant}? ")


def test_a_key_of_one_of_several_methods_is_suggested_with_its_index(tables, registry):
    tables["method"] = ["bagging", "gncl"]
    assert 'did you mean "method.1.lambda"?' in errors(tables, registry, "lambda=0.3").line


def test_an_unknown_key_in_the_file_is_suggested_too_and_blamed_on_the_file(tables, registry):
    error = errors(tables | {"epochs": 3}, registry, "seed=2")
    assert error.line.startswith('epochs: unknown key; the spec; did you mean "training.epochs"?')


def test_a_name_that_many_sections_have_is_no_suggestion(tables, registry):
    assert "did you mean" not in errors(tables, registry, "name=x").line


@pytest.mark.parametrize("path", ["model", "method", "training.optimizer"])
def test_another_name_that_leaves_keys_of_the_old_one_is_led_to_the_whole_section(registry, path):
    tables = {
        "data": "blobs",
        "model": {"name": "linear", "bias": True},
        "method": {"name": "gncl", "lambda": 0.1},
        "training": {"optimizer": {"name": "adam", "eps": 1e-8}},
    }
    name = {"model": "mlp", "method": "bagging", "training.optimizer": "sgd"}[path]
    error = errors(tables, registry, f"{path}.name={name}")
    assert error.where == f"--set {path}.name={name}"
    assert error.fix == f"use --set {path}={name}, which replaces the whole section"


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("training.epochs=0", "training.epochs"),
        ("training.optimizer.weight_decay=-1", "training.optimizer"),  # found by a check of the whole section
        ("method=snapshot", "method.at_epochs"),  # found by a check of the whole spec
        ("method.lambda=0.1", "method.name"),  # nothing is wrong with this key itself
        ("model=3", "model"),
        ("seed.x=1", "seed"),
        ('model={ name = "linear", bais = true }', "model.bais"),
    ],
)
def test_a_value_that_was_set_is_never_blamed_on_the_file(tables, registry, setting, key):
    error = errors(tables, registry, setting)
    assert [problem.path for problem in error.problems] == [key]
    assert error.where == f"--set {setting}"


def test_problems_of_the_file_and_of_overrides_are_all_reported_each_with_its_source(tmp_path):
    file = tmp_path / "spec.toml"
    file.write_text('sed = 1\n[data]\nname = "digits"\n[model]\nname = "mlp"\nhidden = "x"\n[training]\nepoch = 3\n')
    arguments = ("validate", str(file), "--set", "training.batch_size=0", "--set", "lambda=1")
    result = run(*arguments)
    assert result.exit_code == 2
    for line in (
        '  sed: unknown key; did you mean "seed"? ',
        "  model.hidden: 'x' should be a list; allowed: ",
        '  training.epoch: unknown key; did you mean "epochs"? ',
        "  training.batch_size: 0 should be greater than or equal to 1; --set training.batch_size=0; ",
        "  lambda: unknown key; --set lambda=1; ",
    ):
        assert line in result.stderr
    where = f"{file}: sed, model.hidden, training.epoch; --set lambda=1; --set training.batch_size=0"
    assert last_error(result) == f"error: 5 problems in the spec; {where}; each is listed above"
    sources = {p["path"]: p["source"] for p in json.loads(run(*arguments, "--json").stdout)["problems"]}
    assert (sources["sed"], sources["lambda"]) == (str(file), "--set lambda=1")


def test_a_wrong_value_in_the_file_is_blamed_on_the_file_whatever_else_is_set(tables, registry):
    tables["training"] = {"epochs": 0}
    assert errors(tables, registry, "seed=3", "method=gncl").where == "the spec"


def test_an_override_without_effect_on_a_problem_is_not_named(tables, registry):
    tables |= {"method": {"name": "snapshot", "at_epochs": [7]}, "training": {"epochs": 5}}
    assert errors(tables, registry, "seed=1").where == "the spec"
    tables |= {"method": {"name": "smcl", "k": 2}, "training": {"epochs": 9}}
    assert errors(tables, registry, "ensemble.members=1", "seed=2").where == "--set ensemble.members=1"
    settings = ("ensemble.members=3", "method=snapshot", "method.at_epochs=[7]")
    error = errors(tables, registry, *settings)
    assert error.problems[0].path == "ensemble.members"
    assert error.where == "--set ensemble.members=3"


def test_the_most_specific_override_is_named(tables, registry):
    assert errors(tables, registry, "method=gncl", "method.mode=exct").where == "--set method.mode=exct"
    error = errors(tables, registry, "training={epochs = 5}", "method=snapshot", "seed=3")
    assert (error.problems[0].path, error.where) == ("method.at_epochs", "--set method=snapshot")


def test_an_unknown_key_and_a_bad_value_in_one_section_are_both_reported(tables, registry):
    tables |= {"training": {"epochs": 0, "lrr": 1}, "model": {"name": "linear", "bias": 3, "x": 1}}
    del tables["data"]
    paths = {problem.path for problem in errors(tables, registry).problems}
    assert paths == {"training.epochs", "training.lrr", "model.bias", "model.x", "data"}


def test_a_problem_that_two_overrides_cause_together_names_both(tables, registry):
    tables["method"] = {"name": "boosting", "schedule": "stagewise"}
    error = errors(tables, registry, "training.epochs=6", "ensemble.members=7", "seed=3")
    assert error.problems[0].path == "method.schedule"
    assert error.where == "--set training.epochs=6 --set ensemble.members=7"
