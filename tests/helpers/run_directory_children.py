"""Processes that die, race or run out of disk while they use a run directory.

A process of its own forks the children, because the tests' process has threads.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ensemblekit.core.errors import EnsemblekitError, ResourceError, RunError
from ensemblekit.runs.checkpoints import Checkpoint
from ensemblekit.runs.directory import RunDirectory

# All that change a file or a directory; between two of them a death leaves the same as at the next one.
FILE_EVENTS = {f"os.{name}" for name in ("rename", "remove", "mkdir", "rmdir", "chmod", "truncate")}
DIED = 9


def create(path: Path, spec_toml: str = "", environment: dict[str, Any] | None = None) -> RunDirectory:
    """Begin a run in a new directory without keeping its lock."""
    with RunDirectory.claim(path) as directory:
        directory.begin(spec_toml, environment or {})
    return directory


def checkpoint(epoch: int, size: int = 50) -> Checkpoint:
    """A checkpoint that tells its epoch in every number."""
    return Checkpoint(epoch, {"weight": torch.full((size,), epoch), "bias": torch.tensor(-epoch)}, {"epoch": epoch})


def model(number: int) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """A model that tells its number in every number."""
    return {"weight": torch.full((50,), number)}, {"number": number}


ACTIONS: dict[str, Callable[[RunDirectory], None]] = {
    "save": lambda run: run.save_checkpoint(checkpoint(4), best=True),
    "save again": lambda run: run.save_checkpoint(checkpoint(3, size=60)),
    "model": lambda run: run.write_model(*model(2)),
    "append": lambda run: run.append_metrics({"epoch": 5}),
    "truncate": lambda run: run.truncate_metrics(3),
    "large": lambda run: run.save_checkpoint(checkpoint(4, size=100_000)),
    "large model": lambda run: run.write_model({"weight": torch.zeros(100_000)}, {}),
    "large row": lambda run: run.append_metrics({"epoch": 5, "text": "x" * 100_000}),
    "large environment": lambda run: run.update_environment(text="x" * 100_000),
    "large result": lambda run: run.write_result({"text": "x" * 100_000}),
}


def die_at(fatal: int) -> None:
    """End this process before its n-th change of a file; a write has a moment in the middle."""
    numbers = count(1)

    def event() -> None:
        if next(numbers) == fatal:
            os._exit(DIED)

    write = os.write

    def write_in_halves(descriptor: int, content: bytes | memoryview) -> int:
        written = write(descriptor, content[: len(content) // 2 + 1])
        event()
        return written

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        if name in FILE_EVENTS or (name == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            event()

    os.write = write_in_halves
    sys.addaudithook(audit)


def in_child(task: Callable[[], int]) -> int:
    """The pid of a child that ends with the task's answer."""
    pid = os.fork()
    if pid == 0:
        os._exit(task())
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_at_each_event(action: str, run: Path, copies: Path) -> int:
    """For each n a copy of the run on which the action died at its n-th file event; the last one ended well."""
    for fatal in count(1):
        copy = copies / f"{fatal:04d}"
        shutil.copytree(run, copy)

        def task(fatal: int = fatal, copy: Path = copy) -> int:
            opened = RunDirectory.open(copy)
            die_at(fatal)
            ACTIONS[action](opened)
            return 0

        code = exit_code(in_child(task))
        assert code in (0, DIED), code
        if code == 0:
            return fatal
    raise AssertionError


def kill_start_at_each_event(starts: Path) -> int:
    """For each n a directory in which a start died at its n-th file event; the last one has saved a checkpoint."""
    for fatal in count(1):

        def task(fatal: int = fatal) -> int:
            die_at(fatal)
            with RunDirectory.claim(starts / f"{fatal:04d}") as directory:
                directory.begin("seed = 0\n", {"seed": 0})
                directory.save_checkpoint(checkpoint(0))
            return 0

        code = exit_code(in_child(task))
        assert code in (0, DIED), code
        if code == 0:
            return fatal
    raise AssertionError


