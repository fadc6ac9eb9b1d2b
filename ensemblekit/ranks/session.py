"""Joins the processes that torchrun has started, and ends all of them if one fails, with one line that says why."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from ensemblekit.core.errors import EnsemblekitError, Interrupted, PeerError, ResourceError, explain
from ensemblekit.core.streams import report
from ensemblekit.ranks.group import ALONE, Group, ProcessGroup
from ensemblekit.ranks.watch import Process, Watch

JOIN_SECONDS = 60
"""How long a rank waits for the others at the start."""
EXCHANGE_HOURS = 12
"""A rank that gives signs of life may take so long until its next exchange."""

_current: Session | None = None


class Session:
    """The ranks of a training, from their meeting to their end."""

    def __init__(self) -> None:
        try:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            self.store = _store(hosts=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")
            timeout = timedelta(seconds=JOIN_SECONDS)
            dist.init_process_group(_backend(), timeout=timeout, store=self.store, rank=rank, world_size=size)
        except (RuntimeError, ValueError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '')}"
            fix = "start all of them with torchrun, and let them reach that address"
            raise ResourceError(f"the ranks did not find each other: {_first_line(error)}", where, fix) from error
        self.group = ProcessGroup(self._lost)
        here = Process.here(self.group.rank, local_rank())
        processes = [Process(**values) for values in self.group.gather_json(asdict(here))]
        # a connection of its own, because an exchange may block the other
        self.watch = Watch(_store(), processes, self.group.rank, self._end_at_once)
        self.group.gather_json(None)  # everybody has given the first sign of life
        self.watch.start()
        # public since torch 2.13
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(timedelta(hours=EXCHANGE_HOURS))
        self.run = "RUN"
        """The directory of the run, once it is known."""

    def _lost(self, error: Exception) -> PeerError:
        """Return the error for a failed exchange: what a rank has told, or which one is gone."""
        reason = self.watch.reason()
        return self._told_error() or PeerError(reason, fix=self._fix, is_silent=not self.watch.tells_user)

    @property
    def _fix(self) -> str:
        return f"the last checkpoint is kept: ensemblekit resume {self.run}, in one process or under torchrun"

    def _told_error(self) -> PeerError | None:
        """Return what the first other rank that has failed has told; ranks that were only interrupted do not count."""
        for rank, failure in self.watch.told().items():
            if rank != self.group.rank and not failure["interrupted"]:
                line, code = f"rank {rank}: {failure['line']}", int(failure["exit_code"])
                return PeerError(line, exit_code=code, is_silent=not self.watch.tells_user)
        return None

    def _end_at_once(self, reason: str) -> None:
        if self.watch.tells_user:
            report(f"error: {reason}; {self._fix}")
        sys.stderr.flush()
        os._exit(ResourceError.exit_code)

    def failure(self, error: BaseException) -> BaseException:
        """Tell the others why this rank fails; returns the error to raise here."""
        if isinstance(error, PeerError):
            return error
        # whoever is asked to end because another rank has failed reports that failure
        is_interrupted = isinstance(error, Interrupted | KeyboardInterrupt)
        if is_interrupted and (told := self._told_error() or self._ended_error()):
            return told
        known = error if isinstance(error, EnsemblekitError) else explain(error)
        self.watch.tell({"line": known.line, "exit_code": known.exit_code, "interrupted": is_interrupted})
        if self.watch.tells_user:
            if isinstance(known, ResourceError):
                return PeerError(f"rank {self.group.rank}: {known.what}", known.where, known.fix)
            return error
        return PeerError(known.line, exit_code=known.exit_code, is_silent=True)

    def _ended_error(self) -> PeerError | None:
        told = self.watch.told()
        if not any(process.has_ended and process.rank not in told for process in self.watch.processes):
            return None
        return PeerError(self.watch.reason(), fix=self._fix, is_silent=not self.watch.tells_user)

    def close(self, wait: bool) -> None:
        """Leave the others; `wait` for all to be done first."""
        if wait:
            self.group.gather_json(None)
        self.watch.stop()
        if wait:
            dist.destroy_process_group()


@contextmanager
def joined_ranks() -> Iterator[Group]:
    """Join the other ranks if torchrun has started several; blocks inside share the group.

    Raises:
        PeerError: another rank has failed or is lost; or this one has, and another tells the user.
    """
    global _current
    if _current is not None or int(os.environ.get("WORLD_SIZE", "1")) <= 1 or "RANK" not in os.environ:
        yield ALONE if _current is None else _current.group
        return
    session = _current = Session()
    try:
        yield session.group
        session.close(wait=True)
    except BaseException as error:
        failure = session.failure(error)
        session.close(wait=False)
        raise failure from (error if failure is not error else error.__cause__)
    finally:
        _current = None


def watch_run(path: Path, timeout: float) -> None:
    """Say which run is trained, and after how many seconds without a sign of life a rank counts as lost."""
    if _current is not None:
        _current.run, _current.watch.timeout = str(path), timeout


def local_rank() -> int:
    """Return the number of this rank among those on its machine, which is also the number of its device."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def launch() -> dict[str, Any]:
    """Describe the start by torchrun: a run that it restarts after a failure goes on in its directory."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    run_id, restarts = (os.environ.get(name, "") for name in names)
    return {"id": f"{run_id}/{os.getppid()}", "restarts": int(restarts or 0)}


def is_told_elsewhere() -> bool:
    """Whether another process of this machine tells the user about errors before ranks have met."""
    return _current is None and local_rank() != 0


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _store(hosts: bool = False) -> Store:
    """Connect to the store of the launch, which torchrun hosts; without torchrun the first rank does.

    What ranks have stored before torchrun has started them again is not seen.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=hosts, timeout=timedelta(seconds=JOIN_SECONDS), multi_tenant=hosts)
    return PrefixStore(f"ensemblekit/{launch()['restarts']}", store)


def _first_line(error: Exception) -> str:
    with suppress(IndexError):
        return str(error).splitlines()[0]
    return type(error).__name__
