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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import Store

PAUSE_SECONDS = 0.5
"""Between two signs of life."""
GRACE_SECONDS = 5.0
"""What a rank has to end by itself once another is lost, and the silence that counts when an exchange has failed."""
DEFAULT_TIMEOUT_SECONDS = 45.0


@dataclass(frozen=True)
class Process:
    """Where a rank runs."""

    rank: int
    local_rank: int
    host: str
    pid: int
    started: str
    """Tells the process from a later one with the same id."""

    @classmethod
    def here(cls, rank: int, local_rank: int) -> Process:
        """Describe this process."""
        return cls(rank, local_rank, os.uname().nodename, os.getpid(), _start_time(os.getpid()) or "")

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        return self.host == os.uname().nodename

    @property
    def has_ended(self) -> bool:
        """Whether it runs on this machine and has ended."""
        return self.is_here and _start_time(self.pid) != self.started

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def _start_time(pid: int) -> str | None:
    """Return when a living process was started; None if it has ended, or where that cannot be known."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return None


class Watch:
    """Gives signs of life and looks for those of the others, in threads of its own.

    Args:
        store: a connection of its own to the store that all ranks share.
        processes: the ranks, in order.
        rank: this one.
        end: called with what happened if the process has to end although it waits in an exchange.
    """

    def __init__(self, store: Store, processes: Sequence[Process], rank: int, end: Any) -> None:
        self.store, self.processes, self.rank, self.end = store, processes, rank, end
        self.timeout = DEFAULT_TIMEOUT_SECONDS
        self.seen: dict[int, tuple[bytes, float]] = {}
        """The last sign of each rank, and when it was new."""
        self.contact = time.monotonic()
        """When the store has answered last."""
        self.lost: str | None = None
        """What happened to a rank that is lost."""
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._judge)]
        store.set(_key(rank), "0")

    def start(self) -> None:
        """Start, once all ranks have given their first sign."""
        now = time.monotonic()
        self.seen = {process.rank: (b"0", now) for process in self.processes}
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop watching; the others may end from now on."""
        self._stopped.set()

    def _beat(self) -> None:
        keys, count = [_key(process.rank) for process in self.processes], 0
        while not self._stopped.wait(PAUSE_SECONDS):
            count += 1
            with suppress(RuntimeError):
                self.store.set(_key(self.rank), str(count))
                values, now = self.store.multi_get(keys), time.monotonic()
                self.contact = now
                for process, value in zip(self.processes, values, strict=True):
                    if value != self.seen[process.rank][0]:
                        self.seen[process.rank] = (value, now)

    def _judge(self) -> None:
        while not self._stopped.wait(PAUSE_SECONDS):
            self.lost = self.lost or self._find_lost(self.timeout)
            if self.lost is not None:
                self._stop_hanging_ranks()
                if not self._stopped.wait(GRACE_SECONDS):
                    self.end(self.lost)
                return

    def _find_lost(self, silence: float) -> str | None:
        """Return what happened to the rank that was silent for so many seconds; None if all are well."""
        now = time.monotonic()
        if now - self.contact > silence:
            return f"rank {self.rank} is cut off from the others: their store has not answered for {silence:.0f} s"
        for process in self.processes:
            if process.rank != self.rank and process.has_ended:
                if ended := self._get(f"ended/{process.rank}"):
                    return ended
                return f"{process} has ended without a word: it was killed or has crashed"
        for process in self.processes:
            if process.rank != self.rank and now - self.seen[process.rank][1] > silence:
                return f"{process} timed out: no sign of life for {silence:.0f} s; it hangs or is cut off"
        return None

    def _stop_hanging_ranks(self) -> None:
        """End processes of this machine that hang, which frees whoever waits for them."""
        now = time.monotonic()
        for process in self.processes:
            silent = now - self.seen[process.rank][1] > self.timeout
            if silent and process.rank != self.rank and process.is_here and not process.has_ended:
                with suppress(OSError, RuntimeError):
                    self.store.set(f"ended/{process.rank}", self.lost or "")  # for whoever notices its end first
                    os.kill(process.pid, signal.SIGKILL)

    def reason(self) -> str:
        """Say which rank is lost after an exchange has failed; waits until that is known."""
        deadline = time.monotonic() + 2 * GRACE_SECONDS
        while time.monotonic() < deadline:
            if found := self.lost or self._find_lost(GRACE_SECONDS):
                return found
            time.sleep(PAUSE_SECONDS / 5)
        return "the connection to another rank was lost"

    def tell(self, failure: Mapping[str, Any]) -> None:
        """Tell all ranks why this one fails."""
        with suppress(RuntimeError):
            self.store.set(f"failure/{self.rank}", json.dumps(failure))

    def told(self) -> dict[int, dict[str, Any]]:
        """Return what ranks have told that fail, by rank."""
        failures = {}
        for process in self.processes:
            if failure := self._get(f"failure/{process.rank}"):
                failures[process.rank] = json.loads(failure)
        return failures

    def _get(self, key: str) -> str:
        """Return what the store has under a key; empty if it has nothing, or does not answer."""
        with suppress(RuntimeError):
            if self.store.check([key]):
                return str(self.store.get(key), "utf-8")
        return ""

    @property
    def tells_user(self) -> bool:
        """Whether it is this rank that tells the user of its machine what happened: the first that is alive there."""
        here = [process for process in self.processes if process.is_here]
        return next((process.rank == self.rank for process in here if not process.has_ended), True)


def _key(rank: int) -> str:
    return f"beat/{rank}"
