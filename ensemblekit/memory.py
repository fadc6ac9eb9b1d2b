"""How much of the machine's memory data may take."""

from __future__ import annotations

import os

SHARE_FOR_DATA = 0.25


def fits_in_memory(num_bytes: int) -> bool:
    """Whether data of that size fits in the share of physical memory that `storage = "auto"` may use."""
    return num_bytes <= SHARE_FOR_DATA * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
