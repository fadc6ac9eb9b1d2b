"""Joins the processes that torchrun has started, and ends all of them if one fails, with one line that says why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ensemblekit.core.errors import EnsemblekitError, Interrupted, PeerError, RanksDifferError, ResourceError, explain
from ensemblekit.core.streams import report
from ensemblekit.ranks.group import ALONE, Group, ProcessGroup
from ensemblekit.ranks.healing import HealingGroup, Meeting
from ensemblekit.ranks.joining import attempt_store, join, launch_store, named_attempt, not_joined, rejoin
from ensemblekit.ranks.launch import is_replacement, is_supervised, num_ranks, own_rank
from ensemblekit.ranks.process import Process
from ensemblekit.ranks.watch import Loss, Watch

EXCHANGE_HOURS = 12
"""A rank that gives signs of life may take so long until its next exchange."""

_current: Session | None = None


class Session:
    """The ranks of a training, from their meeting to their end."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = own_rank(), size
        self.run = "RUN"
        """The directory of the run, once it is known."""
        hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            store = launch_store(hosts=hosts_store and self.rank == 0)
            own = Process.here(self.rank, _backend())
            self.processes = rejoin(store, own, size) if is_replacement() else join(store, own, size)
            attempt = named_attempt(store) if is_replacement() else self.processes[0].token
            store, own_store = (attempt_store(each, attempt) for each in (store, launch_store()))
        except (RuntimeError, ValueError) as error:
            raise not_joined(f"the ranks did not find each other: {_first_line(error)}") from error
        host = self.processes[0] if hosts_store else None
        self.watch = Watch(own_store, self.processes, self.rank, self._end_at_once, host)
        self.watch.start()
        try:
            self.group = self._joined(store)
        except (RuntimeError, ValueError) as error:
            lost = self._lost(error)
            self.watch.stop()
            raise lost from error

    def _joined(self, store: Store) -> ProcessGroup:
        """Join the others; a process that replaces a lost one catches up with them."""
        if is_supervised():
            return HealingGroup(Meeting(store, self.watch, self._join), self._lost, is_new=is_replacement())
        self._join(store)
        return ProcessGroup(self._lost)

    def _join(self, store: Store) -> None:
        timeout = timedelta(hours=EXCHANGE_HOURS)  # before that, the watch ends what hangs
        dist.init_process_group(_backend(), timeout=timeout, store=store, rank=self.rank, world_size=self.size)

    def _lost(self, error: Exception) -> PeerError:
        """Return the error for a failed exchange: what a rank has told, or which one is gone."""
        return self._peer_error(self.watch.loss())

    def _peer_error(self, loss: Loss) -> PeerError:
        fix = "" if loss.is_told else self._fix
        return PeerError(loss.what, fix=fix, exit_code=loss.exit_code, is_silent=not self.watch.has_word)

    @property
    def _fix(self) -> str:
        if not (Path(self.run) / "run.json").exists():
            return "nothing was saved yet: run the command again"
        return f"the last checkpoint is kept: ensemblekit resume {self.run}, in one process or under torchrun"

    def _end_at_once(self, loss: Loss) -> None:
        error = self._peer_error(loss)
        if not error.is_silent:
            report(f"error: {error.line}")
        os._exit(error.exit_code)

    def failure(self, error: BaseException) -> BaseException:
        """Tell the others why this rank fails; returns the error to raise here."""
        if isinstance(error, PeerError):
            return error
        is_interrupted = isinstance(error, Interrupted | KeyboardInterrupt)
        # whoever is asked to end because another rank has failed reports that failure
        if is_interrupted and (loss := self.watch.failure_elsewhere()):
            return self._peer_error(loss)
        known = error if isinstance(error, EnsemblekitError) else explain(error)
        self.watch.tell({"line": known.line, "exit_code": known.exit_code, "interrupted": is_interrupted})
        if not self.watch.has_word:
            return PeerError(known.line, exit_code=known.exit_code, is_silent=True)
        if isinstance(known, ResourceError) and not isinstance(known, RanksDifferError):
            return PeerError(f"rank {self.rank}: {known.what}", known.where, known.fix)
        return error

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
    if _current is not None or (size := num_ranks()) == 1:
        yield ALONE if _current is None else _current.group
        return
    session = _current = Session(size)
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


def launch() -> set[str]:
    """Name what has started the ranks; a run that it restarts after a failure goes on in its directory."""
    return set() if _current is None else {process.launcher for process in _current.processes}


def is_restarted() -> bool:
    """Whether the ranks were started again after a failure; on several machines, not every launcher counts that."""
    return _current is not None and any(process.restarts for process in _current.processes)


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _first_line(error: Exception) -> str:
    with suppress(IndexError):
        return str(error).splitlines()[0]
    return type(error).__name__
