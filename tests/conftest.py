"""Fixtures that several test files share."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.places import TOY_PLUGINS

from ensemblekit.core.registry import Registry, discover


@pytest.fixture(scope="session")
def registry() -> Registry:
    """Everything installed, and the toy plugins."""
    return discover([TOY_PLUGINS])


@pytest.fixture
def tables() -> dict[str, Any]:
    """The smallest spec: everything else has a default."""
    return {"data": {"name": "blobs"}, "model": {"name": "linear"}}
