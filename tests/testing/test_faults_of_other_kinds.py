"""The kit finds every kind of fault in data sets, extensions and losses, and says what and where."""

from __future__ import annotations

import pytest
from helpers.broken_others import FAULTS, GOOD, OFFLINE

from ensemblekit.testing import contract, run_contract
from ensemblekit.testing.common import common_checks


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ENSEMBLEKIT_DATA", str(tmp_path))


@pytest.mark.parametrize(("broken", "failing", "parts"), FAULTS, ids=[broken.__name__ for broken, _, _ in FAULTS])
def test_a_fault_fails_its_checks_and_no_others_and_is_named(broken, failing, parts):
    found = {result.name: result.message for result in run_contract(broken) if result.passed is False}
    assert set(found) == failing, found
    message = next(message for message in found.values() if all(part in message for part in parts))
    assert "broken_others.py:" in message


@pytest.mark.parametrize("good", GOOD, ids=lambda good: good.__name__)
def test_a_good_one_passes_and_every_check_of_its_kind_has_been_seen_to_fail(good):
    assert [result.message for result in run_contract(good) if not result.passed] == []
    common = {check.name for check in common_checks(good())}
    seen = set().union(*(failing for broken, failing, _ in FAULTS if broken.kind == good.kind))
    assert {check.name for check in contract(good)} - common == seen


def test_a_data_set_without_its_files_is_only_asked_what_it_says_of_that():
    from helpers.broken_others import SaysNotWhere

    assert OFFLINE in {check.name for check in contract(SaysNotWhere)}
    assert len(contract(SaysNotWhere)) == len(common_checks(SaysNotWhere())) + 1
