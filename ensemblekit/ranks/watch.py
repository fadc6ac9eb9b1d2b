"""Notices a rank that is gone, hangs or is cut off: every rank gives a sign of life through the store of torchrun.

An exchange fails by itself when a process has ended, but it does not say which; and it waits for a process that hangs.
A rank that is only slow keeps giving signs of life, and is waited for.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed.distributed_c10d import Store

from ensemblekit.core.errors import ResourceError
from ensemblekit.ranks.process import Process

PAUSE_SECONDS = 0.5
"""Between two signs of life."""
GRACE_SECONDS = 5.0
"""What a rank has to end by itself once another is lost, and the silence that counts when an exchange has failed."""
ANSWER_SECONDS = 2.0
"""How long a rank that fails waits for the store."""
DEFAULT_TIMEOUT_SECONDS = 45.0
BEAT, FAILURE, ENDED = KINDS = ("beat", "failure", "ended")
"""What the store has about each rank: a count, why it has failed, and how it has ended as others have seen it."""


@dataclass(frozen=True)
class Loss:
    """Why all ranks end."""

    what: str
    exit_code: int = ResourceError.exit_code
    is_told: bool = False
    """Whether it is what the rank that has failed says itself, with what to do about it."""
    rank: int | None = None
    """The rank that is gone, which another process may replace."""


class Watch:
    """Gives signs of life and looks for those of the others, in threads of its own.

    Only one thread talks to the store: a store that is out of reach may block it for minutes, and nobody else.

    Args:
        store: a connection of its own to the store that all ranks share.
        processes: the ranks, in order.
        rank: this one.
        end: called if the process has to end although it waits in an exchange.
        host: the rank that hosts the store; None if torchrun does.
    """

    def __init__(
        self,
        store: Store,
        processes: Sequence[Process],
        rank: int,
        end: Callable[[Loss], None],
        host: Process | None = None,
    ) -> None:
        self.store, self.processes, self.rank, self.end, self.host = store, processes, rank, end, host
        self.others = [process for process in processes if process.rank != rank]
        self.timeout = DEFAULT_TIMEOUT_SECONDS
        self.patience = 0.0
        """For so many seconds a rank that is gone may be replaced by another process."""
        self._noticed: float | None = None
        """When a rank that may be replaced was seen to be gone."""
        now = time.monotonic()
        self.news = {_key(kind, process.rank): "" for process in processes for kind in KINDS}
        """The last answer of the store."""
        self.heard = {process.rank: now for process in processes}
        """When the last sign of each rank was new."""
        self.contact = now
        """When the store has answered last."""
        self.lost: Loss | None = None
        self._outgoing: dict[str, str] = {}
        self._wants_word, self._has_word = False, None if self.others else True
        self._rounds, self._asked = threading.Condition(), threading.Event()
        self._begun = self._answered = 0
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._talk, self._judge)]

    def start(self) -> None:
        """Start; every rank has called `announce` before."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop watching; the others may end from now on."""
        self._stopped.set()
        self._asked.set()

    def _talk(self) -> None:
        """Exchange news with the store, again and again."""
        while not self._stopped.is_set():
            with self._rounds:
                self._begun += 1
            with suppress(RuntimeError):
                self._exchange_news()
                with self._rounds:
                    self._answered = self._begun
                    self._rounds.notify_all()
            self._asked.wait(PAUSE_SECONDS)
            self._asked.clear()

    def _exchange_news(self) -> None:
        self.store.set(_key(BEAT, self.rank), str(self._begun))
        for key, value in list(self._outgoing.items()):
            self.store.set(key, value)
            self._outgoing.pop(key, None)
        if self._wants_word and self._has_word is None:
            own = self.processes[self.rank]
            self._has_word = self.store.add(f"told/{own.machine}", 1) == 1
        values = [str(value, "utf-8") for value in self.store.multi_get(list(self.news))]
        self.contact = time.monotonic()
        news = dict(zip(self.news, values, strict=True))
        for process in self.processes:
            if news[_key(BEAT, process.rank)] != self.news[_key(BEAT, process.rank)]:
                self.heard[process.rank] = self.contact
        self.news = news

    def _ask(self) -> None:
        """Exchange news now, if the store answers soon."""
        with self._rounds:
            wanted = self._begun + 1
            self._asked.set()
            self._rounds.wait_for(lambda: self._answered >= wanted, ANSWER_SECONDS)

    def _judge(self) -> None:
        while not self._stopped.wait(PAUSE_SECONDS):
            found = self.lost or self._find_loss(self.timeout)
            if found is None or self._may_be_replaced(found):
                continue
            self.lost = found
            self._stop_hanging_ranks()
            if not self._stopped.wait(GRACE_SECONDS):
                self.end(self.lost)
            return

    def _may_be_replaced(self, loss: Loss) -> bool:
        """Whether another process may still take the place of a lost rank; one that hangs is ended first."""
        if loss.rank is None or not self.patience:
            return False
        if self._noticed is None:
            self._noticed = time.monotonic()
        self._stop_hanging_ranks()
        return time.monotonic() - self._noticed < self.patience

    def replace(self, processes: Sequence[Process]) -> None:
        """Watch other processes from now on: those that have replaced lost ones, too."""
        for process, before in zip(processes, self.processes, strict=True):
            if process != before:
                self._outgoing.pop(_key(ENDED, process.rank), None)
        now = time.monotonic()
        self.heard = {process.rank: now for process in processes}
        self.processes, self.others = processes, [process for process in processes if process.rank != self.rank]
        self._noticed = None

    @property
    def has_failures(self) -> bool:
        """Whether another rank has told that it fails."""
        return bool(self._failures())

    def _find_loss(self, silence: float) -> Loss | None:
        """Return what happened to a rank that has failed, has ended or was silent for so many seconds, if one was."""
        if found := self.failure_elsewhere():
            return found
        for failure in self._failures().values():  # only interrupted
            return Loss(failure["line"], failure["exit_code"], is_told=True)
        return self._find_silence(silence)

    def failure_elsewhere(self) -> Loss | None:
        """Return why another rank has ended, unless it was only interrupted."""
        if told := self._told_failure():
            return told
        gone = [process for process in self.others if process.has_ended and process.rank not in self._failures()]
        if gone:
            self._ask()  # it may have told why just before
            if told := self._told_failure():
                return told
        failures = self._failures()
        for process in self.others:
            seen = self.news[_key(ENDED, process.rank)]
            if process.rank not in failures and str(process) in seen:  # and not one that it has replaced
                return Loss(seen, rank=process.rank)
        for process in gone:
            if process.rank not in failures:
                what = f"{process} has ended without a word: it was killed or has crashed"
                self._outgoing[_key(ENDED, process.rank)] = what  # for other machines
                return Loss(what, rank=process.rank)
        return None

    def _told_failure(self) -> Loss | None:
        for rank, failure in self._failures().items():
            if not failure["interrupted"]:
                return Loss(f"rank {rank}: {failure['line']}", failure["exit_code"], is_told=True)
        return None

    def _find_silence(self, seconds: float) -> Loss | None:
        now = time.monotonic()
        if now - self.contact > seconds:
            silent = f"has not answered for {seconds:.0f} s"
            if self.host is not None and self.host.rank != self.rank:
                return Loss(f"{self.host} timed out: its store {silent}; it hangs or is cut off")
            what = f"{self.processes[self.rank]} is cut off from the others: the store of torchrun {silent}"
            return Loss(f"{what}; the network fails, or that machine is gone")
        for process in self.others:
            if self._silent_seconds(process) > seconds:
                what = f"{process} timed out: no sign of life for {seconds:.0f} s"
                return Loss(f"{what}; it hangs, its machine is gone, or the network fails", rank=process.rank)
        return None

    def _silent_seconds(self, process: Process) -> float:
        """Return for how long a rank was silent when the store answered last: it tells nothing of later."""
        return self.contact - self.heard[process.rank]

    def _stop_hanging_ranks(self) -> None:
        """End processes of this machine that hang, which frees whoever waits for them."""
        is_host_silent = time.monotonic() - self.contact > self.timeout
        for process in self.others:
            hangs = self._silent_seconds(process) > self.timeout or (process is self.host and is_host_silent)
            if hangs and process.is_here and not process.has_ended:
                self._outgoing[_key(ENDED, process.rank)] = self.lost.what if self.lost else ""
                self._ask()  # before its end is noticed
                with suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)

    def loss(self) -> Loss:
        """Say what happened after an exchange has failed; waits until that is known."""
        self._ask()
        deadline = time.monotonic() + 2 * GRACE_SECONDS
        while time.monotonic() < deadline:
            if found := self.lost or self._find_loss(GRACE_SECONDS):
                return found
            time.sleep(PAUSE_SECONDS / 5)
        return Loss("the connection to another rank was lost")

    def tell(self, failure: Mapping[str, Any]) -> None:
        """Tell all ranks why this one fails."""
        self._outgoing[_key(FAILURE, self.rank)] = json.dumps(failure)
        self._ask()

    def _failures(self) -> dict[int, dict[str, Any]]:
        """Return what other ranks have told that fail, by rank."""
        told = {process.rank: self.news[_key(FAILURE, process.rank)] for process in self.others}
        return {rank: json.loads(failure) for rank, failure in told.items() if failure}

    @property
    def has_word(self) -> bool:
        """Whether it is this rank that tells the user of its machine what happened: the first that wants to.

        If the store does not answer, it is the first that is alive.
        """
        if self._has_word is None:
            self._wants_word = True
            self._ask()
        if self._has_word is None:
            alive = (process for process in self.processes if process.is_here and not process.has_ended)
            self._has_word = next(alive).rank == self.rank
        return self._has_word


def announce(store: Store, rank: int) -> None:
    """Write the first news of a rank, so that nobody waits for them."""
    for kind in KINDS:
        store.set(_key(kind, rank), "")


def _key(kind: str, rank: int) -> str:
    return f"{kind}/{rank}"
