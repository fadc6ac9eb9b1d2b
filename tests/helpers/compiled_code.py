"""Compiled code in the versions that this processor can run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ensemblekit.core import kernels

needs_compiled_code = pytest.mark.skipif(kernels.library() is None, reason="there was no C compiler to build it")
_CAPABILITIES = {"AVX512": 2, "AVX2": 1}
HIGHEST = 2
VERSIONS = list(range(_CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), 0) + 1))
"""0: no vector instructions beyond those of every processor, 1: AVX2, 2: AVX-512."""


@contextmanager
def version(highest: int) -> Iterator[None]:
    """Use no version above this one, within a block."""
    functions = kernels.library()
    functions.limit_version(highest)
    try:
        yield
    finally:
        functions.limit_version(HIGHEST)
