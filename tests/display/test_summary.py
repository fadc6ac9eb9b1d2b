"""What the closing summary and `evaluate` say of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.fake_runs import CLASSIFIER, METRICS, REGRESSION_METRICS, FakeRun, members
from helpers.plain_methods import plain_methods

import ensemblekit as ek
from ensemblekit.display.summary import MAX_LISTED_MEMBERS, decomposition_line, metric_rows, number


def test_the_table_has_every_member_their_mean_and_the_ensemble():
    summary = FakeRun().summary()
    assert summary.columns == ("", "accuracy", "loss", "parameters", "")
    assert summary.rows == (
        ("member 0", "95.00 %", "0.100", "1,234", "frozen"),
        ("member 1", "96.00 %", "0.090", "1,234", ""),
        ("member 2", "97.00 %", "0.080", "1,234", ""),
        ("mean member", "96.20 %", "0.098", "", ""),
        ("ensemble", "98.30 %", "0.071", "3,702", ""),
    )


def test_passes_of_a_network_are_told_apart_and_its_parameters_counted_once():
    passes = [row | {"network": row["index"] % 2, "pass": row["index"] // 2} for row in members(4)]
    rows = FakeRun(members=passes).summary().rows
    names = ["network 0 pass 0", "network 1 pass 0", "network 0 pass 1", "network 1 pass 1"]
    assert [row[0] for row in rows] == [*names, "mean member", "ensemble"]
    assert rows[-1][3] == f"{2 * 1234:,}"


def test_the_gain_is_over_the_best_and_over_the_mean_member():
    expected = "the ensemble is 0.80 points ahead of its best member and 2.10 points ahead of its mean member"
    assert FakeRun().summary().gain == expected


def test_an_ensemble_worse_than_its_best_member_is_said_to_be_behind():
    run = FakeRun(metrics=METRICS | {"test_best_member_accuracy": 0.99})
    assert "0.70 points behind its best member" in run.summary().gain


def test_an_ensemble_as_good_as_its_best_member_is_level_with_it():
    run = FakeRun(metrics=METRICS | {"test_best_member_accuracy": METRICS["test_accuracy"]})
    assert "is on par with its best member" in run.summary().gain


def test_of_a_single_member_no_gain_is_told():
    summary = FakeRun(members=members(1)).summary()
    assert summary.gain == ""
    assert [row[0] for row in summary.rows] == ["member 0", "ensemble"]


def test_regression_is_told_in_squared_errors():
    summary = FakeRun(metrics=REGRESSION_METRICS, members=members(2, "mse")).summary()
    assert summary.columns[1] == "mse"
    assert summary.rows[-1] == ("ensemble", "2,900", "1,450", "2,468", "")
    # 1 - 2900/3000 and 1 - 2900/3100
    assert "3.33 % of squared error ahead of its best member and 6.45 %" in summary.gain
    assert summary.decomposition == "ensemble loss 1,450 = mean member 1,550 - diversity 100.000 + remainder 0.000"


def test_of_very_many_members_only_the_first_are_listed():
    rows = FakeRun(members=members(MAX_LISTED_MEMBERS + 5)).summary().rows
    assert rows[MAX_LISTED_MEMBERS] == ("and 5 more", "", "", "", "")
    assert len(rows) == MAX_LISTED_MEMBERS + 3
    assert rows[-1][3] == f"{25 * 1234:,}"


def test_the_decomposition_is_one_line():
    line = "ensemble loss 0.071 = mean member 0.098 - diversity 0.031 + remainder 0.004"
    assert decomposition_line(METRICS) == line


def test_the_terms_of_real_outputs_add_up_in_the_line():
    outputs = torch.randn(4, 50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    metrics = ek.evaluate(outputs, torch.arange(50) % 3)
    line = decomposition_line(metrics)
    assert line.startswith(f"ensemble loss {metrics['loss']:.3f} = ")
    words = line.split()
    total, mean_member, diversity, remainder = (float(words[i]) for i in (2, 6, 9, 12))
    assert total == pytest.approx(mean_member - diversity + remainder, abs=2e-3)


def test_a_method_that_does_not_combine_by_the_mean_is_not_said_to_have_that_loss():
    line = decomposition_line(METRICS | {"test_loss": 0.5})
    assert line.startswith("loss of the mean output 0.071 = ")


def test_the_remainder_has_the_same_sign_in_the_table_and_in_the_sentence():
    metrics = METRICS | {"test_remainder": -0.004, "test_loss": 0.063}
    assert decomposition_line(metrics) == (
        "ensemble loss 0.063 = mean member 0.098 - diversity 0.031 + remainder -0.004"
    )
    assert ("spread", "test_remainder", "-0.004") in metric_rows(metrics)


def test_without_its_terms_there_is_no_decomposition():
    assert decomposition_line({"test_loss": 1.0}) == ""


def test_the_next_steps_can_be_pasted_and_the_suggested_spec_is_valid():
    run = FakeRun(path=Path("runs/my run"))
    commands = [command for command, _ in run.summary().next_steps]
    assert commands == [
        "ensemblekit evaluate 'runs/my run'",
        "ensemblekit predict 'runs/my run' FILES…",
        "ensemblekit train 'runs/my run/spec.toml' --set method.lambda=0.75",
    ]


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ({"name": "gncl", "lambda": 1.0}, "method.lambda=0.5"),
        ({"name": "gncl", "lambda": 0.0}, "method.lambda=0.5"),
        ([{"name": "bagging"}, {"name": "gncl", "lambda": 0.2}], "method.1.lambda=0.6"),
        ({"name": "bagging"}, "ensemble.members=6"),
        ([], "ensemble.members=6"),
    ],
)
def test_what_to_try_is_another_value_of_what_the_spec_sets_or_else_more_members(method, setting):
    spec = ek.load_spec({**CLASSIFIER, "method": method})
    assert FakeRun(spec=spec).summary().next_steps[-1][0].endswith(f"--set {setting}")


@pytest.mark.parametrize(
    ("method", "purpose"), [({"name": "gncl", "lambda": 1.0}, "lambda 0.5"), ({"name": "bagging"}, "more members")]
)
def test_what_to_try_is_said_in_words(method, purpose):
    spec = ek.load_spec({**CLASSIFIER, "method": method})
    assert FakeRun(spec=spec).summary().next_steps[-1][1] == f"the same run with {purpose}"


@pytest.mark.parametrize("name", plain_methods())
def test_what_to_try_is_valid_for_every_method(name):
    tables = {key: table for key, table in CLASSIFIER.items() if key != "ensemble"}
    tables |= {"method": name, "training": {"epochs": 100}}
    resolved = ek.load_spec(tables).to_dict()  # every parameter is set, as in a run's own spec.toml
    steps = FakeRun(spec=ek.load_spec(resolved)).summary().next_steps
    for command, _ in steps:
        if " --set " in command:
            path, _, value = command.partition(" --set ")[2].partition("=")
            ek.load_spec(resolved, {path: float(value) if "." in value else int(value)})


def test_evaluate_groups_what_is_the_ensembles_the_members_and_between_them():
    rows = metric_rows(METRICS)
    assert rows[0] == ("ensemble", "test_loss", "0.071")
    assert ("ensemble", "test_accuracy", "98.30 %") in rows
    assert ("members", "test_mean_member_loss", "0.098") in rows
    assert [row[0] for row in rows] == ["ensemble"] * 3 + ["members"] * 4 + ["spread"] * 2
    assert {row[1] for row in rows} == set(METRICS)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.000"), (0.5, "0.500"), (0.00123456, "0.001235"), (123456.0, "123,456"), (-2.0, "-2.000"), (None, "")],
)
def test_numbers_keep_what_matters(value, text):
    assert number(value) == text


def test_the_time_is_told_by_what_it_was_spent_on():
    assert FakeRun().summary().time == "12.3 s of training, 0.5 s of evaluation, 2.0 s of start-up"
    assert FakeRun(seconds={}).summary().time == ""
