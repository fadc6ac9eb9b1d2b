"""The kit finds every kind of fault, and says what is wrong and where."""

from __future__ import annotations

import inspect
import os

import pytest
from helpers import broken_hooks, broken_methods, broken_models, broken_others, broken_regression_losses
from helpers.broken_models import ACCEPTED, NOT_BUILT, works

from ensemblekit.core.plugin import Plugin
from ensemblekit.testing import CheckResult, ContractError, contract, run_contract
from ensemblekit.testing.common import PluginContract

FAULTS = [
    *broken_methods.FAULTS,
    *broken_hooks.FAULTS,
    *broken_models.FAULTS,
    *broken_others.FAULTS,
    *broken_regression_losses.FAULTS,
]
GOOD = (*broken_methods.GOOD, *broken_models.GOOD, *broken_others.GOOD, *broken_regression_losses.GOOD)
SLOW = {
    broken_methods.RESUMES,
    broken_methods.STATE,
    broken_methods.RANKS,
    broken_methods.ENGINES,
    broken_methods.CORRECT,
    broken_models.TRAINS,
    broken_models.works("export"),
    broken_others.DATA_TRAINS,
    broken_others.LOSS_TRAINS,
    broken_others.SAME_WITHOUT,
}
"""Checks that take long and are run only on plugins that must fail them, and on those without a fault."""


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    """With one core there is no threaded engine that could disagree."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ENSEMBLEKIT_DATA", str(tmp_path))


def failures(plugin: type[Plugin], leave_out: set[str]) -> dict[str, str]:
    results = [check.result() for check in contract(plugin) if check.name not in leave_out]
    return {result.name: result.message for result in results if result.passed is False}


@pytest.mark.faults
@pytest.mark.parametrize(
    ("broken", "failing", "parts"), FAULTS, ids=[f"{broken.kind}-{broken.__name__}" for broken, _, _ in FAULTS]
)
def test_a_fault_fails_its_checks_and_no_others_and_is_located(broken, failing, parts):
    found = failures(broken, leave_out=SLOW - failing)
    assert set(found) == failing, found
    message = next(message for message in found.values() if all(part in message for part in parts))
    assert f"{broken.__module__.rpartition('.')[2]}.py:" in message
    assert message.startswith("expected: ")


@pytest.mark.contract
@pytest.mark.parametrize("good", GOOD, ids=lambda good: good.__name__)
def test_a_plugin_without_a_fault_passes_all_checks(good):
    assert [result.message for result in run_contract(good) if not result.passed] == []


def test_state_that_no_checkpoint_can_hold_is_refused():
    (check,) = [check for check in contract(broken_methods.StateOfObjects) if check.name == broken_methods.STATE]
    with pytest.raises(ContractError, match="epochs is a set"):
        check()


def test_state_that_a_method_returns_and_restores_passes_its_check():
    (check,) = [check for check in contract(broken_methods.Remembers) if check.name == broken_methods.STATE]
    check()


def test_a_method_with_state_passes_all_checks():
    assert [result.message for result in run_contract(broken_methods.Remembers) if not result.passed] == []


@pytest.mark.parametrize("kind", sorted({good.kind for good in GOOD}))
def test_every_check_of_a_kind_has_been_seen_to_fail(kind):
    names = {check.name for good in GOOD if good.kind == kind for check in contract(good)}
    seen = set().union(*(failing for broken, failing, _ in FAULTS if broken.kind in (kind, "method")))
    assert names <= seen  # the checks that all kinds share are seen to fail on methods


def test_the_line_of_a_review_is_the_line_of_the_hook():
    check = next(check for check in contract(broken_methods.FirstSampleOnly) if check.name == broken_methods.ORDER)
    _, line = inspect.getsourcelines(broken_methods.FirstSampleOnly.member_loss)
    assert f"broken_methods.py:{line}\n" in check.result().message


def outcome(results: list[CheckResult], passed: bool | None) -> dict[str, str]:
    return {result.name: result.message for result in results if result.passed is passed}


@pytest.mark.parametrize("broken", [*NOT_BUILT, broken_models.TakesNothing], ids=lambda broken: broken.__name__)
def test_a_fault_of_every_network_is_reported_once(broken):
    results = run_contract(broken)
    assert list(outcome(results, False)) == [ACCEPTED]
    assert set(outcome(results, None).values()) == {f'fix "{ACCEPTED}" first'}
    shared = {check.name for check in PluginContract(broken()).checks()}
    assert set(outcome(results, True)) == shared | {broken_models.KNOWN_MODES}  # these need no network
    assert "Problem(" not in outcome(results, False)[ACCEPTED]


def test_a_model_that_declares_correctly_what_it_does_not_support_passes():
    class Honest(broken_models.Branches):
        """Declares everything that it does not support."""

        def unsupported(self) -> dict[str, str]:
            return dict.fromkeys(("meta", "vmap", "export"), "it reads a value")

    results = run_contract(Honest)
    assert [result.message for result in results if not result.passed] == []
    assert {works("vmap"), broken_models.TRAINS} <= {result.name for result in results}


def test_a_data_set_without_its_files_is_only_asked_for_its_error_message():
    broken = broken_others.SaysNotWhere
    shared = [check.name for check in PluginContract(broken()).checks()]
    assert [check.name for check in contract(broken)] == [*shared, broken_others.OFFLINE]


def test_a_method_with_an_unknown_hook_is_only_asked_for_its_documentation():
    broken = broken_methods.Misspelt
    shared = [check.name for check in PluginContract(broken()).checks()]
    assert [check.name for check in contract(broken)] == [*shared, broken_methods.FORMULA]
