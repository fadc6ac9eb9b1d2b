"""The review that a failed check reads as: what was expected, what the plugin did, where to look, how to fix it."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.errors import EnsemblekitError, Problem
from ensemblekit.core.plugin import Plugin
from ensemblekit.core.tensors import describe_tensor
from ensemblekit.spec.sections import Spec


class ContractError(AssertionError):
    """A plugin breaks its contract; the message is a review of it."""

    def __init__(self, expected: str, got: str, location: str, fix: str = "") -> None:
        super().__init__(expected, got, location, fix)
        self.expected, self.got, self.location, self.fix = expected, got, location, fix

    def __str__(self) -> str:
        parts = {"expected": self.expected, "got": self.got, "look at": self.location, "fix": self.fix}
        return "\n".join(f"{label}: {text}" for label, text in parts.items() if text)


class Skipped(ContractError):
    """A check failed, and so did one that it needs: its own failure says nothing new."""

    def __init__(self, needed: str) -> None:
        super().__init__(f'"{needed}" to pass', "a failure", "", f'fix "{needed}" first')
        self.needed = needed

    def __str__(self) -> str:
        return f"skipped: {self.advice}"

    @property
    def advice(self) -> str:
        return self.fix


def review_of(error: BaseException, plugin_class: type) -> ContractError:
    """The review of an exception that was raised instead of a result."""
    if not isinstance(error, EnsemblekitError):
        got = f"{type(error).__name__}: {str(error).strip()}"
        return ContractError("no exception", got, last_plugin_line(error, plugin_class) or location(plugin_class))
    where = last_plugin_line(error, plugin_class) or location(plugin_class, error.hook or "")
    if error.expected is not None:
        return ContractError(error.expected, error.what, where, error.fix)
    message = error.problem
    return ContractError("no exception", f"{type(error).__name__}: {message}", where, error.fix)


def location(plugin_class: type, member: str = "") -> str:
    """Where a method or property of a plugin is defined, or the class itself: `SoftMin.member_loss, softmin.py:23`."""
    function = inspect.getattr_static(plugin_class, member, None) if member else None
    function = getattr(function, "fget", function)  # the getter of a property
    if isinstance(function, FunctionType):
        file, line = function.__code__.co_filename, function.__code__.co_firstlineno
        return f"{plugin_class.__name__}.{member}, {_relative_path(file)}:{line}"
    try:
        file, line = inspect.getsourcefile(plugin_class) or "", inspect.getsourcelines(plugin_class)[1]
    except (OSError, TypeError):  # defined without a file, as in an interpreter
        return f"{plugin_class.__module__}.{plugin_class.__qualname__}"
    return f"{plugin_class.__name__}, {_relative_path(file)}:{line}"


def last_plugin_line(error: BaseException, plugin_class: type) -> str:
    """The last line of the plugin's own source files in the traceback of an error; "" if there is none."""
    files = set()
    for base in plugin_class.__mro__:
        if not base.__module__.startswith(("ensemblekit.", "pydantic", "builtins", "abc")) or base is plugin_class:
            try:
                files.add(inspect.getsourcefile(base))
            except TypeError:  # built in, or defined without a file
                continue
    cause: BaseException | None = error
    line = ""
    while cause is not None:
        for frame in traceback.extract_tb(cause.__traceback__):
            if frame.filename in files:
                line = f"{frame.name}(), {_relative_path(frame.filename)}:{frame.lineno}: {frame.line}"
        cause = cause.__cause__
    return line


def _relative_path(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def describe(value: object) -> str:
    """Dtype, shape and device of a tensor; the type of anything else."""
    if not isinstance(value, Tensor):
        return "None" if value is None else f"a {type(value).__name__}"
    return describe_tensor(value, with_device=True)


def mismatch(actual: Tensor, expected: Tensor, tolerance: float) -> str:
    """Describe the largest difference of two tensors.

    Args:
        actual: The tensor to judge.
        expected: The correct tensor.
        tolerance: The difference that is allowed, relative to the largest absolute value; 0 for bit-identical.

    Returns:
        The two values and their index, or different shapes or dtypes; "" if the tensors agree.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{describe(actual)} instead of {describe(expected)}"
    if not expected.numel() or torch.equal(actual, expected):
        return ""
    largest = max(1.0, float(expected.abs().max()))
    if torch.allclose(actual, expected, rtol=tolerance, atol=tolerance * largest):
        return ""
    distance = (actual.double() - expected.double()).abs().nan_to_num(nan=torch.inf)
    worst = tuple(int(index) for index in torch.unravel_index(distance.argmax(), distance.shape))
    at = f" at {list(worst)}" if worst else ""
    left, right = float(actual[worst]), float(expected[worst])
    digits = 6 if f"{left:.6g}" != f"{right:.6g}" else 17
    return f"{left:.{digits}g} instead of {right:.{digits}g}{at}"


@contextmanager
def works_on_meta(device: str | torch.device, plugin_class: type, member: str) -> Iterator[None]:
    """Explain an exception on the meta device, which is its cause: the same code has worked on the CPU before."""
    try:
        yield
    except Exception as error:
        if torch.device(device).type != "meta" or isinstance(error, ContractError):
            raise
        raise ContractError(
            "a result on the meta device too, where tensors have a shape but no values (code that runs there never "
            "makes a GPU wait by reading a value back)",
            first_line(error),
            last_plugin_line(error, plugin_class) or location(plugin_class, member),
            "use only functions of torch: no .item(), no if or float() of a tensor, no NumPy; "
            "create tensors on the device of the arguments",
        ) from error


def call_unmodified(plugin_class: type, member: str, call: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a hook and return its result, or raise a `ContractError` if it has modified an argument in place."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and not value.is_meta}
    before = {name: (value.clone(), value._version) for name, value in tensors.items()}
    result = call(**arguments)
    for name, value in tensors.items():
        copy, version = before[name]
        wrong = mismatch(value, copy, 0.0)  # changes through .data do not count as a new version
        if wrong or value._version != version:
            raise ContractError(
                f"an unmodified argument {name}: other hooks get the same tensor",
                f"{name} changed in place: {wrong or 'to the same values this time'}",
                location(plugin_class, member),
                f"work on a copy: write {name} - shift instead of {name}.sub_(shift) or {name} -= shift",
            )
    return result


def spec_problems(plugin: Plugin, spec: Spec) -> list[Problem]:
    """The problems that a plugin reports for a spec and, if it is known, for the form of its data."""
    results: dict[str, object] = {"check_spec": plugin.check_spec(spec)}
    if spec.data.info is not None:
        results["check_data"] = plugin.check_data(spec, spec.data.info)
    found: list[Problem] = []
    for check, problems in results.items():
        if not isinstance(problems, Iterable):
            fix = "yield a Problem for each mistake; return () if there is none"
            expected = f"an iterable of Problem from {check}()"
            raise ContractError(expected, describe(problems), location(type(plugin), check), fix)
        found += problems
    return found


def accepts(function: Callable[..., object], *arguments: object) -> bool:
    """Whether a function can be called with these positional arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True
