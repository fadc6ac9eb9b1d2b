"""The kit understands families: their faults are found, and the built-in ones have none."""

from __future__ import annotations

import pytest
from helpers.broken_families import DIFFERENT, FAULTS, LEARNING, SIZES, GoodFamily
from helpers.broken_models import TRAINS, GoodModel, works

import ensemblekit as ek
from ensemblekit.core.plugin import Plugin
from ensemblekit.testing import contract

BUILT_IN = {
    "tabm": [{"hidden": [8]}, {"hidden": [8, 8], "adapters": "first", "dropout": 0.0}],
    "batch_ensemble_resnet": [{"width": 4, "blocks": 2}, {"width": 4, "blocks": 2, "dropout": 0.5, "softmax": True}],
    "packed_resnet": [{"width": 4, "blocks": 2}, {"width": 8, "blocks": 2, "gamma": 2, "alpha": 1.0, "dropout": 0.5}],
}


def failures(plugin: Plugin | type[Plugin], leave_out: set[str]) -> dict[str, str]:
    results = [check.result() for check in contract(plugin) if check.name not in leave_out]
    return {result.name: result.message for result in results if result.passed is False}


@pytest.mark.faults
@pytest.mark.parametrize(("broken", "failing", "parts"), FAULTS, ids=[broken.__name__ for broken, _, _ in FAULTS])
def test_a_fault_of_a_family_fails_its_check_and_no_others_and_is_located(broken, failing, parts):
    found = failures(broken, leave_out={TRAINS, works("export")})
    assert set(found) == failing, found
    (message,) = found.values()
    assert all(part in message for part in parts), message
    assert "broken_families.py:" in message


def test_a_family_is_asked_all_that_a_model_is_asked_except_for_stacking():
    of_model, of_family = ({check.name for check in contract(good)} for good in (GoodModel, GoodFamily))
    assert of_family - of_model == {SIZES, DIFFERENT, LEARNING}
    assert of_model - of_family == {works("vmap")}


@pytest.mark.contract
@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_families_have_no_fault(name):
    model = ek.models()[name].load()
    for table in BUILT_IN[name]:
        assert failures(model.from_table(table).named(name), leave_out={TRAINS}) == {}


def test_a_family_without_a_fault_passes_all_checks_of_its_network():
    assert failures(GoodFamily, leave_out={TRAINS}) == {}
