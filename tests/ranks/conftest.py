"""Ranks are forked from this process, which imports everything for them."""

from __future__ import annotations

import pytest
from helpers.faulty_ranks import import_all


@pytest.fixture(scope="session", autouse=True)
def imports(tmp_path_factory) -> None:
    import_all(tmp_path_factory.mktemp("imports"))
