"""What a check is, and the review that its failure reads as: expected, got, where to look, how to mend it."""

from __future__ import annotations

import inspect
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.errors import EnsemblekitError, Problem
from ensemblekit.core.plugin import Plugin
from ensemblekit.core.threads import one_thread
from ensemblekit.spec.sections import Spec


class ContractError(AssertionError):
    """A plugin does not keep its contract; the message is a review of it."""

    def __init__(self, expected: str, got: str, look_at: str, fix: str = "") -> None:
        super().__init__(expected, got, look_at, fix)
        self.expected, self.got, self.look_at, self.fix = expected, got, look_at, fix

    def __str__(self) -> str:
        parts = {"expected": self.expected, "got": self.got, "look at": self.look_at, "fix": self.fix}
        return "\n".join(f"{label}: {text}" for label, text in parts.items() if text)


class NotChecked(ContractError):
    """A check that fails while another fails that it builds on: what it found says nothing new."""

    def __init__(self, first: str) -> None:
        super().__init__(f'"{first}" to hold', "a plugin of which it does not", "")
        self.first = first

    def __str__(self) -> str:
        return f"not checked: {self.advice}"

    @property
    def advice(self) -> str:
        return f'first mend "{self.first}"'


@dataclass(frozen=True)
class CheckResult:
    """What came of one check."""

    name: str
    passed: bool | None
    """None: not checked, because a check that it builds on has failed."""
    message: str
    """The review; empty if it passed."""
    seconds: float


@dataclass(frozen=True)
class Check:
    """One claim about a plugin: call it, and it raises a `ContractError` if the plugin does not keep it."""

    name: str
    plugin: Plugin
    examine: Callable[[], None] = field(repr=False)
    needs: tuple[Check, ...] = field(default=(), repr=False)
    """Checks that it builds on: if one of them fails, a failure of this one is not reported."""

    def __str__(self) -> str:
        return self.name

    def __call__(self) -> None:
        __tracebackhide__ = True  # pytest then shows the review and not how the kit came to it
        try:
            with _undisturbed():
                self.examine()
        except (Exception, SystemExit) as error:
            for check in self.needs:
                if not check.is_kept:
                    raise NotChecked(check.name) from None
            if isinstance(error, ContractError):
                raise error.with_traceback(None) from None
            raise _crashed(error, type(self.plugin)) from error

    def result(self) -> CheckResult:
        """Run the check and say what came of it; never raises."""
        start = time.perf_counter()
        passed: bool | None = True
        message = ""
        try:
            self()
        except NotChecked as error:
            passed, message = None, error.advice
        except ContractError as error:
            passed, message = False, str(error)
        return CheckResult(self.name, passed, message, time.perf_counter() - start)

    @cached_property
    def is_kept(self) -> bool:
        """Whether the plugin keeps it, found out once."""
        return self.result().passed is True


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave torch's generator, its threads and stdout as they were; work this small is fastest in one thread.

    What a plugin prints goes to stderr: stdout is for the results.
    """
    with redirect_stdout(sys.stderr), one_thread(), torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        yield


def look_at(plugin_class: type, member: str = "") -> str:
    """Where a reader finds a hook or method of a plugin, or the plugin itself: `SoftMin.member_loss, softmin.py:23`."""
    function = inspect.getattr_static(plugin_class, member, None) if member else None
    function = getattr(function, "fget", function)  # of a property
    if isinstance(function, FunctionType):
        file, line = function.__code__.co_filename, function.__code__.co_firstlineno
        return f"{plugin_class.__name__}.{member}, {_readable_path(file)}:{line}"
    try:
        file, line = inspect.getsourcefile(plugin_class) or "", inspect.getsourcelines(plugin_class)[1]
    except (OSError, TypeError):  # made without a file, as in an interpreter
        return f"{plugin_class.__module__}.{plugin_class.__qualname__}"
    return f"{plugin_class.__name__}, {_readable_path(file)}:{line}"


def _readable_path(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _crashed(error: BaseException, plugin_class: type) -> ContractError:
    """The review of something that was raised instead of an answer."""
    if not isinstance(error, EnsemblekitError):
        got = f"{type(error).__name__}: {str(error).strip()}"
        return ContractError("an answer", got, innermost(error, plugin_class) or look_at(plugin_class))
    hook = re.search(r'hook "(\w+)"', error.what)
    where = innermost(error, plugin_class) or look_at(plugin_class, hook[1] if hook else "")
    if error.where.startswith("expected "):
        return ContractError(error.where.removeprefix("expected "), error.what, where, error.fix)
    said = "; ".join(part for part in (error.what, error.where) if part)
    return ContractError("an answer", f"{type(error).__name__}: {said}", where, error.fix)


def innermost(error: BaseException, plugin_class: type) -> str:
    """The last line of the plugin's own files that ran; "" if none of them did."""
    files = set()
    for base in plugin_class.__mro__:
        if not base.__module__.startswith(("ensemblekit.", "pydantic", "builtins", "abc")) or base is plugin_class:
            try:
                files.add(inspect.getsourcefile(base))
            except TypeError:  # built in, or made without a file
                continue
    cause: BaseException | None = error
    place = ""
    while cause is not None:
        for frame in traceback.extract_tb(cause.__traceback__):
            if frame.filename in files:
                place = f"{frame.name}(), {_readable_path(frame.filename)}:{frame.lineno}: {frame.line}"
        cause = cause.__cause__
    return place


