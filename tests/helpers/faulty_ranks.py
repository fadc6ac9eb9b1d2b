"""Ranks that fail at a chosen moment: killed, hung, out of memory, with a full disk, or cut off from the others.

Ranks are forked, as torchrun would start them but without the seconds that importing torch takes; the store of the
launch is in this process, as torchrun's is in its own.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

import ensemblekit.api
from ensemblekit.cli import main
from ensemblekit.engines.sequential import SequentialEngine
from ensemblekit.ranks import session, watch
from ensemblekit.training import trainer
from ensemblekit.training.evaluation import Evaluator
from ensemblekit.training.saving import Saver
from helpers.forked_commands import become_command

MOMENTS: dict[str, tuple[Any, str]] = {
    "joining": (session, "launch_store"),
    "start": (trainer, "load_data"),
    "step": (SequentialEngine, "train_step"),
    "evaluation": (Evaluator, "all_metrics"),
    "saving": (Saver, "_save"),
    "writing": (os, "fsync"),
}
"""What each moment is the start of."""
LONGEST_SECONDS = 120.0


@dataclass(frozen=True)
class Fault:
    """What happens to which rank, and when."""

    kind: str
    rank: int
    moment: str = "step"
    number: int = 1
    """It happens the so manieth time that the rank comes to the moment."""

    def install(self, folder: Path, happen: Callable[[], None]) -> None:
        """Let it happen in this process."""
        owner, name = MOMENTS[self.moment]
        original, calls = getattr(owner, name), 0

        def faulty(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.number:
                (folder / "fault").write_text(repr(time.time()))
                happen()
            return original(*arguments, **options)

        setattr(owner, name, faulty)


def happenings(disk: Path | None = None, cut: Callable[[], None] = lambda: None) -> dict[str, Callable[[], None]]:
    """Return what happens by each kind of fault; `disk` is a small file system, `cut` cuts this rank off."""
    return {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "hang": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "memory": run_out_of_memory,
        "disk": lambda: fill(disk),
        "cut": cut,
    }


def end_soon() -> None:
    """Let this process grant ranks that compute or wait one second to end by themselves, and not five."""
    watch.GRACE_SECONDS = 1.0


def run_out_of_memory() -> None:
    """Allocate more than a limit of the address space leaves."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, resource.RLIM_INFINITY))
    torch.empty(2**30, dtype=torch.uint8)


def fill(disk: Path | None) -> None:
    """Leave no room on a disk."""
    assert disk is not None
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


@dataclass
class Launch:
    """How the ranks of a launch have ended."""

    codes: list[int | None]
    """The exit code of each; that of a killed one is negative, and None stands for one that did not end."""
    logs: list[str]
    """The standard error of each."""
    seconds: float
    """From the start to the end of the last."""
    seconds_after_fault: float | None = None
    errors: list[str] = field(default_factory=list)
    """The lines of all ranks that begin with `error:`."""
    steps: int = 0
    """The number of steps of the rank that came furthest."""


def run_ranks(
    arguments: Sequence[str] | Callable[[int], Sequence[str]],
    size: int,
    folder: Path,
    prepare: Callable[[int], None] = lambda rank: None,
    restarts: int = 0,
    address: str = "127.0.0.1",
    make_store: Callable[[str], TCPStore] | None = None,
    follow: Callable[[list[BaseProcess]], None] = lambda processes: None,
) -> Launch:
    """Run `ensemblekit` on forked ranks.

    Args:
        arguments: of the command line, or what returns those of a rank.
        size: the number of ranks; one is a process without torchrun.
        folder: where to run it.
        prepare: called with the rank in each process, before the command.
        restarts: how often torchrun has started it before.
        address: where the store listens.
        make_store: makes that of the launch at an address, if it is on another host.
        follow: called with the processes once they have started.
    """
    (folder / "fault").unlink(missing_ok=True)
    started = time.time()
    environment: dict[str, Any] = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": address}
    environment |= {"TORCHELASTIC_RESTART_COUNT": restarts, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    context = get_context("fork")
    steps, port = context.Array("i", size), context.SimpleQueue()
    processes: list[BaseProcess] = []
    for rank in range(size):
        own = {**environment, "RANK": rank, "LOCAL_RANK": rank} if size > 1 else {}
        given = arguments(rank) if callable(arguments) else arguments
        process = context.Process(target=_become_rank, args=(given, folder, rank, own, steps, port, prepare))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that other threads exist; the children use none of them
            process.start()
        processes.append(process)
    store = (make_store or launch_store)(address)  # after the forks: its threads may hold a lock meanwhile
    for _ in processes:
        port.put(store.port)
    follow(processes)
    for process in processes:
        process.join(max(0.0, started + LONGEST_SECONDS - time.time()))
    ended = time.time()
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    logs = [(folder / f"log-{rank}").read_text(errors="replace") for rank in range(size)]
    errors = [line for log in logs for line in log.splitlines() if line.startswith("error:")]
    fault = folder / "fault"
    after = ended - float(fault.read_text()) if fault.exists() else None
    return Launch(codes, logs, ended - started, after, errors, max(steps))


def import_all(folder: Path) -> None:
    """Train here once, so that ranks that are forked afterwards have nothing to import."""
    spec = {"data": {"name": "digits", "limit_train": 20, "limit_test": 20}, "model": {"name": "mlp"}}
    spec |= {"ensemble": {"members": 2}, "training": {"epochs": 1}, "engine": {"name": "sequential", "device": "cpu"}}
    ensemblekit.api.train(spec, folder / "imports", progress=False)


def launch_store(address: str) -> TCPStore:
    """Host the store of a launch, as torchrun does."""
    return TCPStore(address, 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)


def _become_rank(
    arguments: Sequence[str],
    folder: Path,
    rank: int,
    environment: dict[str, Any],
    steps: Any,
    port: Any,
    prepare: Callable[[int], None],
) -> None:
    def prepare_rank() -> None:
        os.environ.update({name: str(value) for name, value in environment.items()})
        if environment:
            os.environ["MASTER_PORT"] = str(port.get())
        _count_steps(steps, rank)
        prepare(rank)

    log = folder / f"log-{rank}"
    become_command(arguments, folder, log, log, prepare_rank)


def _count_steps(steps: Any, rank: int) -> None:
    """Count the steps that this process trains, where its parent sees them."""
    train_step = SequentialEngine.train_step

    def counted(*arguments: Any, **options: Any) -> Any:
        result = train_step(*arguments, **options)
        steps[rank] += 1
        return result

    SequentialEngine.train_step = counted  # type: ignore[method-assign]


if __name__ == "__main__":  # under torchrun: KIND RANK MOMENT NUMBER FOLDER, and then the command line
    kind, rank, moment, number, place, *command = sys.argv[1:]
    if os.environ["RANK"] == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        Fault(kind, int(rank), moment, int(number)).install(Path(place), happenings()[kind])
    main(command)
