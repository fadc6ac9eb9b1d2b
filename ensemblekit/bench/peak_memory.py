"""Peak memory of one contestant, measured in a process of its own.

``python -m ensemblekit.bench.peak_memory CONTESTANT`` reads a workload as JSON from its standard input.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from ensemblekit.bench.contestants import contest_of
from ensemblekit.bench.workloads import Workload
from ensemblekit.core.errors import ResourceError

ROUNDS = 3
"""The first step allocates the optimizer's state; further steps show what the allocator keeps."""
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory(workload: Workload, contestant: str, steps: int = 1) -> int:
    """Measure how much the resident memory of a new process grows at most while a contestant runs.

    Args:
        workload: What to run, on the CPU.
        contestant: A name in the workload's contest.
        steps: Steps in each of the three rounds.

    Returns:
        The peak minus what the process held before the first step, with members and data in place; in bytes.

    Raises:
        ResourceError: The process failed.
    """
    child = subprocess.run(
        [sys.executable, "-m", __spec__.name if __spec__ else __name__, contestant],
        input=json.dumps(replace(workload, steps=steps).to_table()),
        capture_output=True,
        text=True,
    )
    if child.returncode != 0:
        reason = child.stderr.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        where = f'workload "{workload.name}", contestant "{contestant}"'
        raise ResourceError(
            f"the process that measures memory failed: {reason[0]}", where, "free some memory and try again"
        )
    return int(child.stdout)


def main(contestant: str) -> None:
    """The child process: prepare, run a few steps, print the growth in bytes."""
    workload = Workload.from_table(json.load(sys.stdin))
    with ExitStack() as stack:
        work = contest_of(workload, torch.device("cpu")).makers[contestant](stack)
        before = _reset_peak()
        for _ in range(ROUNDS):
            work()
        print(_peak() - before)


def _reset_peak() -> int:
    """Reset the peak to the memory held now and return it; where the system cannot, return the peak so far."""
    if _CLEAR.exists():
        _CLEAR.write_text("5")
    return _peak()


def _peak() -> int:
    # Not ru_maxrss where /proc exists: on Linux a new process inherits its parent's value.
    if _STATUS.exists():
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main(sys.argv[1])
