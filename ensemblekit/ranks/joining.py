"""How ranks find each other in a store that may still have the keys of earlier attempts.

torchrun starts ranks again after a failure, on several machines with different counts of restarts, and may keep its
store. So the first rank names the attempt; the others answer, until they are in its list of all ranks.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from ensemblekit.core.errors import PeerError
from ensemblekit.ranks.launch import is_told_elsewhere
from ensemblekit.ranks.process import Process
from ensemblekit.ranks.watch import announce

JOIN_SECONDS = 60
"""How long a rank waits for the others at the start."""
PAUSE_SECONDS = 0.05
ATTEMPT, ALL = "ensemblekit/attempt", "all"


def launch_store(hosts: bool = False) -> Store:
    """Connect to the store of the launch, which torchrun hosts; without torchrun the first rank does."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=hosts, timeout=timedelta(seconds=JOIN_SECONDS), multi_tenant=hosts)


def attempt_store(store: Store, attempt: str) -> Store:
    """Return the part of a store that only the ranks of an attempt use."""
    return PrefixStore(f"ensemblekit/{attempt}", store)


def named_attempt(store: Store) -> str:
    """Return the attempt that the first rank has named; empty if it has not yet."""
    return store.get(ATTEMPT).decode() if store.check([ATTEMPT]) else ""


def join(store: Store, own: Process, size: int) -> list[Process]:
    """Wait for all ranks, and return where they are; each has announced itself to the others.

    Raises:
        PeerError: a rank has not joined in time, or has another kind of devices.
        KeyboardInterrupt: a signal came; the arguments say which rank had not joined.
    """
    deadline = time.monotonic() + JOIN_SECONDS
    if own.rank == 0:
        store.set(ATTEMPT, own.token)
    try:
        while not (processes := _processes(store, own, size)):
            if time.monotonic() > deadline:
                raise not_joined(f"{_missing(store, own, size)} has not joined the others for {JOIN_SECONDS} s")
            time.sleep(PAUSE_SECONDS)  # unlike a wait for the store, it lets signals through
    except KeyboardInterrupt as error:
        what = f"stopped before {_missing(store, own, size)} had joined"
        raise KeyboardInterrupt(what, "torchrun", "run the command again") from error
    _check_backends(processes)
    return processes


def rejoin(store: Store, own: Process, size: int) -> list[Process]:
    """Take the place of a lost rank, and return where the ranks of its attempt are.

    Raises:
        PeerError: not all ranks had joined when it was lost.
    """
    attempt = attempt_store(store, named_attempt(store))
    keys = [_key(rank) for rank in range(size)]
    if not attempt.check(keys):
        raise not_joined(f"rank {own.rank} was lost before all had joined")
    announce(attempt, own.rank)
    attempt.set(_key(own.rank), json.dumps(asdict(own)))
    return [Process(**json.loads(attempt.get(key))) for key in keys]


def _processes(store: Store, own: Process, size: int) -> list[Process]:
    """Answer the attempt that is named now; returns all ranks, or none if some are missing."""
    if not store.check([ATTEMPT]):
        return []
    attempt = PrefixStore(f"ensemblekit/{store.get(ATTEMPT).decode()}", store)
    if not attempt.check([_key(own.rank)]):
        announce(attempt, own.rank)
        attempt.set(_key(own.rank), json.dumps(asdict(own)))
    keys = [_key(rank) for rank in range(size)]
    if own.rank == 0 and attempt.check(keys):
        attempt.set(ALL, json.dumps([json.loads(attempt.get(key)) for key in keys]))
    if not attempt.check([ALL]):
        return []
    processes = [Process(**values) for values in json.loads(attempt.get(ALL))]
    return processes if own in processes else []  # else they are those of an earlier attempt


def _missing(store: Store, own: Process, size: int) -> str:
    """Name the ranks that have not joined."""
    attempt = PrefixStore(f"ensemblekit/{store.get(ATTEMPT).decode()}", store) if store.check([ATTEMPT]) else store
    missing = [rank for rank in range(size) if rank != own.rank and not attempt.check([_key(rank)])] or [0]
    return f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"


def _key(rank: int) -> str:
    return f"joined/{rank}"


def _check_backends(processes: Sequence[Process]) -> None:
    first = processes[0]
    for process in processes:
        if process.backend != first.backend:
            what = f"{process} exchanges tensors by {process.backend}, and {first} by {first.backend}"
            fix = "let all ranks see the same kind of devices (CUDA_VISIBLE_DEVICES)"
            raise PeerError(what, "torchrun", fix, is_silent=is_told_elsewhere())


def not_joined(what: str) -> PeerError:
    """Return the error of ranks that have not found each other."""
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    fix = "start all of them with torchrun, and let them reach that address"
    return PeerError(what, where, fix, is_silent=is_told_elsewhere())
