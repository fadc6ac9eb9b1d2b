"""Every error that a user or a plugin author can fix: what went wrong, where, and how to fix it.

In Python an error reads as a sentence, its location and a hint, each on a line of its own; the command line prints
`EnsemblekitError.line`. Code decides by an error's class and attributes, never by its text.
"""

from __future__ import annotations

import difflib
import errno
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Literal

from ensemblekit.core.kinds import KINDS

MAX_DETAILS = 20
DEBUG_HINT = "ensemblekit --debug … shows the traceback"
IMPORT_GIB = 4
"""Address space that is enough to import torch, in GiB; its libraries with those for CUDA take 3.2."""
# "static TLS block" is about the order of libraries, not about memory
_OUT_OF_MEMORY = re.compile(
    r"can.?t allocate memory|cannot allocate memory(?! in static TLS)|failed to map segment|bad_alloc"
    r"|can.?t start new thread",
    re.IGNORECASE,
)


class EnsemblekitError(Exception):
    """Base of all errors that are a user's or a plugin author's to fix.

    Args:
        what: what is wrong, without a full stop.
        where: the file, key, plugin or argument that is to blame.
        fix: what to do about it.
        plugin: name of the plugin that is to blame, if one is.
        hook: name of the hook that returned a wrong value, if one did.
        expected: what should have been there instead, if that can be said in a few words.
        path: file or directory that is to blame, if one is.
        details: everything that is wrong, one line each, if it is more than one thing; shown in front of the error.
        python_fix: what to do about it in Python, if that differs from the command line.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        where: str = "",
        fix: str = "",
        *,
        plugin: str | None = None,
        hook: str | None = None,
        expected: str | None = None,
        path: str | None = None,
        details: Sequence[str] = (),
        python_fix: str = "",
    ) -> None:
        super().__init__(what, where, fix)
        self.details = tuple(details)
        self.what, self.where, self.fix = what, where, fix
        self.python_fix = python_fix or fix
        self.plugin, self.hook, self.expected, self.path = plugin, hook, expected, path

    @property
    def problem(self) -> str:
        """What is wrong and where, on one line."""
        expected = f"expected {self.expected}" if self.expected else ""
        return "; ".join(part for part in (self.what, self.where, expected) if part)

    @property
    def line(self) -> str:
        """All of it on one line, as the command line prints it: `what; where; fix`."""
        return f"{self.problem}; {self.fix}" if self.fix else self.problem

    @property
    def first_details(self) -> list[str]:
        """The first of the details, with the number of those that are left out."""
        rest = len(self.details) - MAX_DETAILS
        return [*self.details[:MAX_DETAILS], *([f"… and {rest} more"] if rest > 0 else [])]

    def __str__(self) -> str:
        lines = [self.what if self.what.endswith((".", "?", "!")) else f"{self.what}."]
        lines += [f"  {detail}" for detail in self.first_details]
        if self.where:
            lines.append(f"  at {self.where}")
        if self.expected:
            lines.append(f"  expected {self.expected}")
        if self.python_fix:
            lines.append(f"  hint: {self.python_fix}")
        return "\n".join(lines)


class UsageError(EnsemblekitError):
    """A command or a Python call got something that it cannot use."""

    exit_code = 2


class DataError(EnsemblekitError):
    """Data or targets are missing, or have another form than expected."""

    exit_code = 3


class PluginError(EnsemblekitError):
    """A plugin is missing, broken, clashes with another one or violates the contract of a hook."""

    exit_code = 4


class RunError(EnsemblekitError):
    """A run directory or a checkpoint cannot be used, or is in use by another process."""

    exit_code = 5


class NumericError(EnsemblekitError):
    """A number is nan or infinite where it has to be finite."""

    exit_code = 6


class ResourceError(EnsemblekitError):
    """The machine ran out of disk or memory, or a helper process died."""

    exit_code = 7


class RanksDifferError(ResourceError):
    """Processes that should train together do not fit together; all of them raise it."""


class PeerError(ResourceError):
    """Another process of the same training has failed or is lost, so that this one ends, too.

    Args:
        is_silent: whether another process of this machine tells the user.
    """

    def __init__(
        self,
        what: str,
        where: str = "",
        fix: str = "",
        exit_code: int = ResourceError.exit_code,
        is_silent: bool = False,
    ) -> None:
        super().__init__(what, where, fix)
        self.exit_code, self.is_silent = exit_code, is_silent


class Interrupted(EnsemblekitError):
    """Stopped by Ctrl-C (130), SIGTERM (143) or SIGHUP (129); what was trained can be resumed."""

    exit_code = 130

    def __init__(self, what: str, where: str = "", fix: str = "", exit_code: int = exit_code) -> None:
        super().__init__(what, where, fix)
        self.exit_code = exit_code


_OF_THE_SYSTEM: dict[int | None, tuple[type[EnsemblekitError], str]] = {
    errno.ENAMETOOLONG: (UsageError, "give a shorter name"),
    errno.ENOSPC: (ResourceError, "make room on this disk"),
    errno.EDQUOT: (ResourceError, "make room on this disk"),
    errno.EMFILE: (ResourceError, "raise the limit of open files (ulimit -n)"),
    errno.ENFILE: (ResourceError, "close other programs"),
}
"""Failures of the operating system that have one cause wherever they happen, each with its error and its fix."""

ProblemCode = Literal["invalid", "unknown_key", "unknown_plugin", "broken_plugin"]


@dataclass(frozen=True)
class Problem:
    """One mistake in a spec: the dotted path of the key, what is wrong with it and how to fix it."""

    path: str
    what: str
    fix: str = ""
    code: ProblemCode = "invalid"
    source: str = ""
    """The overrides that cause it, such as `--set training.epochs=0`; empty if the spec itself does."""

    @property
    def exit_code(self) -> int:
        """The exit code of a spec in which this is the only problem."""
        return PluginError.exit_code if self.code == "broken_plugin" else UsageError.exit_code

    def under(self, prefix: str) -> Problem:
        """The same problem with a path that is relative to `prefix`."""
        return replace(self, path=".".join(part for part in (prefix, self.path) if part))

    @property
    def key_and_what(self) -> str:
        """The key and what is wrong with it."""
        return f"{self.path}: {self.what}" if self.path else self.what

    def __str__(self) -> str:
        return "; ".join(part for part in (self.key_and_what, self.source, self.fix) if part)


class SpecError(EnsemblekitError):
    """A spec is invalid; `problems` lists everything that is wrong with it."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], source: str) -> None:
        self.problems = tuple(problems)
        self.source = source
        if len(self.problems) == 1:
            (problem,) = self.problems
            super().__init__(problem.key_and_what, problem.source or source, problem.fix)
        else:
            what = f"{len(self.problems)} problems in the spec"
            super().__init__(what, "; ".join(self._locations()), "each is listed above")
        # A spec that fails only because an installed plugin is broken is the plugin's fault, not the spec's.
        self.exit_code = min(problem.exit_code for problem in self.problems)

    def _locations(self) -> Iterator[str]:
        """Yield the spec with the paths of its own problems, and the overrides that cause others."""
        own = [problem.path for problem in self.problems if not problem.source]
        if own:
            paths = ", ".join(dict.fromkeys(path for path in own if path))
            yield f"{self.source}: {paths}" if paths else self.source
        yield from dict.fromkeys(problem.source for problem in self.problems if problem.source)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return super().__str__()
        return "\n  ".join([f"{self.what} {self.source}:", *(str(problem) for problem in self.problems)])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the nearest of the known names as a question, or the empty string if none is near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f'did you mean "{near[0]}"?' if near else ""


