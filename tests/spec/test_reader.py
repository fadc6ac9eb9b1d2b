"""Reading specs: strict, all problems at once, and back to an equal file."""

from __future__ import annotations

from copy import deepcopy

import pytest
from helpers.places import TOY_PLUGINS
from helpers.plain_methods import plain_methods
from helpers.specs import FULL

import ensemblekit as ek
from ensemblekit.core.errors import SpecError, UsageError
from ensemblekit.core.registry import discover
from ensemblekit.spec.reader import load_spec
from ensemblekit.spec.tables import parse_override


def problems(tables, registry, overrides=None) -> dict[str, str]:
    with pytest.raises(SpecError) as error:
        load_spec(tables, overrides, registry)
    found: dict[str, str] = {}
    for problem in error.value.problems:
        found[problem.path] = f"{found[problem.path]} {problem}" if problem.path in found else str(problem)
    return found


def test_the_smallest_spec_fills_in_every_default(tables, registry):
    spec = load_spec(tables, None, registry)
    assert spec.methods == ()
    assert spec.loss.name == "cross_entropy"
    assert (spec.optimizer.name, spec.optimizer.eps) == ("adabelief", 1e-12)
    assert spec.ensemble.members == 5
    assert spec.engine.name == "auto"


def test_a_full_spec_holds_validated_plugins(registry):
    spec = load_spec(FULL, None, registry)
    assert [method.name for method in spec.methods] == ["bagging", "gncl"]
    assert spec.methods[1].lam == 0.6
    assert spec.optimizer.momentum == 0.9
    assert spec.schedule.factor(30, 100) == 0.5


@pytest.mark.parametrize("method", [*plain_methods(), "soft_min"])
def test_a_resolved_spec_written_to_toml_and_read_again_is_equal(method, registry, tmp_path):
    tables = {**deepcopy(FULL), "method": method, "training": {**FULL["training"], "epochs": 90}}
    del tables["ensemble"]
    spec = load_spec(tables, None, registry)
    file = tmp_path / "spec.toml"
    file.write_text(spec.to_toml())
    again = load_spec(file, None, registry)
    assert again == spec
    assert again.to_toml() == spec.to_toml()


def test_a_spec_with_several_methods_and_a_loss_with_parameters_survives_toml(registry, tmp_path):
    tables = deepcopy(FULL)
    tables["training"]["loss"] = {"name": "huber", "delta": 2.0}
    tables["data"] = {"name": "blobs", "regression": True}
    tables["method"] = ["bagging", {"name": "snapshot", "cycles": 4}]
    spec = load_spec(tables, None, registry)
    file = tmp_path / "spec.toml"
    file.write_text(spec.to_toml())
    assert load_spec(file, None, registry) == spec


def test_all_problems_are_reported_at_once_with_path_value_and_what_is_allowed(registry):
    tables = {
        "sed": 1,
        "seed": -1,
        "data": {"name": "blobz"},
        "model": {"name": "linear", "bais": True},
        "ensemble": {"members": "four"},
        "method": {"name": "gncl", "lamda": 0.1, "lambda": 1.5},
        "training": {"epochs": 0, "batchsize": 4, "loss": "cross_entrpy", "optimizer": {"name": "adm"}, "schedule": 3},
        "engine": {"name": "thraded"},
    }
    found = problems(tables, registry)
    assert found["sed"].endswith(
        'did you mean "seed"? allowed: data, engine, ensemble, extensions, method, metrics, model, seed, sweep, '
        "training"
    )
    assert "-1 is not a seed" in found["seed"]
    assert 'did you mean "blobs"?' in found["data.name"]
    assert 'did you mean "bias"?' in found["model.bais"]
    assert "'four' should be a valid integer; allowed: integer ≥ 1 and ≤ 10000" in found["ensemble.members"]
    assert 'did you mean "lambda"? allowed: lambda, mode' in found["method.lamda"]
    assert '1.5 must be at most 1 in mode "upper"' in found["method.lambda"]
    assert "0 should be greater than or equal to 1" in found["training.epochs"]
    assert 'did you mean "batch_size"?' in found["training.batchsize"]
    assert 'did you mean "cross_entropy"?' in found["training.loss.name"]
    assert 'did you mean "adam"?' in found["training.optimizer.name"]
    assert "3 is neither a table nor a name" in found["training.schedule"]
    assert 'did you mean "threaded"?' in found["engine.name"]
    assert len(found) == 13


