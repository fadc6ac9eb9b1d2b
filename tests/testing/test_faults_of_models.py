"""The kit finds every kind of fault in a model, and says what and where."""

from __future__ import annotations

import pytest
from helpers.broken_models import ACCEPTED, FAULTS, NOT_BUILT, GoodModel, TakesNothing, works

from ensemblekit.testing import contract, run_contract
from ensemblekit.testing.common import common_checks


@pytest.mark.parametrize(("broken", "failing", "parts"), FAULTS, ids=[broken.__name__ for broken, _, _ in FAULTS])
def test_a_fault_fails_its_checks_and_no_others_and_is_named(broken, failing, parts):
    found = {result.name: result.message for result in run_contract(broken) if result.passed is False}
    assert set(found) == failing, found
    message = next(message for message in found.values() if all(part in message for part in parts))
    assert "broken_models.py:" in message


@pytest.mark.parametrize("broken", [*NOT_BUILT, TakesNothing], ids=lambda broken: broken.__name__)
def test_what_is_wrong_with_every_network_is_said_once(broken):
    results = run_contract(broken)
    assert [result.name for result in results if result.passed is False] == [ACCEPTED]
    assert {result.message for result in results if result.passed is None} == {f'first mend "{ACCEPTED}"'}
    assert len([result for result in results if result.passed]) == 5  # what needs no network
    (message,) = (result.message for result in results if result.passed is False)
    assert "Problem(" not in message


def test_a_good_model_passes_and_every_check_has_been_seen_to_fail():
    assert all(result.passed for result in run_contract(GoodModel))
    own = {check.name for check in contract(GoodModel)} - {check.name for check in common_checks(GoodModel())}
    assert own == set().union(*(failing for _, failing, _ in FAULTS))


def test_a_model_that_declares_rightly_what_it_cannot_do_passes():
    class Honest(next(broken for broken, _, _ in FAULTS if broken.__name__ == "Branches")):
        """Says all that it cannot do."""

        def unsupported(self) -> dict[str, str]:
            return dict.fromkeys(("meta", "vmap", "export"), "it reads a value")

    assert [result.name for result in run_contract(Honest) if not result.passed] == []
    assert works("vmap") in {check.name for check in contract(Honest)}
