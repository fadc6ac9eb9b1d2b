"""What a check and a contract are: methods marked with `@check`, on a class that holds one plugin.

A contract reads like this::

    class LossContract(PluginContract[Loss]):
        kind = "loss"

        @check("it returns one loss per sample")
        def per_sample(self) -> None:
            ...  # raise self.violation(expected, got, "per_sample", fix)

        @check("its gradients are finite", needs=[per_sample])
        def gradients(self) -> None:
            ...
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import ClassVar, Generic, TypeAlias, TypeVar

import torch

from ensemblekit.core.plugin import Plugin
from ensemblekit.core.threads import one_thread
from ensemblekit.testing.reviews import ContractError, Skipped, location, review_of

P = TypeVar("P", bound=Plugin)
Body = TypeVar("Body", bound=Callable[..., None])
Reference: TypeAlias = "Callable[..., None] | type"
"""A method marked with `@check` or `@requirement`, or a class that stands for all checks that it defines itself."""


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    passed: bool | None
    """None: skipped, because a check that it needs has failed."""
    message: str
    """The review of the plugin; empty if the check passed."""
    seconds: float


@dataclass(frozen=True)
class Check:
    """One claim about one plugin. Call it: it raises a `ContractError` if the claim does not hold."""

    name: str
    plugin: Plugin
    body: Callable[[], None] = field(repr=False)
    needs: tuple[Check, ...] = field(default=(), repr=False)
    """If one of these checks fails, a failure of this one says nothing new and counts as skipped."""

    def __str__(self) -> str:
        return self.name

    def __call__(self) -> None:
        """Run the check.

        Raises:
            ContractError: if the plugin breaks its contract; the message is a review.
            Skipped: if a check that this one needs has failed. It is a `ContractError` too.
        """
        __tracebackhide__ = True  # pytest then shows the review and not the code of the kit
        try:
            with _isolated():
                self.body()
        except (Exception, SystemExit) as error:
            # Asked only now: a check that passes does not depend on the others, and running them takes time.
            for needed in self.needs:
                if not needed.passed:
                    raise Skipped(needed.name) from None
            if isinstance(error, ContractError):
                raise error.with_traceback(None) from None
            raise review_of(error, type(self.plugin)) from error

    def result(self) -> CheckResult:
        """Run the check without raising.

        Returns:
            Whether the check passed, failed or was skipped, its review, and the seconds that it took.
        """
        start = time.perf_counter()
        passed: bool | None = True
        message = ""
        try:
            self()
        except Skipped as error:
            passed, message = None, error.advice
        except ContractError as error:
            passed, message = False, str(error)
        return CheckResult(self.name, passed, message, time.perf_counter() - start)

    @cached_property
    def passed(self) -> bool:
        """Whether the plugin passes this check, which is run once."""
        return self.result().passed is True


@contextmanager
def _isolated() -> Iterator[None]:
    """Restore torch's random state and threads afterwards, and send to stderr whatever the plugin prints.

    Stdout is for results. Tensors this small are fastest in one thread.
    """
    with redirect_stdout(sys.stderr), one_thread(), torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        yield


@dataclass(frozen=True)
class _Mark:
    """What `@check` and `@requirement` note on a method."""

    name: str
    needs: Sequence[Reference] = ()
    for_each: Sequence[str] = ()
    listed: bool = True


def check(name: str, *, needs: Sequence[Reference] = (), for_each: Sequence[str] = ()) -> Callable[[Body], Body]:
    """Mark a method of a contract as a check.

    Args:
        name: The claim, as users read it in tables and in pytest. With `for_each` it contains `{}` for the value.
        needs: Checks on which this one builds. If one of them fails, a failure of this one counts as skipped.
        for_each: Make one check for each of these values, which the method takes as its argument.

    Returns:
        A decorator that leaves the method callable as before.
    """
    return _marked(_Mark(name, needs, for_each))


def requirement(of: Callable[..., None]) -> Callable[[Body], Body]:
    """Mark a method as the part of a check that other checks need; it is not listed as a check itself.

    Args:
        of: The whole check, whose name users read if this part fails.

    Returns:
        A decorator that leaves the method callable as before.
    """
    return _marked(_Mark(_mark(of).name, _mark(of).needs, listed=False))


def _marked(mark: _Mark) -> Callable[[Body], Body]:
    def decorate(body: Body) -> Body:
        vars(body)["_mark"] = mark
        return body

    return decorate


def _mark(body: Callable[..., None]) -> _Mark:
    mark: _Mark = vars(body)["_mark"]
    return mark


class Contract(Generic[P]):
    """The checks of one plugin; subclasses define them as methods marked with `@check`."""

    kind: ClassVar[str]
    """The kind of plugin that a subclass is for."""

    def __init__(self, plugin: P) -> None:
        self.plugin = plugin
        self.plugin_class = type(plugin)
        self._checks: dict[str, list[Check]] = {}

    def checks(self) -> list[Check]:
        """All checks of the plugin: those of base classes first, then in the order of their definition."""
        return self.select(*_bases_first(type(self)))

    def select(self, *references: Reference) -> list[Check]:
        """The checks that marked methods, or classes with marked methods, stand for."""
        checks: list[Check] = []
        for reference in references:
            bodies = _listed(reference) if isinstance(reference, type) else [reference]
            checks += [check for body in bodies for check in self._checks_of(body)]
        return checks

    def violation(self, expected: str, got: str, member: str = "", fix: str = "") -> ContractError:
        """The error for a plugin that breaks its contract.

        Args:
            expected: What the contract asks for.
            got: What the plugin does instead.
            member: The plugin's method or property to look at; the class itself if empty.
            fix: What to do about it; left out of the review if empty.
        """
        return ContractError(expected, got, location(self.plugin_class, member), fix)

    def _checks_of(self, body: Callable[..., None]) -> list[Check]:
        """The checks of one marked method, made once so that what they have found is shared by those that need them."""
        key = body.__name__
        if key not in self._checks:
            mark = _mark(body)
            needs = tuple(self.select(*mark.needs))
            bound = partial(body, self)
            self._checks[key] = [
                Check(mark.name.format(value), self.plugin, partial(bound, value), needs) for value in mark.for_each
            ] or [Check(mark.name, self.plugin, bound, needs)]
        return self._checks[key]


def _bases_first(contract_class: type) -> list[type]:
    """A class and all its bases, each after its own bases and in the order of the class statement."""
    classes: list[type] = []
    for base in contract_class.__bases__:
        classes += [other for other in _bases_first(base) if other not in classes]
    return [*classes, contract_class]


def _listed(contract_class: type) -> list[Callable[..., None]]:
    """The checks that a class defines itself."""
    return [
        value
        for value in vars(contract_class).values()
        if "_mark" in getattr(value, "__dict__", ()) and _mark(value).listed
    ]
