"""What the checks of a method share: a spec that it accepts, outputs and targets, and calls of its hooks."""

from __future__ import annotations

import ast
import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from textwrap import dedent
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.dataset import DataInfo
from ensemblekit.core.losses import MSE, CrossEntropy, GaussianHinge, Loss
from ensemblekit.core.objective import Objective
from ensemblekit.core.plugin import Method
from ensemblekit.core.registry import Registry
from ensemblekit.core.seeds import generator
from ensemblekit.core.verification import implemented_hooks
from ensemblekit.members.layout import run_objective
from ensemblekit.spec.groups import Group
from ensemblekit.spec.sections import EnsembleSection, Spec
from ensemblekit.testing.common import PluginContract
from ensemblekit.testing.hook_lists import OBJECTIVE_HOOKS
from ensemblekit.testing.reviews import spec_problems
from ensemblekit.testing.toy_run import NUM_TRAIN, ToyNetwork, losses_beside, toy_registry, toy_spec

BATCH = 4
MEMBERS = (3, 2, 4)
"""Tried in turn: a method may need an even number of members, or few of them."""
MIN_EPOCHS, MAX_EPOCHS = 2, 512
TASKS: tuple[tuple[Loss, dict[str, Any]], ...] = (
    (CrossEntropy(), {}),
    (MSE(), {}),
    (MSE(), {"data.regression": True}),
    (CrossEntropy(), {"data.num_classes": 2}),
    (GaussianHinge(), {"data.num_classes": 2}),
    (MSE(), {"data.regression": True, "data.num_values": 1}),
)
"""Tried in turn: a loss, and changes of the data. A method may support only one of them."""


