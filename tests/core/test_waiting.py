"""Threads spin for a moment only, where the command line starts torch; nothing that a user has set is changed."""

from __future__ import annotations

import os
import sys

import pytest

from ensemblekit.core import waiting


@pytest.fixture
def before_torch(monkeypatch):
    for name in waiting.OTHER_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def test_the_limit_is_set_for_this_process_and_its_children(before_torch):
    assert waiting.limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == waiting.SPIN_COUNT
    with waiting.default_spinning():
        assert "GOMP_SPINCOUNT" not in os.environ
    assert os.environ["GOMP_SPINCOUNT"] == waiting.SPIN_COUNT


@pytest.mark.parametrize("name", waiting.OTHER_SETTINGS)
def test_a_setting_of_the_user_stays(before_torch, monkeypatch, name):
    monkeypatch.setenv(name, "ACTIVE")
    assert not waiting.limit_spinning()
    with waiting.default_spinning():
        assert os.environ[name] == "ACTIVE"


def test_after_torch_it_is_too_late(before_torch, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", object())
    assert not waiting.limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ
