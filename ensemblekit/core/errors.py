"""Every error that a user or a plugin author can fix: what went wrong, where, and how to fix it.

In Python an error reads as a sentence, its location and a hint, each on a line of its own; the command line prints
`EnsemblekitError.line`. Code decides by an error's class and attributes, never by its text.
"""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Literal

from ensemblekit.core.kinds import KINDS

DEBUG_HINT = "ensemblekit --debug … shows the traceback"


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
    ) -> None:
        super().__init__(what, where, fix)
        self.what, self.where, self.fix = what, where, fix
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

    def __str__(self) -> str:
        lines = [self.what if self.what.endswith((".", "?", "!")) else f"{self.what}."]
        if self.where:
            lines.append(f"  at {self.where}")
        if self.expected:
            lines.append(f"  expected {self.expected}")
        if self.fix:
            lines.append(f"  hint: {self.fix}")
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


class Interrupted(EnsemblekitError):
    """Stopped by Ctrl-C (130), SIGTERM (143) or SIGHUP (129); what was trained can be resumed."""

    exit_code = 130

    def __init__(self, what: str, where: str = "", fix: str = "", exit_code: int = exit_code) -> None:
        super().__init__(what, where, fix)
        self.exit_code = exit_code


ProblemCode = Literal["invalid", "unknown_plugin", "broken_plugin"]


@dataclass(frozen=True)
class Problem:
    """One mistake in a spec: the dotted path of the key, what is wrong with it and how to fix it."""

    path: str
    what: str
    fix: str = ""
    code: ProblemCode = "invalid"

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
        return f"{self.key_and_what}; {self.fix}" if self.fix else self.key_and_what


class SpecError(EnsemblekitError):
    """A spec is invalid; `problems` lists everything that is wrong with it."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], source: str) -> None:
        self.problems = tuple(problems)
        self.source = source
        if len(self.problems) == 1:
            super().__init__(self.problems[0].key_and_what, source, self.problems[0].fix)
        else:
            paths = ", ".join(dict.fromkeys(problem.path for problem in self.problems if problem.path))
            where = f"{source}: {paths}" if paths else source
            super().__init__(f"{len(self.problems)} problems in the spec", where, "each is listed above")
        # A spec that fails only because an installed plugin is broken is the plugin's fault, not the spec's.
        self.exit_code = min(problem.exit_code for problem in self.problems)

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
    """Whether memory ran out; on a CPU torch reports that as a plain RuntimeError."""
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return True
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def explain(error: BaseException) -> EnsemblekitError:
    """Turn an unexpected exception into an error that says whose it is: the memory's, a plugin's or a bug of ours."""
    if is_out_of_memory(error):
        fix = "lower training.batch_size, ensemble.members or the model's size, or set engine.recompute = true"
        return ResourceError("out of memory", one_line(str(error)), fix)
    what = f"{type(error).__name__}: {one_line(str(error))}".removesuffix(": ")
    frames = list(traceback.walk_tb(error.__traceback__))  # the innermost is last
    packages = _third_party_plugin_packages()
    if in_plugins := [(frame, line) for frame, line in frames if _top_module(frame) in packages]:
        fix = f"fix the plugin (ensemblekit check tests it, {DEBUG_HINT})"
        return PluginError(f"a plugin failed with {what}", _location(*in_plugins[-1]), fix)
    where = _location(*frames[-1]) if frames else ""
    return EnsemblekitError(what, where, f"{DEBUG_HINT}; if data and model are right, please report it")


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