class MethodFixture(PluginContract[Method]):
    """A method, and everything that is needed to call its hooks and to train with it."""

    kind = "method"

    @cached_property
    def registry(self) -> Registry:
        return toy_registry(self.plugin)

    @property
    def members(self) -> int:
        """A number of members that the method accepts."""
        return self.spec.ensemble.members

    @cached_property
    def spec(self) -> Spec:
        """The shortest toy run that the method accepts."""
        required = self.plugin.required_members()
        sizes = MEMBERS if required is None else (required,)
        for members, task in product(sizes, self._tasks):
            accepted = partial(self._accepts_run, members=members, task=task)
            if accepted(MAX_EPOCHS):
                # a method may need a minimum number of epochs, for example one per cycle
                epochs = 1 + bisect_left(range(1, MAX_EPOCHS + 1), True, key=accepted)
                return self._spec(max(epochs, MIN_EPOCHS), members, *task)
        tried = ", ".join(map(str, sizes))
        problems = [spec_problems(self.plugin, self._spec(MAX_EPOCHS, members, *TASKS[0])) for members in sizes]
        why = ", as required_members() says" if required else ""
        raise self.violation(
            f"check_spec() to accept a run of {MAX_EPOCHS} epochs, for classification or regression",
            "; ".join(dict.fromkeys(str(problem) for found in problems for problem in found)),
            "check_spec",
            f"reject only what cannot work (tried: {tried} members{why}, with cross-entropy and the squared error); "
            "if the parameters imply a number of members, return it from required_members()",
        )

    @property
    def _tasks(self) -> list[tuple[Loss, dict[str, Any]]]:
        """Tasks to try in turn; only those with losses beside the method if it needs the parts of their outputs."""
        own = [(loss, {"data.regression": loss.takes == "values"}) for loss in losses_beside(self.plugin_class)]
        info, required = DataInfo("regression", (1,), 1), set(self.plugin.required_outputs())
        declaring = [task for task in own if required & task[0].slices(task[0].num_outputs(info)).keys()]
        return declaring or [*TASKS, *own]

    @property
    def info(self) -> DataInfo:
        """Task and shapes of the data of the toy run."""
        assert self.spec.data.info is not None
        return self.spec.data.info

    def accepts_members(self, members: int) -> bool:
        """Whether the method accepts this number of members in its toy run."""
        return not spec_problems(self.plugin, replace(self.spec, ensemble=EnsembleSection(members=members)))

    def _accepts_run(self, epochs: int, members: int, task: tuple[Loss, dict[str, Any]]) -> bool:
        return not spec_problems(self.plugin, self._spec(epochs, members, *task))

    def _spec(self, epochs: int, members: int, loss: Loss, data: dict[str, Any]) -> Spec:
        changes = {
            "training.epochs": epochs,
            "training.evaluate_every": epochs,
            "training.loss": loss.name,
            **data,
            "ensemble.members": members,
            # Monte-Carlo passes need a stochastic network
            "model.dropout": 0.5 if self.implemented(["passes"]) else 0.0,
        }
        return self._with_groups(replace(toy_spec(self.registry, changes), methods=(self.plugin,), loss=loss))

    def _with_groups(self, spec: Spec) -> Spec:
        """The spec with the auxiliary groups and the named outputs that the method needs."""
        assert spec.data.info is not None
        num_outputs = spec.loss.num_outputs(spec.data.info)
        members = spec.ensemble.members
        sizes = {"members": members, "outputs": num_outputs, "ensemble": members * num_outputs}
        groups = [
            Group(1, ToyNetwork(), name, "auxiliary", sizes[size])
            for name, size in self.plugin.required_groups().items()
        ]
        extras = [name for name in self.plugin.required_outputs() if name not in spec.loss.slices(num_outputs)]
        return replace(spec, groups=tuple(groups), model=spec.model.model_copy(update={"extras": tuple(extras)}))

    @cached_property
    def objective(self) -> Objective:
        """The objective of the method alone."""
        return self.objective_of(self.members)

    def objective_of(self, members: int) -> Objective:
        """The objective of the method for another number of members, of which auxiliary networks may know."""
        spec = self._with_groups(replace(self.spec, ensemble=EnsembleSection(members=members)))
        return run_objective(spec, self.info, [self.plugin])

    def implemented(self, hooks: Iterable[str] = OBJECTIVE_HOOKS) -> list[str]:
        """Those of the named hooks that the method implements."""
        return [hook for hook in hooks if hook in self.hooks]

    @cached_property
    def hooks(self) -> dict[str, Callable[..., Any]]:
        """The hooks that the method implements."""
        return implemented_hooks(self.plugin_class)

    def outputs(self, members: int | None = None) -> Tensor:
        """Random outputs of all networks (R, B, W), float64: of the members (M, B, C) if nothing else is needed."""
        layout = self.objective_of(members or self.members).layout
        assert layout is not None
        shape = ((members or self.members) + layout.num_auxiliary, BATCH, layout.width)
        return torch.randn(shape, generator=generator(0, "contract", "outputs"), dtype=torch.float64)

    def target(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Targets of B samples for the task of the spec; real values have this dtype."""
        return self.targets(BATCH, dtype)

    def targets(self, num_samples: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Targets of some samples for the task of the spec; real values have this dtype."""
        random = generator(0, "contract", "target")
        if self.info.task == "regression":
            return torch.randn(num_samples, self.info.num_outputs, generator=random, dtype=torch.float64).to(dtype)
        return torch.randint(self.info.num_outputs, (num_samples,), generator=random)

    def arguments(self, hook: str, outputs: Tensor, target: Tensor) -> dict[str, Any]:
        """The arguments of a hook of the objective in training, where no combiner is fitted yet."""
        return self.objective.arguments(outputs, target) | {"fitted": None}

    def call(self, hook: str, **arguments: Any) -> Any:
        """The method's own result of a hook; arguments that it does not name are left out."""
        return getattr(self.plugin, hook)(**{name: arguments[name] for name in self._names(hook)})

    def _names(self, hook: str) -> list[str]:
        return list(inspect.signature(self.hooks[hook]).parameters)[1:]

    def result(self, hook: str, outputs: Tensor, target: Tensor) -> Any:
        """The method's own result of a hook of the objective."""
        return self.call(hook, **self.arguments(hook, outputs, target))

    def results(self, hook: str) -> Iterator[Any]:
        """The method's own results of a hook in calls as a run makes them; none if the kit lacks an argument of it."""
        if hook in OBJECTIVE_HOOKS:
            yield self.result(hook, self.outputs(), self.target())
        arguments = self.objective.arguments(self.outputs(), self.target())
        arguments |= {"num_samples": NUM_TRAIN, "targets": self.targets(NUM_TRAIN)}
        arguments |= dict.fromkeys(("inputs", "gradient"), torch.ones(BATCH, 3, 2, 2))
        if hook == "combine" and self.objective.hooks.fits_combiner:
            yield self.call(
                hook,
                **arguments,
                fitted=self.objective.fit_combiner(self.outputs(), self.target()),
            )
        elif hook not in OBJECTIVE_HOOKS:
            for epoch in self.epochs():
                rate = {"base": 0.1, "epoch": epoch, "num_epochs": self.spec.training.epochs}
                arguments |= {**rate, "generator": generator(0, "contract", hook)}
                if arguments.keys() >= set(self._names(hook)):
                    yield self.call(hook, **arguments)

    def epochs(self) -> tuple[float, ...]:
        """Points of time in a run, in epochs since its start."""
        num_epochs = self.spec.training.epochs
        return 0.0, 0.5, num_epochs / 2, num_epochs - 0.01

    def returns_none_on_purpose(self, hook: str) -> bool:
        """Whether the source of a hook says that it may return None.

        A method defers to others by returning None; a forgotten `return` looks the same when the hook is called. Only
        the source tells them apart: `return None`, a bare `return` or the result of `super()` is intended. A hook
        without source gets the benefit of the doubt.
        """
        try:
            source = dedent(inspect.getsource(inspect.unwrap(self.hooks[hook])))
        except (OSError, SyntaxError):
            return True
        returned = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Return)]
        return any(value is None or _mentions_none_or_super(value) for value in returned)

    def faulty_hook(self, is_wrong: Callable[[Callable[[Tensor], Tensor]], bool]) -> str:
        """The first hook whose own result, summed to a scalar, is already wrong; the last one if none is."""
        target = self.target()
        for hook in self.implemented(("combine", "member_loss", "ensemble_loss")):

            def summed(outputs: Tensor, hook: str = hook) -> Tensor:
                result = self.result(hook, outputs, target.to(outputs.device))
                return outputs.new_zeros(()) if result is None else result.sum()

            if is_wrong(summed):
                return hook
        return (self.implemented() or [""])[-1]


def _mentions_none_or_super(value: ast.expr) -> bool:
    return any(
        (isinstance(node, ast.Constant) and node.value is None) or (isinstance(node, ast.Name) and node.id == "super")
        for node in ast.walk(value)
    )
