"""Where a rank runs, and whether it still does."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from ensemblekit.ranks.launch import launcher, num_restarts


@dataclass(frozen=True)
class Process:
    """Where a rank runs."""

    rank: int
    host: str
    machine: str
    """Tells machines and containers apart, which may have the same name."""
    pid: int
    started: str
    """Tells the process from a later one with the same id."""
    launcher: str
    restarts: int
    """How often the launcher has started it again."""
    token: str
    """Tells the rank from one of an earlier attempt."""
    backend: str
    """How it exchanges tensors, which depends on its devices."""

    @classmethod
    def here(cls, rank: int, backend: str) -> Process:
        """Describe this process."""
        started = _start_time(os.getpid()) or ""
        whereabouts = (os.uname().nodename, _machine(), os.getpid(), started)
        return cls(rank, *whereabouts, launcher(), num_restarts(), uuid4().hex, backend)

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        return self.machine == _machine()

    @property
    def has_ended(self) -> bool:
        """Whether it runs on this machine and has ended."""
        # without /proc only silence tells
        return self.is_here and self.started != "" and _start_time(self.pid) != self.started

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def _machine() -> str:
    """Return what identifies the numbers of processes: the name and start of the machine, and the container."""
    parts = [os.uname().nodename]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


def _start_time(pid: int) -> str | None:
    """Return when a living process was started; None if it has ended, or where that cannot be known."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return None
