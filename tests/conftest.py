"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ensemblekit.registry import Registry, discover

ROOT = Path(__file__).parent.parent
TOY_PLUGINS = Path(__file__).parent / "toy_plugins.py"


@pytest.fixture(scope="session")
def registry() -> Registry:
    """Everything installed, and the toy plugins."""
    return discover([TOY_PLUGINS])


@pytest.fixture
def tables() -> dict[str, Any]:
    """The smallest spec: everything else has a default."""
    return {"data": {"name": "blobs"}, "model": {"name": "linear"}}
