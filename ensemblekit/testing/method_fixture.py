"""A method on the bench: outputs to give it, a loss and a spec that it accepts, its hooks one by one."""

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

from ensemblekit.core.errors import Problem
from ensemblekit.core.hooks import implemented_hooks
from ensemblekit.core.losses import MSE, CrossEntropy, Loss
from ensemblekit.core.objective import Objective
from ensemblekit.core.plugin import Method
from ensemblekit.core.seeds import generator
from ensemblekit.spec.sections import EnsembleSection, Spec
from ensemblekit.testing.checks import ContractError, look_at, problems_of
from ensemblekit.testing.toy_run import NUM_CLASSES, NUM_TRAIN, NUM_VALUES, registry_with, tiny_spec

BATCH = 4
MEMBERS = (3, 2, 4)
"""Tried in turn: a method may be for an even number of members only, or for few."""
HOOKS_OF_THE_OBJECTIVE = ("combine", "member_loss", "ensemble_loss", "select_members")
HOOKS_THAT_ANSWER = (
    *HOOKS_OF_THE_OBJECTIVE,
    "fit_combiner",
    "second_inputs",
    "sample_weights",
    "members_at_start",
    "passes",
    "learning_rate",
)
FEW_EPOCHS, MOST_EPOCHS = 4, 512
TASKS: tuple[tuple[Loss, bool], ...] = ((CrossEntropy(), False), (MSE(), False), (MSE(), True))
"""Tried in turn, with whether it is regression: a method may be for one of them only."""


