"""Trains MLPs without end, as the neighbour of a run that is measured: ``python tests/benchmarks/neighbour.py 16``."""

from __future__ import annotations

import sys
from contextlib import ExitStack

from ensemblekit.core.memory import keep_freed_memory
from ensemblekit.core.waiting import limit_spinning


def main(members: int) -> None:
    """Train as the command line would."""
    limit_spinning()
    keep_freed_memory()
    import torch

    from ensemblekit.bench.contestants import contest_of
    from ensemblekit.bench.workloads import all_workloads

    here = all_workloads()["tiny-16"].changed(ensemble={"members": members})
    train = contest_of(here, torch.device("cpu")).makers["stacked"](ExitStack())
    print("ready", flush=True)
    while True:
        train()


if __name__ == "__main__":
    main(int(sys.argv[1]))
