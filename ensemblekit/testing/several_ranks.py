"""Trains on several ranks without torchrun: forked processes, which are quick to start."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from socket import socket

from ensemblekit.core.registry import Registry
from ensemblekit.spec.sections import Spec
from ensemblekit.training.sessions import train_new

SECONDS = 120.0
"""After so long, ranks are taken to wait for each other in vain."""


def train_on_ranks(spec: Spec, registry: Registry, path: Path, size: int) -> None:
    """Train a spec on so many ranks, in a new run directory.

    Raises:
        RuntimeError: a rank has failed; its traceback is on standard error.
    """
    run_on_ranks(lambda: train_new(spec, registry, path), size)


def run_on_ranks(work: Callable[[], object], size: int) -> None:
    """Do the same work in so many forked processes, in an environment as torchrun gives it to them."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that other threads exist; the children use none of them
        for rank in range(size):
            process = get_context("fork").Process(target=_work, args=(work, rank, size, port))
            process.start()
            processes.append(process)
    for process in processes:
        process.join(SECONDS)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    if any(codes):
        raise RuntimeError(f"the exit codes of the ranks are {codes}")


def _work(work: Callable[[], object], rank: int, size: int, port: int) -> None:
    try:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        places = {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in places.items()})
        work()
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # what the parent has registered for its own end is not for its children
