"""Compositions in which something would be ignored are refused before training; the others train."""

from __future__ import annotations

import pytest
import torch
from helpers.small_runs import small_spec, training

import ensemblekit as ek
from ensemblekit.core.errors import UsageError
from ensemblekit.core.losses import CrossEntropy
from ensemblekit.core.objective import Objective

STEP = {"name": "step", "every": 1}
SNAPSHOT = {"name": "snapshot", "cycles": 2}


class Temperature(ek.Method):
    """Divides the mean output by a fitted temperature."""

    formula = "f = mean_i h_i / T"

    @ek.hookimpl
    def fit_combiner(self, outputs):
        return 1 + outputs.std().reshape(1)

    @ek.hookimpl
    def combine(self, outputs, fitted):
        return None if fitted is None else outputs.mean(dim=0) / fitted


class OtherTemperature(Temperature):
    """Divides by another temperature."""

    @ek.hookimpl
    def fit_combiner(self, outputs):
        return 2 + outputs.std().reshape(1)


class WarmUp(ek.Method):
    """Has a loss of its own in the first half of the training."""

    @ek.hookimpl
    def member_loss(self, outputs, target, loss, progress):
        return loss(outputs, target).square() if progress < 0.5 else None


class HalvesTheRate(ek.Method):
    """Sets the learning rate."""

    @ek.hookimpl
    def learning_rate(self, base):
        return base / 2


PLUGINS = [Temperature, OtherTemperature, WarmUp, HalvesTheRate]


def train(method, path, **changes) -> ek.Run:
    model = {"name": "mlp", "hidden": [8], "dropout": 0.2}
    spec = small_spec(method=method, model=model, training=training(**{"epochs": 2, **changes}))
    if "snapshot" in str(method):
        del spec["ensemble"]
    return ek.train(spec, path, progress=False, plugins=PLUGINS)


REFUSED = [
    (["temperature", "boosting"], 'combination of the outputs of "temperature" .* that of "boosting"'),
    (["boosting", "temperature"], 'combination of the outputs of "boosting" .* that of "temperature"'),
    (["boosting", "stacking"], 'combination of the outputs of "boosting" .* that of "stacking"'),
    (["stacking", "temperature"], 'fitted combination of "stacking" .* that of "temperature"'),
    (["temperature", "other_temperature"], 'fitted combination of "temperature" .* that of "other_temperature"'),
    (["end_to_end", "gncl"], 'member loss of "end_to_end" .* that of "gncl"'),
    (["boosting", "ncl"], 'member loss of "boosting" .* that of "ncl"'),
    (["end_to_end", "divloss"], 'member loss of "end_to_end" .* that of "divloss"'),
    (["warm_up", "gncl"], 'member loss of "warm_up" .* that of "gncl"'),
    ([{"name": "smcl", "combine": "max"}, "stacking"], 'combination of the outputs of "smcl" .* that of "stacking"'),
    ([SNAPSHOT, "halves_the_rate"], 'learning rate of "snapshot" .* that of "halves_the_rate"'),
]


@pytest.mark.parametrize(("methods", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_composition_in_which_a_method_would_be_ignored_is_refused(methods, message, tmp_path):
    with pytest.raises(UsageError, match=f"{message} takes its place"):
        train(methods, tmp_path / "run")
    assert not (tmp_path / "run").exists()


TRAINED = [
    ["bagging", "gncl"],
    ["bagging", "stacking"],
    ["gncl", "stacking"],
    ["gncl", "temperature"],
    ["smcl", "stacking"],
    ["smcl", {"name": "gncl", "lambda": 0.0}],
    ["bagging", "wagging", "boosting"],
    ["dropout", "gncl"],
    ["dropout", "adversarial", "stacking"],
    ["adversarial", "end_to_end"],
    [SNAPSHOT, "adversarial"],
    ["independent", "ncl"],
    [SNAPSHOT, "bagging", "dropout"],
]


@pytest.mark.parametrize("methods", TRAINED, ids=str)
def test_a_composition_in_which_everything_counts_trains(methods, tmp_path):
    assert train(methods, tmp_path / "run").status == "finished"


def test_a_schedule_that_has_no_effect_is_said(tmp_path):
    notice = 'training.schedule has no effect: "snapshot" sets the learning rate of every step'
    assert notice in train(SNAPSHOT, tmp_path / "run", schedule=STEP).notices
    assert notice not in train({"name": "snapshot", "at_epochs": [2]}, tmp_path / "used", schedule=STEP).notices
    assert notice not in train(SNAPSHOT, tmp_path / "none").notices


class Sees(ek.Method):
    """Notes what `combine` gets as fitted."""

    @ek.hookimpl
    def combine(self, outputs, fitted):
        assert fitted is None
        return


@pytest.mark.parametrize("methods", [[Temperature(), Sees()], [Sees(), Temperature()]], ids=["before", "after"])
def test_what_a_method_has_fitted_reaches_no_other(methods):
    outputs, target = torch.randn(3, 5, 4), torch.randint(4, (5,))
    objective = Objective(methods, CrossEntropy())
    fitted = objective.hooks.fit_combiner(outputs, target, objective.loss)
    torch.testing.assert_close(objective.combine(outputs, fitted), outputs.mean(dim=0) / (1 + outputs.std()))