@pytest.mark.parametrize("value", ["0.1", True, float("nan"), float("inf"), [0.1], -0.1, None])
def test_a_number_must_be_a_finite_number_in_its_range(tables, registry, value):
    tables["method"] = {"name": "gncl", "lambda": value}
    assert "method.lambda" in problems(tables, registry)


def test_the_fields_python_name_is_not_a_name_in_toml(tables, registry):
    tables["method"] = {"name": "gncl", "lam": 0.1}
    assert "unknown key" in problems(tables, registry)["method.lam"]


@pytest.mark.parametrize("section", ["data", "model"])
def test_data_and_model_are_required(tables, registry, section):
    del tables[section]
    assert "missing" in problems(tables, registry)[section]


def test_a_method_listed_twice_is_a_problem(tables, registry):
    tables["method"] = ["bagging", {"name": "bagging", "weights": "bootstrap"}]
    assert "listed twice" in problems(tables, registry)["method"]


CROSS_FIELD = [
    ({"method": {"name": "gncl", "mode": "exact"}, "training.loss": "hinge"}, "method.mode", "twice differentiable"),
    ({"method": {"name": "snapshot"}}, "method.at_epochs", "there are only 10 epochs"),
    ({"method": {"name": "snapshot", "at_epochs": [2, 11]}}, "method.at_epochs", "set at_epochs = [2]"),
    ({"method": {"name": "snapshot", "cycles": 11}}, "method.cycles", "10 or less"),
    (
        {"method": {"name": "snapshot", "cycles": 2, "at_epochs": [2]}},
        "method.at_epochs",
        "cannot be combined with cycles",
    ),
    ({"method": {"name": "snapshot", "at_epochs": [3, 3]}}, "method.at_epochs", "ascending without repetitions"),
    ({"method": {"name": "snapshot", "at_epochs": [3]}, "ensemble.members": 5}, "ensemble.members", "set it to 2"),
    ({"method": {"name": "fast_geometric", "cycles": 6}, "ensemble.members": 6}, "method.cycles", "to 12 or more"),
    ({"method": {"name": "fast_geometric", "cycle": 3}}, "method.cycle", "multiple of 2"),
    ({"method": {"name": "fast_geometric", "high": 0.1, "low": 0.1}}, "method.low", "below high, which is 0.1"),
    ({"method": "fast_geometric", "ensemble.members": 4}, "ensemble.members", "set it to 5"),
    ({"method": "soft_boosting", "training.loss": "hinge"}, "training.loss", "twice differentiable"),
    ({"method": "soft_boosting", "training.loss": "nll"}, "training.loss", 'gradient of "nll" is infinite'),
    ({"method": {"name": "smcl", "k": 6}}, "method.k", "there are 5 members"),
    ({"method": {"name": "boosting", "schedule": "stagewise"}, "training.epochs": 3}, "method.schedule", "5 or more"),
    ({"method": ["bagging", {"name": "smcl", "k": 6}]}, "method.1.k", "there are 5 members"),
    ({"method": {"name": "bagging", "fraction": 0.5}}, "method.fraction", 'weights = "subsample"'),
    ({"method": {"name": "wagging", "sigma": 0.5}}, "method.sigma", 'weights = "gaussian"'),
    ({"method": "divloss", "training.loss": "nll"}, "training.loss", "needs logits"),
    ({"method": "diversity_cooperation", "training.loss": "exponential"}, "training.loss", "needs logits as outputs"),
    ({"method": "diversity_cooperation", "data.regression": True, "training.loss": "mse"}, "method.name", '"ncl"'),
    ({"data.regression": True, "training.loss": "cross_entropy"}, "training.loss", 'use loss = "mse"'),
    ({"data.num_classes": 3, "training.loss": "exponential"}, "training.loss", "two classes"),
    ({"data.image": True}, "model.name", "flat inputs only"),
    ({"training.loss": "nll"}, "training.loss", "takes probabilities"),
    ({"model": {"name": "mlp"}, "training.loss": "nll"}, "training.loss", "set model.softmax = true"),
    ({"model": {"name": "mlp", "softmax": True}}, "training.loss", '"mlp" are probabilities'),
    (
        {"model": {"name": "mlp", "softmax": True}, "data.regression": True, "training.loss": "mse"},
        "model",
        "without a softmax",
    ),
    ({"method": "boosting", "training.loss": "nll"}, "training.loss", "sums are not probabilities"),
    ({"method": {"name": "smcl", "combine": "max"}, "training.loss": "nll"}, "method.combine", "do not sum to 1"),
    ({"method": "divloss", "data.regression": True, "training.loss": "mse"}, "method.lambda2", "has no effect"),
]