def with_small_files(action: str, run: Path, limit_bytes: int) -> str:
    """The error of an action for which the disk is too small."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    try:
        ACTIONS[action](RunDirectory.open(run))
    except ResourceError as error:
        return str(error)
    return ""


def race(run: Path, processes: int) -> dict[str, list[int]]:
    """Which of many processes got the lock at once, and whom the others said was in the way."""
    start_reading, start_writing = os.pipe()
    done_reading, done_writing = os.pipe()

    def task() -> int:
        os.close(start_writing)
        os.close(done_writing)
        os.read(start_reading, 1)  # until the parent closes it
        try:
            with RunDirectory.open(run).lock():
                os.write(said_writing, f"winner {os.getpid()}\n".encode())
                os.read(done_reading, 1)
        except RunError as error:
            os.write(said_writing, f"loser {error.what.removeprefix('in use by pid ')}\n".encode())
        return 0

    said_reading, said_writing = os.pipe()
    pids = [in_child(task) for _ in range(processes)]
    os.close(start_writing)
    said = b""
    while said.count(b"\n") < processes:
        said += os.read(said_reading, 4096)
    os.close(done_writing)
    assert [exit_code(pid) for pid in pids] == [0] * processes
    answers: dict[str, list[int]] = {"winner": [], "loser": []}
    for line in said.decode().splitlines():
        role, pid = line.split()
        answers[role].append(int(pid))
    return answers


def race_to_create(path: Path, processes: int) -> int:
    """How many of many processes created a run in one directory."""
    begin = time.monotonic() + 0.2

    def task(number: int) -> int:
        while time.monotonic() < begin:
            pass
        try:
            with RunDirectory.claim(path) as directory:
                directory.begin(f"seed = {number}\n", {"number": number})
                directory.save_checkpoint(checkpoint(0))
        except EnsemblekitError as error:
            return error.exit_code
        return 0

    codes = [exit_code(pid) for pid in [in_child(lambda number=number: task(number)) for number in range(processes)]]
    assert set(codes) <= {0, 5}, codes
    return codes.count(0)


def race_without_a_name(folder: Path, processes: int) -> list[str]:
    """The directories of runs that start at once without one being named; each has what its own process has written."""
    folder.mkdir()
    os.chdir(folder)
    begin = time.monotonic() + 0.2

    def task(number: int) -> int:
        while time.monotonic() < begin:
            pass
        with RunDirectory.claim_next("digits") as directory:
            directory.begin(f"seed = {number}\n", {"number": number})
            directory.save_checkpoint(checkpoint(number))
        return 0

    pids = [in_child(lambda number=number: task(number)) for number in range(processes)]
    assert [exit_code(pid) for pid in pids] == [0] * processes
    runs = [RunDirectory.open(path) for path in sorted(Path("runs").iterdir())]
    for run in runs:
        number = run.environment["number"]
        assert (run.path / "spec.toml").read_text() == f"seed = {number}\n"
        assert run.load_checkpoint().epoch == number
    return [run.path.name for run in runs]


def kill_an_owner_with_a_worker(run: Path) -> tuple[int, str]:
    """The killed owner's pid, and what taking the lock over says while a process that it forked lives on."""
    ready_reading, ready_writing = os.pipe()

    def task() -> int:
        with RunDirectory.open(run).lock():
            worker = in_child(lambda: time.sleep(30) or 0)
            os.write(ready_writing, f"{worker}\n".encode())
            time.sleep(30)
        return 0

    owner = in_child(task)
    worker = int(os.read(ready_reading, 32))
    try:
        os.kill(owner, signal.SIGKILL)
        exit_code(owner)
        with RunDirectory.open(run).lock():
            return owner, "taken over"
    except RunError as error:
        return owner, str(error)
    finally:
        os.kill(worker, signal.SIGKILL)


CALLS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        kill_at_each_event,
        kill_start_at_each_event,
        with_small_files,
        race,
        race_to_create,
        race_without_a_name,
        kill_an_owner_with_a_worker,
    )
}


def call_in_child(*calls: Sequence[Any]) -> list[Any]:
    """Call some of these functions, each given as its name and its arguments, in a forked process; returns the answers.

    Audit hooks and limits of files stay for good, so that they must not come to the process of the tests.
    """
    receiver, sender = get_context("fork").Pipe(duplex=False)

    def work() -> None:
        sender.send([CALLS[name](*arguments) for name, *arguments in calls])

    process = get_context("fork").Process(target=work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that other threads exist; the child uses none of them
        process.start()
    sender.close()  # so that the end of the process ends the wait for it
    try:
        assert receiver.poll(120), "no answer within two minutes"
        answers: list[Any] = receiver.recv()
    finally:
        process.kill()
        process.join()
    return answers
