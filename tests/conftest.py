"""Fixtures that several test files share."""

from __future__ import annotations

import os
from typing import Any

import pytest
from helpers.places import TOY_PLUGINS

from ensemblekit.core.registry import Registry, discover

# Before torch is imported: every worker of pytest-xdist has a core of its own, and torch's threads would wait for each
# other on it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def registry() -> Registry:
    """Everything installed, and the toy plugins."""
    return discover([TOY_PLUGINS])


@pytest.fixture
def tables() -> dict[str, Any]:
    """The smallest spec: everything else has a default."""
    return {"data": {"name": "blobs"}, "model": {"name": "linear"}}