def form(value: object) -> str:
    """What kind of thing a value is: dtype, shape and device of a tensor, else its type."""
    if not isinstance(value, Tensor):
        return "None" if value is None else f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)} on {value.device}"


@contextmanager
def on_meta_too(device: str | torch.device, plugin_class: type, member: str) -> Iterator[None]:
    """On the meta device what is raised is a fault of its own kind, since the same has worked on the CPU before."""
    try:
        yield
    except Exception as error:
        if torch.device(device).type != "meta" or isinstance(error, ContractError):
            raise
        raise ContractError(
            "an answer on the meta device too, where tensors have a shape and no values: it is tried there because "
            "reading values back makes a GPU wait",
            f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            innermost(error, plugin_class) or look_at(plugin_class, member),
            "use torch's functions alone: no .item(), no if or float() of a tensor, no NumPy; "
            "create tensors on the arguments' device",
        ) from error


def asked_gently(plugin_class: type, member: str, call: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """What a hook answers, if it leaves its arguments as they are."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and not value.is_meta}
    before = {name: (value.clone(), value._version) for name, value in tensors.items()}
    answer = call(**arguments)
    for name, value in tensors.items():
        copy, version = before[name]
        wrong = difference(value, copy, 0.0)  # changes of .data leave the version as it is
        if wrong or value._version != version:
            raise ContractError(
                f"{name} to be after the call what it was before: others are given it too",
                f"{name} changed in place: {wrong or 'to the same values this time'}",
                look_at(plugin_class, member),
                f"work on a copy: {name} - shift rather than {name}.sub_(shift) or {name} -= shift",
            )
    return answer


def problems_of(plugin: Plugin, spec: Spec) -> list[Problem]:
    """What a plugin has against a spec."""
    problems: object = plugin.check_spec(spec)
    if not isinstance(problems, Iterable):
        where = look_at(type(plugin), "check_spec")
        fix = "yield a Problem for each thing that is wrong, or return () if nothing is"
        raise ContractError("problems from check_spec()", form(problems), where, fix)
    return list(problems)


def takes(function: Callable[..., object], *arguments: object) -> bool:
    """Whether a function can be called with these arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


def difference(found: Tensor, expected: Tensor, tolerance: float) -> str:
    """In words how two tensors differ by more than the tolerance (relative to the largest); "" if they do not."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{form(found)} instead of {form(expected)}"
    if not expected.numel() or torch.equal(found, expected):
        return ""
    largest = max(1.0, float(expected.abs().max()))
    if torch.allclose(found, expected, rtol=tolerance, atol=tolerance * largest):
        return ""
    apart = (found.double() - expected.double()).abs().nan_to_num(nan=torch.inf)
    worst = tuple(int(index) for index in torch.unravel_index(apart.argmax(), apart.shape))
    at = f" at {list(worst)}" if worst else ""
    left, right = float(found[worst]), float(expected[worst])
    digits = 6 if f"{left:.6g}" != f"{right:.6g}" else 17
    return f"{left:.{digits}g} instead of {right:.{digits}g}{at}"
