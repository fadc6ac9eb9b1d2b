"""Every error a user can cause: what went wrong, where, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


class EnsemblekitError(Exception):
    """Base of all errors that are a user's or a plugin's to fix; the command line catches only these."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        where: str = "",
        fix: str = "",
        *,
        hook: str | None = None,
        plugin: str | None = None,
        expected: str | None = None,
        path: str | None = None,
    ) -> None:
        super().__init__(what, where, fix)
        self.what, self.where, self.fix = what, where, fix
        self.hook, self.plugin, self.expected, self.path = hook, plugin, expected, path

    def __str__(self) -> str:
        return "; ".join(part for part in (self.what, self.where, self.fix) if part)


class UsageError(EnsemblekitError):
    """A command or a Python call was given something it cannot use."""

    exit_code = 2


class DataError(EnsemblekitError):
    """Data or targets are missing or do not have the form that was asked for."""

    exit_code = 3


class PluginError(EnsemblekitError):
    """A plugin is missing, broken, clashes with another or breaks the contract of a hook."""

    exit_code = 4


class RunError(EnsemblekitError):
    """A run directory or a checkpoint cannot be used, or is used by another process."""

    exit_code = 5


class NumericError(EnsemblekitError):
    """A number that should be finite is not."""

    exit_code = 6


class Interrupted(EnsemblekitError):
    """Training was stopped by Ctrl-C (130) or by a SIGTERM (143), after it had saved what it had."""

    exit_code = 130

    def __init__(self, what: str, where: str = "", fix: str = "", exit_code: int = exit_code) -> None:
        super().__init__(what, where, fix)
        self.exit_code = exit_code


class ResourceError(EnsemblekitError):
    """The machine has run out of something: disk, memory, or a process that was counted on."""

    exit_code = 7


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a spec: the dotted path of the key, what is wrong, how to mend it."""

    path: str
    what: str
    fix: str = ""
    exit_code: int = UsageError.exit_code

    def under(self, prefix: str) -> Problem:
        """The same problem, its path taken as relative to `prefix`."""
        return replace(self, path=".".join(part for part in (prefix, self.path) if part))

    def __str__(self) -> str:
        what = f"{self.path}: {self.what}" if self.path else self.what
        return f"{what}; {self.fix}" if self.fix else what


class SpecError(EnsemblekitError):
    """A spec is wrong; `problems` has all that is wrong with it."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], source: str) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            only = self.problems[0]
            what = f"{only.path}: {only.what}" if only.path else only.what
            super().__init__(what, f"in {source}", only.fix)
        else:
            paths = ", ".join(dict.fromkeys(problem.path for problem in self.problems if problem.path))
            super().__init__(f"{len(self.problems)} problems", f"in {source}: {paths}", "each is listed above")
        # A spec that only fails because an installed plugin is broken is the plugin's fault, not the spec's.
        self.exit_code = min(problem.exit_code for problem in self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return super().__str__()
        lines = [f"{len(self.problems)} problems {self.where.partition(':')[0]}"]
        return "\n  ".join(lines + [str(problem) for problem in self.problems])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest of the known names as a question, or the empty string if none is near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f'did you mean "{near[0]}"?' if near else ""


def choices(name: str, known: Iterable[str]) -> str:
    """The nearest known name if there is one, and in any case all that would be right."""
    known = sorted(known)
    listed = "allowed: " + ", ".join(known) if known else "nothing is allowed here"
    return f"{near} {listed}" if (near := did_you_mean(name, known)) else listed