def choices(name: str, known: Iterable[str]) -> str:
    """Return the nearest known name, if there is one, and all allowed names."""
    known = sorted(known)
    listed = "allowed: " + ", ".join(known) if known else "no name is allowed here"
    return f"{near} {listed}" if (near := did_you_mean(name, known)) else listed


def one_line(text: str) -> str:
    """Join the lines of a message."""
    return " ".join(text.split())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch and the loader of libraries report that as plain errors, by their text."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError | ImportError | OSError) and bool(_OUT_OF_MEMORY.search(str(error)))


def explain(error: BaseException) -> EnsemblekitError:
    """Turn an unexpected exception into an error that says whose it is: the machine's, a plugin's or a bug of ours."""
    if is_out_of_memory(error):
        return _memory_error(error)
    if isinstance(error, OSError) and error.errno in _OF_THE_SYSTEM:
        kind, fix = _OF_THE_SYSTEM[error.errno]
        return kind(str(error.strerror), _shortened(str(error.filename or "")), fix)
    what = f"{type(error).__name__}: {one_line(str(error))}".removesuffix(": ")
    frames = list(traceback.walk_tb(error.__traceback__))  # the innermost is last
    packages = _third_party_plugin_packages()
    if in_plugins := [(frame, line) for frame, line in frames if _top_module(frame) in packages]:
        fix = f"fix the plugin (ensemblekit check tests it, {DEBUG_HINT})"
        return PluginError(f"a plugin failed with {what}", _location(*in_plugins[-1]), fix)
    where = _location(*frames[-1]) if frames else ""
    return EnsemblekitError(what, where, f"{DEBUG_HINT}; if data and model are right, please report it")


def _memory_error(error: BaseException) -> ResourceError:
    limit = address_space()
    raise_limit = f"raise the limit of {limit / 2**30:.1f} GiB (ulimit -v)" if limit is not None else ""
    if isinstance(error, ImportError | OSError):
        needed = f"importing torch takes {IMPORT_GIB} GiB of address space"
        fix = f"{needed}: {raise_limit or 'free some memory'}"
        return ResourceError("out of memory while a library was loaded", one_line(str(error)), fix)
    fix = "lower training.batch_size, ensemble.members or the model's size, or set engine.recompute = true"
    fix = f"{fix}, or {raise_limit}" if raise_limit else fix
    return ResourceError("out of memory", one_line(str(error)), fix)


def address_space() -> int | None:
    """Return the limit of this process's address space in bytes; None if there is none."""
    try:
        import resource
    except ImportError:  # not on this system
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _shortened(name: str, length: int = 100) -> str:
    return name if len(name) <= length else f"{name[:length]}…"


def _location(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_name}() in {frame.f_code.co_filename}, line {line}"


def _top_module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _third_party_plugin_packages() -> set[str]:
    """Top-level modules of the plugin classes that are loaded, without those of this project."""
    plugin_module = sys.modules.get("ensemblekit.core.plugin")
    classes = [plugin_module.Plugin] if plugin_module is not None else []
    for plugin_class in classes:
        classes += plugin_class.__subclasses__()
    built_in = {"ensemblekit", *(f"ensemblekit_{kind.plural}" for kind in KINDS.values())}
    return {plugin_class.__module__.partition(".")[0] for plugin_class in classes} - built_in
