"""The check of what a method remembers: private attributes that change in a run must be part of its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from ensemblekit.core.plugin import Method
from ensemblekit.testing.checks import check
from ensemblekit.testing.method_fixture import MethodFixture
from ensemblekit.testing.method_hooks import HookChecks
from ensemblekit.testing.method_objective import ObjectiveChecks
from ensemblekit.testing.reviews import describe
from ensemblekit.testing.toy_run import toy_registry, train_toy_run

LIFE_CYCLE = ("epoch_started", "epoch_trained", "step_finished", "epoch_finished", "run_finished", "run_started")


class StateChecks(MethodFixture):
    """The checks of a method's state."""

    @check("what it remembers is part of its state", needs=[HookChecks, ObjectiveChecks])
    def remembered_state(self) -> None:
        """Whatever a method keeps between epochs is lost when a run is resumed, unless `state` returns it."""
        for trained in self._trained():
            changed = sorted(_changed(trained, self._fresh()))
            if not changed:
                continue
            if self.plugin_class.state is Method.state:
                raise self.violation(
                    "private attributes that a run does not change, or state() and load_state()",
                    f"another {changed[0]} after a run",
                    (self.implemented(LIFE_CYCLE) or [""])[0],
                    "derive it from epoch, num_epochs and the ensemble; or return it from state(), which is part of "
                    "every checkpoint, and restore it in load_state()",
                )
            self._check_round_trip(trained, changed)

    def _check_round_trip(self, trained: Method, changed: list[str]) -> None:
        state = trained.state()
        for name, value in state.items():
            if not isinstance(value, Tensor | float | int | str | bool | None):
                expected = "tensors, numbers, texts, truth values or None from state()"
                raise self.violation(expected, f"{name} is {describe(value)}", "state")
        restored = self._fresh()
        restored.load_state(state)
        lost = sorted(set(changed) & _changed(trained, restored))
        if lost:
            raise self.violation(
                "the same private attributes after load_state(state()) of another instance",
                f"another {lost[0]}",
                "load_state",
                f"return {lost[0]} from state(), and set it in load_state()",
            )

    def _fresh(self) -> Method:
        return self.plugin_class(**self._parameters()).named(self.plugin.name)

    def _parameters(self) -> dict[str, Any]:
        return {name: getattr(self.plugin, name) for name in self.plugin_class.model_fields}

    def _trained(self) -> list[Method]:
        """The method, and every copy that is made of it, after a short run."""
        instances: list[Method] = []

        def noted(copy: Method) -> Method:
            instances.append(copy)
            return copy

        class Watched(self.plugin_class):  # type: ignore[misc, name-defined]
            def __copy__(self) -> Self:
                return noted(super().__copy__())  # type: ignore[return-value]

            def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
                return noted(super().__deepcopy__(memo))  # type: ignore[return-value]

        Watched.__name__ = self.plugin_class.__name__
        method = Watched(**self._parameters()).named(self.plugin.name)
        train_toy_run(replace(self.spec, methods=(method,)), toy_registry(method))
        return [*instances, method]


def _private(method: Method) -> Mapping[str, Any]:
    return {name: value for name, value in (method.__pydantic_private__ or {}).items() if name != "_name"}


def _changed(first: Method, second: Method) -> set[str]:
    """Return the names of the private attributes that differ."""
    left, right = _private(first), _private(second)
    names = left.keys() | right.keys()
    return {name for name in names if not _is_equal(left.get(name), right.get(name))}


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and torch.equal(first.cpu(), second.cpu())
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_is_equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_is_equal, first, second))
    return type(first) is type(second) and bool(first == second)
