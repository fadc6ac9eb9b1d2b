"""Schedules and optimizers by name."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import PrivateAttr, ValidationError

import ensemblekit as ek
from ensemblekit.core.registry import discover
from ensemblekit.spec.optimizers import optimizer_classes, optimizer_section
from ensemblekit.spec.reader import build_plugin
from ensemblekit.spec.schedules import Schedule
from ensemblekit.testing import run_contract

EPOCHS = 20


@pytest.mark.parametrize(
    ("table", "make"),
    [
        ({"name": "step", "every": 6, "factor": 0.5}, lambda o: torch.optim.lr_scheduler.StepLR(o, 6, 0.5)),
        (
            {"name": "multistep", "after": [3, 11], "factor": 0.1},
            lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 11], 0.1),
        ),
        ({"name": "cosine", "final": 0.2}, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, EPOCHS, 0.2)),
        ({"name": "constant"}, lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_schedules_equal_torchs_epoch_by_epoch(table, make):
    schedule = build_plugin(Schedule, table, discover())
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    reference = make(optimizer)
    for epoch in range(EPOCHS):
        assert schedule.factor(epoch, EPOCHS) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()


def test_warm_up_rises_linearly_and_then_leaves_the_schedule_alone():
    schedule = build_plugin(Schedule, {"name": "constant", "warmup_epochs": 2.0}, discover())
    assert [schedule.factor(epoch, EPOCHS) for epoch in (0, 0.5, 1, 2, 5)] == [0, 0.25, 0.5, 1, 1]


class Sawtooth(ek.Schedule):
    """Falls within every epoch."""

    def decay(self, epoch, num_epochs):
        return 1 - epoch % 1


class Forgetful(ek.Schedule):
    """Counts its calls instead of the time."""

    _calls: int = PrivateAttr(0)

    def decay(self, epoch, num_epochs):
        self._calls += 1
        return 1 / self._calls


def test_a_schedule_of_a_plugin_is_named_in_a_spec_and_sets_the_learning_rate(tmp_path):
    tables = {
        "data": {"name": "digits", "limit_train": 100, "limit_test": 20},
        "model": {"name": "mlp", "hidden": [4]},
        "ensemble": {"members": 2},
        "training": {"epochs": 2, "batch_size": 25, "optimizer": {"name": "sgd", "lr": 1.0}, "schedule": "sawtooth"},
        "engine": {"name": "sequential", "device": "cpu"},
    }
    run = ek.train(tables, tmp_path / "run", plugins=[Sawtooth], progress=False)
    assert [row["learning_rate"] for row in run.history] == [0.25, 0.25]  # of the last of four steps
    assert run.spec.to_dict()["training"]["schedule"] == {"name": "sawtooth", "warmup_epochs": 0.0}


def test_the_contract_of_schedules_finds_one_that_keeps_state():
    assert all(result.passed for result in run_contract(Sawtooth))
    failed = {result.name for result in run_contract(Forgetful) if result.passed is False}
    assert failed == {"its factor depends on the time alone"}


@pytest.mark.parametrize("name", sorted(optimizer_classes()))
def test_every_optimizer_can_be_built_from_its_defaults_and_takes_a_step(name):
    parameter = torch.ones(3, 2, requires_grad=True)
    optimizer = optimizer_section(name).from_table({"name": name, "lr": 0.1}).build([parameter])
    parameter.sum().backward()
    optimizer.step()
    assert (parameter < 1).all()


def test_adabelief_is_silent_and_has_the_papers_epsilon(capsys):
    optimizer = (
        optimizer_section("adabelief").from_table({"name": "adabelief"}).build([torch.zeros(1, requires_grad=True)])
    )
    assert optimizer.defaults["eps"] == 1e-12
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"name": "sgd", "betas": [0.9, 0.99]}, "betas"),
        ({"name": "adam", "betas": [0.9]}, "betas"),
        ({"name": "adam", "lr": 0}, "lr"),
        ({"name": "adam", "lr": "1e-3"}, "lr"),
        ({"name": "adam", "params": []}, "params"),
        ({"name": "adam", "eps": math.nan}, "eps"),
    ],
)
def test_arguments_are_checked_against_the_optimizers_signature(table, key):
    with pytest.raises(ValidationError) as error:
        optimizer_section(table["name"]).from_table(table)
    assert error.value.errors()[0]["loc"][0] == key


def test_what_the_optimizer_itself_refuses_is_refused_by_the_section():
    with pytest.raises(ValidationError, match="Nesterov"):
        optimizer_section("sgd").from_table({"name": "sgd", "nesterov": True})
