"""How the threads of one operation wait for each other: by spinning for a moment, then by sleeping.

By default, threads of GNU's OpenMP, which torch uses on Linux, spin for milliseconds. Where another program has one of
the cores, they burn the time in which the thread that they wait for could run: with a busy program on each core, steps
of the stacked engine became 4 to 23 times slower, and with this limit 2.5 to 3.2 times, for 3 to 7 % of the speed on an
idle machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SPIN_COUNT = "10000"
"""Iterations of the loop in which a thread waits before it sleeps: a few microseconds more than a small operation."""
VARIABLE = "GOMP_SPINCOUNT"
OTHER_SETTINGS = ("OMP_WAIT_POLICY", VARIABLE)


def limit_spinning() -> bool:
    """Limit how long threads spin, in this process and those that it starts; before torch is imported.

    The command line does this for its own process. What the environment says already stays as it is.

    Returns:
        Whether the limit was set.
    """
    if "torch" in sys.modules or any(name in os.environ for name in OTHER_SETTINGS):
        return False
    os.environ[VARIABLE] = SPIN_COUNT
    return True


@contextmanager
def default_spinning() -> Iterator[None]:
    """Let processes that are started in a block wait as by default, if it was `limit_spinning` that changed it."""
    before = os.environ.get(VARIABLE)
    if before != SPIN_COUNT:
        yield
        return
    del os.environ[VARIABLE]
    try:
        yield
    finally:
        os.environ[VARIABLE] = before
