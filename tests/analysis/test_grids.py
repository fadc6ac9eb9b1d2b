"""Grids: values of options, combinations with variants, and names of runs."""

from __future__ import annotations

import tomllib

import pytest

from ensemblekit.analysis.grids import (
    PlannedRun,
    combinations,
    inline_toml,
    parse_grid,
    short_keys,
    with_names,
)
from ensemblekit.analysis.plans import add_to_section, base_tables, make_plan
from ensemblekit.core.errors import SpecError, UsageError
from ensemblekit.spec.sweep import SweepSection, range_values

GNCL = {"data": "blobs", "model": "linear", "method": {"name": "gncl", "lambda": 0.5}}


def section(**table) -> SweepSection:
    return SweepSection.from_table(table)


def names(runs) -> list[str]:
    return [run.name for run in with_names(runs)]


def problems(tables, registry) -> list[str]:
    with pytest.raises(SpecError) as error:
        make_plan(tables, registry)
    return [str(problem) for problem in error.value.problems]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0:1:0.1", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
        ("1:4:1", [1, 2, 3, 4]),
        ("1:0:-0.25", [1.0, 0.75, 0.5, 0.25, 0.0]),
        ("0:1:0.4", [0.0, 0.4, 0.8]),
        ("1e-4:3e-4:1e-4", [0.0001, 0.0002, 0.0003]),
        ("cuda:0", None),
        ("a:b:c", None),
    ],
)
def test_a_range_includes_its_end_and_has_no_rounding_noise(text, values):
    found = range_values(text)
    assert found == values
    assert str(found) == str(values)  # integers stay integers


@pytest.mark.parametrize("text", ["0:1:0", "1:0:0.1", "0:1:1e-9", "0:inf:1", "nan:1:1"])
def test_a_range_without_values_or_with_far_too_many_is_refused(text):
    with pytest.raises(ValueError, match="range"):
        range_values(text)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("k=0,0.5,1", [0, 0.5, 1]),
        ("k=0:1:0.5,7", [0.0, 0.5, 1.0, 7]),
        ("k=[32],[64, 64]", [[32], [64, 64]]),
        ('k="a,b",c,true', ["a,b", "c", True]),
        ('k={name="step", every=2},constant', [{"name": "step", "every": 2}, "constant"]),
    ],
)
def test_the_values_of_an_option_are_toml_or_else_strings(text, values):
    assert parse_grid(text) == ("k", values)


@pytest.mark.parametrize("text", ["k", "=1", "k=", "k=1,,2", "k=[1", "k=0:1:0"])
def test_an_option_without_usable_values_is_refused(text):
    with pytest.raises(UsageError):
        parse_grid(text)


def test_every_combination_is_a_run_and_the_first_seed_of_all_comes_first():
    runs = combinations(section(grid={"method.lambda": [0, 0.5], "model.bias": [True, False]}, seeds=2), 7)
    assert len(runs) == 8
    assert [run.seed for run in runs] == [7] * 4 + [8] * 4
    assert names(runs)[0] == "lambda=0,bias=true,seed=7"
    assert names(runs)[-1] == "lambda=0.5,bias=false,seed=8"


def test_a_variant_is_not_multiplied_by_keys_that_it_sets_or_replaces():
    variants = [
        {"name": "gncl"},
        {"name": "bagging", "set": {"method": "bagging"}},
        {"name": "half", "set": {"method.lambda": 0.5}},
        {"name": "single", "set": {"ensemble": {"members": 1}}, "grid": False},
        {"name": "ncl", "set": {"method": {"name": "ncl"}}, "grid": {"method.lambda": [0.1, 0.2]}},
    ]
    grid = {"method.lambda": [0, 1], "model": {"width": [8, 16]}}
    runs = combinations(section(grid=grid, variants=variants), 0)
    counts = {name: [run.variant for run in runs].count(name) for name in ("gncl", "bagging", "half", "single", "ncl")}
    assert counts == {"gncl": 4, "bagging": 2, "half": 2, "single": 1, "ncl": 2}
    (single,) = [run for run in runs if run.variant == "single"]
    assert single.overrides == {"ensemble.members": 1}  # a table without a name changes only its keys
    assert "bagging,width=16,seed=0" in names(runs)


def test_a_grid_key_above_what_a_variant_sets_is_a_conflict(registry):
    variants = [{"name": "x", "set": {"method.lambda": 0.3}}]
    tables = {**GNCL, "sweep": {"grid": {"method": ["gncl", "bagging"]}, "variants": variants}}
    (problem,) = problems(tables, registry)
    assert problem.startswith('sweep.variants.0: the grid key "method" replaces "method.lambda" of the variant "x"')


def test_keys_are_shortened_as_far_as_they_stay_different():
    keys = ["method.lambda", "model.name", "method.name", "seeded"]
    assert short_keys(keys) == {
        "method.lambda": "lambda",
        "model.name": "model.name",
        "method.name": "method.name",
        "seeded": "seeded",
    }


