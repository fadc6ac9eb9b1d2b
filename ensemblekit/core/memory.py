"""Memory: how much of it data may take, and how malloc treats freed blocks."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

SHARE_FOR_DATA = 0.25
# from glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_NEVER = 2**31 - 1


def fits_in_memory(num_bytes: int) -> bool:
    """Return whether data of that size fits in the share of physical memory that `storage = "auto"` may use."""
    return num_bytes <= SHARE_FOR_DATA * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@cache
def keep_freed_memory() -> bool:
    """Let malloc keep freed memory for reuse, for the whole process; returns whether that is possible.

    Every step frees and allocates the same large blocks. By default glibc returns them to the system, which maps them
    again page by page, zeroed: in small steps that takes as long as the arithmetic. All threads share one arena,
    because the arenas of single threads return memory in any case. Set ENSEMBLEKIT_KEEP_MEMORY=0 to leave malloc
    unchanged.
    """
    if sys.platform != "linux" or os.environ.get("ENSEMBLEKIT_KEEP_MEMORY") == "0":
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # musl does not have it
    if set_option is None:
        return False
    options = ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER))
    return all(set_option(option, value) == 1 for option, value in options)
