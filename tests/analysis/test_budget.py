"""The best group within limits, on made-up runs where the right answer is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.kept_runs import Outputs, kept_run

from ensemblekit.analysis.comparison import compare_facts
from ensemblekit.analysis.reading import _read
from ensemblekit.core.errors import UsageError


def facts(lam, validation, seconds, seed=0, signal=3.0):
    run = kept_run(Outputs(signal=signal), f"runs/lambda={lam},seed={seed}", {"method.lambda": lam, "seed": seed})
    run = replace(run, environment={"seconds": {"training": seconds}}, milliseconds_per_1000=10 * seconds)
    if validation is not None:
        run = replace(run, validation={"validation_accuracy": validation})
    return _read(run)[0]


@pytest.fixture
def comparison():
    """The slower, the better on validation data; on test data the fastest is the best."""
    fast, middle, slow = facts(0.0, 0.7, 1.0, signal=4.0), facts(0.5, 0.8, 2.0), facts(1.0, 0.9, 4.0)
    return compare_facts([fast, middle, slow])


@pytest.mark.parametrize(
    ("limits", "best", "considered"),
    [
        ({"training_seconds": 4.0}, 1.0, 3),
        ({"training_seconds": 3.9}, 0.5, 2),
        ({"training_seconds": 4.0, "milliseconds_per_1000": 20.0}, 0.5, 2),
        ({"training_seconds": 1.0}, 0.0, 1),
    ],
)
def test_the_best_on_validation_data_within_all_limits_is_chosen(comparison, limits, best, considered):
    choice = comparison.best_within(limits)
    assert choice.group.keys["method.lambda"] == best
    assert choice.considered == considered
    assert (choice.metric, choice.value) == ("validation_accuracy", {0.0: 0.7, 0.5: 0.8, 1.0: 0.9}[best])


def test_the_mean_over_the_seeds_is_compared_with_the_limit_and_decides():
    runs = [facts(0.0, 0.6, 1.0, 0), facts(0.0, 0.9, 3.0, 1), facts(1.0, 0.7, 2.5, 0), facts(1.0, 0.7, 2.5, 1)]
    comparison = compare_facts(runs)
    assert comparison.best_within({"training_seconds": 2.0}).group.keys["method.lambda"] == 0.0
    choice = comparison.best_within({"training_seconds": 3.0})
    assert (choice.group.keys["method.lambda"], choice.value) == (0.0, 0.75)


def test_the_commands_train_calibrate_conform_and_export(comparison):
    commands = comparison.best_within({"training_seconds": 1.0}).commands
    assert commands[0] == "ensemblekit train runs/lambda=0.0,seed=0/spec.toml --out runs/chosen"
    assert [command.split()[1] for command in commands] == ["train", "calibrate", "conform", "export"]


def test_impossible_limits_are_refused_with_what_there_is(comparison):
    with pytest.raises(UsageError, match="no group is within the limits") as error:
        comparison.best_within({"training_seconds": 0.5})
    assert "training time [s]: 1" in str(error.value)
    with pytest.raises(UsageError, match="training_second") as error:
        comparison.best_within({"training_second": 5.0})
    assert "training_seconds" in str(error.value)


def test_test_data_never_chooses():
    comparison = compare_facts([facts(0.0, None, 1.0), facts(1.0, None, 2.0)])
    with pytest.raises(UsageError, match="no validation metrics"):
        comparison.best_within({"training_seconds": 5.0})