@pytest.mark.parametrize(("overrides", "path", "expected"), CROSS_FIELD)
def test_mistakes_across_fields_are_found_before_any_data_is_loaded(tables, registry, overrides, path, expected):
    assert expected in problems(tables, registry, overrides)[path]


def test_snapshot_fills_in_its_number_of_members(tables, registry):
    tables["method"] = {"name": "snapshot", "at_epochs": [2, 4, 6]}
    assert load_spec(tables, None, registry).ensemble.members == 4


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=3", 3),
        ("a.b=1e-3", 1e-3),
        ("a.b=true", True),
        ('a.b="3"', "3"),
        ("a.b=gncl", "gncl"),
        ("a.b=x=y", "x=y"),
        ("a.b=/some/where=else", "/some/where=else"),
        ("a.b=[1, 2]", [1, 2]),
        ('a.b={name = "x=y", c = 1}', {"name": "x=y", "c": 1}),
        ("a.b=1\nc = 2", "1\nc = 2"),
        (" a.b = 3 ", 3),
    ],
)
def test_a_setting_is_read_as_toml_and_a_bare_word_is_a_string(text, value):
    assert parse_override(text) == ("a.b", value)


@pytest.mark.parametrize("text", ["a.b", "=3", "a.b=", "a.b=[1, 2", 'a.b="x', "a.b={x = 1"])
def test_a_setting_that_sets_nothing_is_a_usage_error(text):
    with pytest.raises(UsageError, match="--set"):
        parse_override(text)


def test_overrides_reach_into_tables_lists_and_names(registry):
    overrides = {
        "training.epochs": 3,
        "method.1.lambda": 0.1,
        "training.schedule.every": 5,
        "engine": {"name": "stacked"},
    }
    spec = load_spec(FULL, overrides, registry)
    assert (spec.training.epochs, spec.methods[1].lam, spec.schedule.every) == (3, 0.1, 5)
    assert (spec.engine.name, spec.engine.device) == ("stacked", "auto")
    assert load_spec({**FULL, "method": "gncl"}, {"method.lambda": 0.1}, registry).methods[0].lam == 0.1


def test_a_setting_of_a_default_needs_no_name(tables, registry):
    spec = load_spec(tables, {"training.optimizer.lr": 0.5, "training.schedule.warmup_epochs": 2}, registry)
    assert (spec.optimizer.name, spec.optimizer.lr) == ("adabelief", 0.5)
    assert (spec.schedule.name, spec.schedule.warmup_epochs) == ("constant", 2.0)


@pytest.mark.parametrize(
    ("path", "expected"),
    [("method.lambda", "method.0.name"), ("method.5.lambda", "method.0.name"), ("seed.x", "a value, not a table")],
)
def test_an_override_that_fits_nowhere_is_a_problem(registry, path, expected):
    assert any(expected in text for text in problems(FULL, registry, {path: 1}).values())


def test_the_given_dict_is_left_as_it_was(registry):
    before = deepcopy(FULL)
    load_spec(FULL, {"training.epochs": 3, "method.1.lambda": 0.1}, registry)
    assert before == FULL


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"seed = ", "line 1, column 8"),
        (b"seed = 1\nseed = 2\n", "line 2"),
        (b"\xff\xfe", "not UTF-8 text: byte 0"),
        (b"a = " + b"[" * 5000 + b"]" * 5000, "nested too deeply"),
        (b"a = " + b"9" * 5000, "not TOML"),
    ],
)
def test_a_file_that_is_not_toml_is_an_error_with_its_place(registry, tmp_path, content, expected):
    file = tmp_path / "spec.toml"
    file.write_bytes(content)
    with pytest.raises(SpecError) as error:
        load_spec(file, None, registry)
    assert expected in str(error.value)
    assert str(file) in str(error.value)
    assert error.value.exit_code == 2


def test_a_missing_file_and_a_directory_are_errors(registry, tmp_path):
    for path in (tmp_path / "nothing.toml", tmp_path):
        with pytest.raises(SpecError, match="cannot be read"):
            load_spec(path, None, registry)