class MethodBench:
    """A method and everything to try it with."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.method_class = type(method)
        self.registry = registry_with(method)

    @property
    def members(self) -> int:
        """How many members it works with."""
        return self.spec.ensemble.members

    @cached_property
    def spec(self) -> Spec:
        """The smallest run that the method has nothing against."""
        required = self.method.required_members()
        sizes = MEMBERS if required is None else (required,)
        for members, task in product(sizes, TASKS):
            works = partial(self._works, members=members, task=task)
            if works(MOST_EPOCHS):
                # the fewest epochs that will do: a method may have a use for many
                epochs = 1 + bisect_left(range(1, MOST_EPOCHS + 1), True, key=works)
                return self._spec(max(epochs, FEW_EPOCHS), members, *task)
        tried = ", ".join(map(str, sizes))
        problems = [self._problems(self._spec(MOST_EPOCHS, members, *TASKS[0])) for members in sizes]
        why = ", as required_members() says" if required else ""
        raise ContractError(
            f"check_spec() to accept some run of {MOST_EPOCHS} epochs, for {NUM_CLASSES} classes or for values",
            "; ".join(dict.fromkeys(str(problem) for found in problems for problem in found)),
            look_at(self.method_class, "check_spec"),
            f"refuse only what cannot work; tried were {tried} members{why}, with cross-entropy and the squared error; "
            "a number of members that the parameters imply is what required_members() is for",
        )

    def accepts(self, members: int) -> bool:
        """Whether the method has nothing against so many members in the run of the bench."""
        return not self._problems(replace(self.spec, ensemble=EnsembleSection(members=members)))

    def _works(self, epochs: int, members: int, task: tuple[Loss, bool]) -> bool:
        return not self._problems(self._spec(epochs, members, *task))

    def _spec(self, epochs: int, members: int, loss: Loss, regression: bool) -> Spec:
        changes = {
            "training.epochs": epochs,
            "training.evaluate_every": epochs,
            "training.loss": loss.name,
            "data.regression": regression,
            "ensemble.members": members,
            # one that makes noisy passes needs a network with noise
            "model.dropout": 0.5 if self.hooks(["passes"]) else 0.0,
        }
        return replace(tiny_spec(self.registry, changes), methods=(self.method,))

    def _problems(self, spec: Spec) -> list[Problem]:
        return problems_of(self.method, spec)

    @cached_property
    def objective(self) -> Objective:
        return Objective([self.method], self.spec.loss)

    def hooks(self, names: Iterable[str] = HOOKS_OF_THE_OBJECTIVE) -> list[str]:
        """Those of the named hooks that the method implements."""
        implemented = implemented_hooks(self.method_class)
        return [name for name in names if name in implemented]

    def outputs(self, members: int | None = None) -> Tensor:
        """Member outputs (M, B, C) of ordinary size, float64."""
        num_outputs = self.spec.loss.num_outputs(self.spec.data.info) if self.spec.data.info else NUM_CLASSES
        shape = (members or self.members, BATCH, num_outputs)
        return torch.randn(shape, generator=generator(0, "contract", "outputs"), dtype=torch.float64)

    def target(self) -> Tensor:
        """A target for each sample, in the form of the spec's task."""
        random = generator(0, "contract", "target")
        if self.spec.data.info is not None and self.spec.data.info.task == "regression":
            return torch.randn(BATCH, NUM_VALUES, generator=random, dtype=torch.float64)
        return torch.randint(NUM_CLASSES, (BATCH,), generator=random)

    def answer(self, hook: str, outputs: Tensor, target: Tensor) -> Any:
        """What the method itself answers to a hook of the objective."""
        return self.ask(hook, **self.arguments(hook, outputs, target))

    def arguments(self, hook: str, outputs: Tensor, target: Tensor) -> dict[str, Any]:
        """What a hook of the objective is given."""
        arguments = {"outputs": outputs, "num_members": len(outputs), "target": target, "loss": self.spec.loss}
        arguments["fitted"] = None  # as in training
        if hook != "combine":
            arguments["combined"] = self.objective.hooks.hook.combine(**arguments)
        return arguments

    def answers(self, hook: str) -> Iterator[Any]:
        """What the method itself answers to any hook, in calls such as those of a run."""
        if hook in HOOKS_OF_THE_OBJECTIVE:
            yield self.answer(hook, self.outputs(), self.target())
        arguments: dict[str, Any] = {"outputs": self.outputs(), "target": self.target(), "loss": self.spec.loss}
        arguments |= {"num_members": self.members, "num_samples": NUM_TRAIN}
        arguments |= dict.fromkeys(("inputs", "gradient"), torch.ones(BATCH, 3, 2, 2))
        if hook == "combine" and self.objective.fits_combiner:
            fitted = self.objective.fit_combiner(self.outputs(), self.target())
            yield self.ask(hook, **arguments, fitted=fitted)
        elif hook not in HOOKS_OF_THE_OBJECTIVE:
            epochs = self.spec.training.epochs
            for epoch in (0.0, 0.5, epochs / 2, epochs - 0.01):
                rate = {"base": 0.1, "epoch": epoch, "num_epochs": epochs}
                yield self.ask(hook, **arguments, **rate, generator=generator(0, "contract", hook))

    def ask(self, hook: str, **arguments: Any) -> Any:
        """What the method itself answers to a hook; arguments that it does not name are left out."""
        named = list(inspect.signature(implemented_hooks(self.method_class)[hook]).parameters)[1:]
        return getattr(self.method, hook)(**{name: arguments[name] for name in named})

    def means_none(self, hook: str) -> bool:
        """Whether a hook says in its source that it may leave the answer to others; one without source might."""
        try:
            source = dedent(inspect.getsource(inspect.unwrap(implemented_hooks(self.method_class)[hook])))
        except (OSError, SyntaxError):
            return True
        returns = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Return)]
        return any(value is None or _names_none_or_super(value) for value in returns)

    def culprit(self, is_wrong: Callable[[Callable[[Tensor], Tensor]], bool]) -> str:
        """Where to look: the first hook whose own answer, summed to a scalar, is already wrong."""
        target = self.target()
        for hook in self.hooks(("combine", "member_loss", "ensemble_loss")):

            def summed(outputs: Tensor, hook: str = hook) -> Tensor:
                answer = self.answer(hook, outputs, target.to(outputs.device))
                return outputs.new_zeros(()) if answer is None else answer.sum()

            if is_wrong(summed):
                return look_at(self.method_class, hook)
        hooks = self.hooks()
        return look_at(self.method_class, hooks[-1] if hooks else "")


def _names_none_or_super(value: ast.expr) -> bool:
    return any(
        (isinstance(node, ast.Constant) and node.value is None) or (isinstance(node, ast.Name) and node.id == "super")
        for node in ast.walk(value)
    )
