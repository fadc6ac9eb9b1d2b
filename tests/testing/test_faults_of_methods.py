"""The kit finds every kind of fault in a method, and says what and where."""

from __future__ import annotations

import inspect
import os

import pytest
from helpers import broken_methods
from helpers.broken_methods import FAULTS, GOOD, RESUMES, Good

from ensemblekit.testing import contract

FILE = "broken_methods.py:"


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    """With one core there is no threaded engine to disagree with."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)


def failures(method, leave_out: set[str]) -> dict[str, str]:
    results = [check.result() for check in contract(method) if check.name not in leave_out]
    return {result.name: result.message for result in results if result.passed is False}


@pytest.mark.parametrize(("broken", "failing", "parts"), FAULTS, ids=[broken.__name__ for broken, _, _ in FAULTS])
def test_a_fault_fails_its_checks_and_no_others_and_is_named(broken, failing, parts):
    found = failures(broken, leave_out={RESUMES} - failing)  # the one that takes long
    assert set(found) == failing
    message = next(message for message in found.values() if all(part in message for part in parts))
    assert FILE in message
    assert message.startswith("expected: ")


@pytest.mark.parametrize("good", GOOD, ids=lambda good: good.__name__)
def test_a_good_method_passes_also_if_it_is_not_for_any_number_of_members(good):
    assert failures(good, leave_out=set()) == {}


def test_every_check_has_been_seen_to_fail():
    assert {check.name for check in contract(Good)} == set().union(*(failing for _, failing, _ in FAULTS))


def test_the_line_of_the_review_is_where_the_hook_is():
    (message,) = failures(broken_methods.FirstSampleOnly, leave_out={RESUMES}).values()
    _, line = inspect.getsourcelines(broken_methods.FirstSampleOnly.member_loss)
    assert f"{FILE}{line}\n" in message
