"""Freed memory is kept for the next step, unless that is not wanted."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import resource, torch
from ensemblekit.core.memory import keep_freed_memory
kept = keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(12_000_000)
before = faults()
for _ in range(10):
    torch.ones(12_000_000)
print(kept, faults() - before)
"""


def page_faults(**environment: str) -> tuple[str, int]:
    """Whether memory is kept, and the page faults of ten times asking for 48 MB and freeing it."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    kept, count = run.stdout.split()
    return kept, int(count)


def test_memory_that_is_freed_and_asked_for_again_is_not_fetched_from_the_system():
    kept, few = page_faults()
    left_alone, many = page_faults(ENSEMBLEKIT_KEEP_MEMORY="0")
    assert (kept, left_alone) == ("True", "False")
    assert few * 2 < many
