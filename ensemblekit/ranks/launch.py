"""How this process was started: alone, or by torchrun as one of several; read from the environment, without torch."""

from __future__ import annotations

import os

from ensemblekit.core.errors import PeerError, UsageError

NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets beside WORLD_SIZE."""
LAUNCHER, REPLACEMENTS = "ENSEMBLEKIT_LAUNCHER", "ENSEMBLEKIT_REPLACEMENTS"
"""What a supervisor sets: the process that has started it, and how often it has replaced its own."""
NUMBERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT")


def num_ranks() -> int:
    """Return the number of processes that were started together; 1 without torchrun.

    Raises:
        UsageError: the environment says that there are several, but not which is this one or how to find the others.
    """
    fix = "start all processes with torchrun, or unset WORLD_SIZE"
    for name in NUMBERS:
        if not os.environ.get(name, "0").isdecimal():
            raise UsageError(f"{name} is {os.environ[name]}, which is no number", "environment", fix)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size <= 1:
        return 1
    if missing := [name for name in NEEDED if name not in os.environ]:
        raise UsageError(f"WORLD_SIZE is {size}, but {', '.join(missing)} not set", "environment", fix)
    if own_rank() >= size:
        raise UsageError(f"RANK is {own_rank()}, but WORLD_SIZE is {size}", "environment", fix)
    return size


def own_rank() -> int:
    """Return the number of this process among all."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return the number of this rank among those on its machine, which is also the number of its device."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def launcher() -> str:
    """Name the process that has started this one, and starts it again after a failure."""
    parent = os.environ.get(LAUNCHER) or os.getppid()
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.uname().nodename}/{parent}"


def is_supervised() -> bool:
    """Whether a supervisor starts this process again, alone, if a signal ends it."""
    return LAUNCHER in os.environ


def is_replacement() -> bool:
    """Whether a supervisor has started this process in the place of one that a signal has ended."""
    return REPLACEMENTS in os.environ


def num_restarts() -> int:
    """Return how often torchrun has started all ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def is_told_elsewhere() -> bool:
    """Whether another process of this machine tells the user about errors that come before the ranks have met."""
    return os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("LOCAL_RANK", "0") != "0"


def check_starts_alone(command: str) -> None:
    """Raise a `UsageError` if torchrun has started several processes of a command that one process does."""
    if num_ranks() > 1:
        if is_told_elsewhere():
            raise PeerError("", exit_code=UsageError.exit_code, is_silent=True)
        what = f"torchrun has started {num_ranks()} processes, but only train and resume use several"
        raise UsageError(what, f"ensemblekit {command}", "start it without torchrun")
