"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import getpass
import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

import pytest
from helpers.places import TOY_PLUGINS

if TYPE_CHECKING:  # the process that starts the workers need not import torch
    from ensemblekit.core.registry import Registry

# Before torch is imported: every worker of pytest-xdist has a core of its own, and torch's threads would wait for each
# other on it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without vectors, torch's compiler writes C++ that is compiled in less time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# Thousands of tiny run directories, each file of which is synchronised with the disk: in memory that takes no time.
MEMORY = "/dev/shm"
if "TMPDIR" not in os.environ and os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > 4 * 2**30:
    # what was compiled stays where torch keeps it by default, for the next time
    compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", compiled)
    os.environ["TMPDIR"] = tempfile.tempdir = MEMORY


def pytest_collection_finish() -> None:
    """Leave the modules, which stay to the end, out of every later garbage collection."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter free the modules at its end; extension modules report what they leak."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def registry() -> Registry:
    """Everything installed, and the toy plugins."""
    from ensemblekit.core.registry import discover

    return discover([TOY_PLUGINS])


@pytest.fixture
def tables() -> dict[str, Any]:
    """The smallest spec: everything else has a default."""
    return {"data": {"name": "blobs"}, "model": {"name": "linear"}}
