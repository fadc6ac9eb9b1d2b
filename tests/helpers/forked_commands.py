"""`ensemblekit` in processes forked from this one: real processes, without the seconds that importing torch takes."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import NoReturn

from ensemblekit.cli import main


def become_command(
    arguments: Sequence[str], folder: Path, output: Path, errors: Path, prepare: Callable[[], None] = lambda: None
) -> NoReturn:
    """Run a command line in this process, which was forked for it, and end with its exit code.

    Args:
        arguments: of the command line.
        folder: the current directory.
        output: the file of its standard output, which is made.
        errors: that of its standard error; may be the same.
        prepare: called before the command.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    stdout = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    stderr = stdout if errors == output else os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # those of pytest are not those of a process
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    code: object = 1
    try:
        prepare()
        main(list(arguments))
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


class ForkedCommand:
    """A command line that runs in a process of its own.

    Args:
        arguments: of the command line.
        folder: where it runs; its two streams are written to files beside it.
        prepare: called in the process before the command.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, prepare: Callable[[], None] = lambda: None) -> None:
        self._files = [folder.with_name(f".{folder.name}-{name}-{os.urandom(4).hex()}") for name in ("out", "err")]
        self._process = get_context("fork").Process(
            target=become_command, args=(arguments, folder, *self._files, prepare)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that other threads exist; the child uses none of them
            self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdout(self) -> str:
        """What it has written to its standard output so far."""
        return self._files[0].read_text() if self._files[0].exists() else ""

    @property
    def stderr(self) -> str:
        """The same for its standard error."""
        return self._files[1].read_text() if self._files[1].exists() else ""

    @property
    def is_running(self) -> bool:
        return self._process.exitcode is None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.is_running:
            os.kill(self.pid, number)

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for its end, and return its exit code; that of a process that a signal has ended is negative."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"it did not end within {seconds} s"
        return self._process.exitcode