def test_values_that_toml_does_not_have_are_problems(tables, registry):
    tables["model"]["bias"] = object()
    assert "cannot be written as TOML" in problems(tables, registry)["model"]


def test_a_default_that_its_own_check_refuses_is_a_problem_before_it_is_written(tables, tmp_path):
    file = tmp_path / "strict.py"
    file.write_text(
        "from pydantic import Field, field_validator\nfrom helpers.toy_plugins import Linear\n"
        'class Strict(Linear):\n    """A model."""\n'
        '    low: int = Field(0, description="x")\n    high: int = Field(5, description="x")\n'
        '    @field_validator("high")\n    @classmethod\n    def check(cls, high, info):\n'
        '        if high < info.data["low"]:\n            raise ValueError("is below low")\n        return high\n'
    )
    registry = discover([TOY_PLUGINS, file])
    tables["model"] = {"name": "strict", "low": 7}
    assert problems(tables, registry) == {"model.high": "model.high: 5 is below low"}
    assert load_spec(tables, {"model.low": 3}, registry).model.low == 3


def test_the_public_function_takes_a_file_overrides_and_local_plugins(tmp_path):
    file = tmp_path / "spec.toml"
    file.write_text('[data]\nname = "blobs"\n[model]\nname = "linear"\n[method]\nname = "gncl"\nlambda = 0.3\n')
    spec = ek.load_spec(file, overrides={"training.epochs": 3}, plugins=[TOY_PLUGINS])
    assert isinstance(spec, ek.Spec)
    assert (spec.training.epochs, spec.methods[0].lam) == (3, 0.3)


def test_groups_give_members_models_of_their_own(tables, tmp_path):
    tables["model"]["bias"] = False
    tables["ensemble"] = {
        "groups": [{"members": 2}, {"members": 3, "model": {"bias": True}}, {"model": {"name": "deep"}}]
    }
    extra = tmp_path / "deep.py"
    extra.write_text('from helpers.toy_plugins import Linear\nclass Deep(Linear):\n    """Another model."""\n')
    registry = discover([TOY_PLUGINS, extra])
    spec = load_spec(tables, None, registry)
    assert spec.ensemble.members == 6
    assert [(model.name, model.bias) for model in spec.member_models] == [
        ("linear", False), ("linear", False), ("linear", True), ("linear", True), ("linear", True), ("deep", True)
    ]  # fmt: skip
    file = tmp_path / "spec.toml"
    file.write_text(spec.to_toml())
    assert load_spec(file, None, registry) == spec


def test_without_groups_every_member_has_the_same_model(tables, registry):
    spec = load_spec(tables, {"ensemble.members": 3}, registry)
    assert spec.member_models == (spec.model,) * 3


GROUP_MISTAKES = [
    ({"members": 4, "groups": [{"members": 3}]}, "ensemble.members", "the groups imply 3 members"),
    ({"groups": {"members": 3}}, "ensemble.groups", "not a list of tables"),
    ({"groups": [3]}, "ensemble.groups.0", "not a table"),
    ({"groups": [{"membrs": 3}]}, "ensemble.groups.0.membrs", 'did you mean "members"?'),
    ({"groups": [{"members": 0}]}, "ensemble.groups.0.members", "greater than or equal to 1"),
    ({"groups": [{"model": {"bais": 1}}]}, "ensemble.groups.0.model.bais", 'did you mean "bias"?'),
    ({"groups": [{"model": {"name": "linea"}}]}, "ensemble.groups.0.model.name", 'did you mean "linear"?'),
]


@pytest.mark.parametrize(("ensemble", "path", "expected"), GROUP_MISTAKES)
def test_mistakes_in_groups_are_found_at_their_place(tables, registry, ensemble, path, expected):
    tables["ensemble"] = ensemble
    assert expected in problems(tables, registry)[path]


def test_the_models_of_groups_are_checked_against_the_data(tables, registry):
    tables["ensemble"] = {"groups": [{"members": 2}]}
    found = problems(tables, registry, {"data.image": True})
    assert "flat inputs only" in found["ensemble.groups.0.model.name"]


def test_snapshot_refuses_groups(tables, registry):
    tables |= {"ensemble": {"groups": [{"members": 2}]}, "method": {"name": "snapshot", "at_epochs": [2]}}
    assert "trains one network" in problems(tables, registry)["ensemble.groups"]
