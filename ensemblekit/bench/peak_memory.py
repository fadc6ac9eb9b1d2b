"""The peak memory of one contestant, measured in a process that holds nothing else.

``python -m ensemblekit.bench.peak_memory CONTESTANT`` reads a workload as JSON from its standard input.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ensemblekit.bench.contestants import contest_of
from ensemblekit.bench.workloads import Workload
from ensemblekit.core.errors import ResourceError

ROUNDS = 3
"""The optimizer's state is there after the first step; more steps show what the allocator keeps."""
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of resident memory."""

    total: int
    """The most that the whole process held while it worked."""
    growth: int
    """How much more that is than what it held before the first step, with members and data in place."""


def peak_memory(workload: Workload, contestant: str, steps: int = 1) -> PeakMemory:
    """What one contestant needs for a few rounds of steps, measured in a process of its own; the CPU's memory only."""
    child = subprocess.run(
        [sys.executable, "-m", __spec__.name if __spec__ else __name__, contestant],
        input=json.dumps(replace(workload, steps=steps).to_table()),
        capture_output=True,
        text=True,
    )
    if child.returncode != 0:
        reason = child.stderr.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        where = f'workload "{workload.name}", contestant "{contestant}"'
        raise ResourceError(f"the process that measures memory failed: {reason[0]}", where, "free memory, try again")
    return PeakMemory(**json.loads(child.stdout))


def main(contestant: str) -> None:
    """The child: prepare, run a few steps, print the peak as JSON."""
    workload = Workload.from_table(json.load(sys.stdin))
    with ExitStack() as stack:
        work = contest_of(workload, torch.device("cpu")).makers[contestant](stack)
        before = _restarted_peak()
        for _ in range(ROUNDS):
            work()
        peak = _peak()
    print(json.dumps(asdict(PeakMemory(peak, peak - before))))


def _restarted_peak() -> int:
    """Forget the peak until now, and return what is held now; where that cannot be done, the peak until now."""
    if _CLEAR.exists():
        _CLEAR.write_text("5")
    return _peak()


def _peak() -> int:
    # Not ru_maxrss if it can be helped: on Linux a new process takes over its parent's.
    if _STATUS.exists():
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main(sys.argv[1])