def test_names_are_safe_for_file_systems_and_unique():
    values = ["../../etc", "a/b", "a b", "A b", "ü", "x" * 400, {"name": "y"}, [1, 2], -0.5]
    found = names([PlannedRun("", {"k": value}, 0, ("k",)) for value in values])
    assert len({name.casefold() for name in found}) == len(values)
    assert all("/" not in name and name.isascii() and len(name.encode()) < 200 for name in found)
    assert found[-2:] == ["k=1-2,seed=0", "k=-0.5,seed=0"]


def test_known_runs_keep_their_names_and_zero_is_zero():
    run = PlannedRun("", {"k": 0}, 0, ("k",))
    again = PlannedRun("", {"k": 0.0}, 0, ("k",))
    assert with_names([again], {run.identity: "old"})[0].name == "old"


@pytest.mark.parametrize("value", [1, 0.3, True, 'a "b"\n', [1, [2.5]], {"name": "x", "a.b": [{"c d": 1}]}])
def test_values_on_one_line_are_read_back(value):
    text = inline_toml(value)
    assert "\n" not in text
    assert tomllib.loads(f"value = {text}")["value"] == value


def test_too_many_runs_are_refused_before_they_are_listed():
    with pytest.raises(UsageError, match="1,000,000 runs"):
        combinations(section(grid={"a": "1:1000:1", "b": "1:1000:1"}), 0)


def test_every_problem_of_every_combination_is_reported_once_with_the_runs_that_have_it(registry):
    tables = base_tables({**GNCL, "training": {"epochs": 3}})
    add_to_section(tables, {"method.lamda": [0], "method.lambda": [0, 2, 3], "training.epochs": [0, 2]}, seeds=2)
    found = problems(tables, registry)
    assert any("method.lamda: unknown key (in all runs)" in text and 'did you mean "lambda"' in text for text in found)
    assert any(
        "training.epochs" in text and "(in lamda=0,lambda=0,epochs=0,seed=0 and 5 more)" in text for text in found
    )
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("table", "part"),
    [
        ({"grid": {"a": []}}, '"a" has no values'),
        ({"grid": {"a": 3}}, "neither a list of values nor a range"),
        ({"grid": {"seed": [1, 2]}}, '"seed" cannot vary here'),
        ({"grid": {"sweep.seeds": [1, 2]}}, "cannot vary here"),
        ({"gird": {}}, 'did you mean "grid"?'),
        ({"seeds": 0}, "sweep.seeds"),
        ({"variants": [{"name": "x"}, {"name": "x"}]}, 'two variants are called "x"'),
        ({"variants": [{"set": {}}]}, "sweep.variants.0.name: missing"),
        ({"variants": [{"name": "x", "set": {"seed": 3}}]}, "cannot vary here"),
        (3, "not a table"),
    ],
)
def test_a_wrong_section_is_refused_by_every_reader(table, part, registry):
    from ensemblekit.spec.reader import load_spec

    (problem,) = problems({**GNCL, "sweep": table}, registry)
    assert part in problem
    with pytest.raises(SpecError):
        load_spec({**GNCL, "sweep": table}, None, registry)


def test_runs_with_equal_specs_are_trained_once_with_a_word(registry):
    tables = {**GNCL, "sweep": {"grid": {"method.lambda": [0, 0.5, 0.0]}}}
    plan = make_plan(tables, registry)
    assert [run.name for run in plan.runs] == ["lambda=0,seed=0", "lambda=0.5,seed=0"]
    assert len(plan.notes) == 1
    assert "is left out: it is the same as lambda=0,seed=0" in plan.notes[0]


def test_the_tables_of_a_variant_are_not_changed_by_its_grid(registry):
    variant = {"name": "v", "set": {"method": {"name": "gncl"}}, "grid": {"method.lambda": [0.1, 0.9]}}
    plan = make_plan({**GNCL, "sweep": {"variants": [variant]}}, registry)
    assert [plan.specs[run.name].methods[0].lam for run in plan.runs] == [0.1, 0.9]
    assert all(run.overrides["method"] == {"name": "gncl"} for run in plan.runs)


def test_the_base_alone_need_not_be_valid(registry):
    plan = make_plan({"data": "blobs", "sweep": {"grid": {"model": ["linear"]}}}, registry)
    assert len(plan.runs) == 1


def test_the_schema_for_editors_accepts_what_the_reader_accepts(registry):
    from jsonschema import Draft202012Validator

    from ensemblekit.spec.schema import spec_schema

    validator = Draft202012Validator(spec_schema(registry, on_broken=lambda error: None)["properties"]["sweep"])
    variants = [
        {"name": "a", "set": {"method": "bagging"}, "grid": False},
        {"name": "b", "grid": {"model": {"width": [1]}}},
    ]
    section = {"grid": {"a.b": "0:1:0.1", "c": {"d": [1, 2]}}, "seeds": 2, "variants": variants}
    definitions = spec_schema(registry, on_broken=lambda error: None)["$defs"]
    validator = Draft202012Validator({**validator.schema, "$defs": definitions})
    assert list(validator.iter_errors(section)) == []
    assert list(validator.iter_errors({"grid": {"a": 3}}))
    assert list(validator.iter_errors({"gird": {}}))
