"""Refuses compositions of methods in which the answer of one of them would be ignored.

Where only one value can be used, that of the method listed last counts. Each hook is tried on random outputs: a value
is ignored if it does not count and is neither None, nor that of the defaults, nor the one that counts. A loss that is
a multiple of the default says nothing either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.errors import UsageError
from ensemblekit.core.hooks import DEFAULTS, RunHooks
from ensemblekit.core.objective import Moment, Objective
from ensemblekit.core.seeds import generator
from ensemblekit.core.verification import implemented_hooks

TERMS = {
    "combine": "combination of the outputs",
    "fit_combiner": "fitted combination",
    "member_loss": "member loss",
    "ensemble_loss": "ensemble loss",
    "second_inputs": "second inputs",
    "members_at_start": "number of members at the start",
    "passes": "number of stochastic passes",
    "learning_rate": "learning rate",
}
"""Hooks of which only one value is used, in words."""
PROGRESS = (0.0, 0.3, 0.7, 0.99)
"""Moments of training that are tried: a method may answer at times."""


def check_composition(objective: Objective, outputs: Tensor, target: Tensor, num_epochs: int) -> None:
    """Raise a `UsageError` that names the method whose answer would be ignored, and the one that ignores it.

    Args:
        objective: of the methods.
        outputs: random outputs (R, B, W) of all networks.
        target: targets of the B samples.
        num_epochs: of the training.
    """
    if not _can_conflict(objective):
        return
    for hook, answers in _all_answers(objective, outputs, target, num_epochs):
        (counted, value), *others = answers
        default = next((own for name, own in others if name == DEFAULTS), None)
        for ignored, own in others:
            if ignored != DEFAULTS and not _says_nothing(own, value, default, hook):
                what = f'the {TERMS[hook]} of "{ignored}" would be ignored: that of "{counted}" takes its place'
                raise UsageError(what, "method", f'remove "{ignored}" or "{counted}"')


def _can_conflict(objective: Objective) -> bool:
    implemented = [implemented_hooks(type(method)) for method in objective.methods]
    return any(sum(hook in hooks for hooks in implemented) > 1 for hook in TERMS)


Answers = list[tuple[str, Any]]
"""What each plugin returns, by its name; the first one counts."""


def _all_answers(
    objective: Objective, outputs: Tensor, target: Tensor, num_epochs: int
) -> Iterator[tuple[str, Answers]]:
    hooks, arguments = objective.hooks, objective.arguments(outputs, target)
    fits = dict(hooks.results("fit_combiner", **arguments))
    if fits:
        counted = hooks.fitting_plugin or ""
        yield "fit_combiner", [(counted, fits.pop(counted, None)), *fits.items()]
    for fitted in (None, hooks.fit_combiner(arguments)):
        yield from _answers(hooks, ("combine",), {**arguments, "fitted": fitted})
    inputs, gradient = torch.randn(2, 4, 3, 2, 2, generator=generator(0, "second inputs")).to(outputs)
    whole = {"num_members": arguments["num_members"], "inputs": inputs, "gradient": gradient}
    yield from _answers(hooks, ("second_inputs", "members_at_start", "passes"), whole)
    for progress in PROGRESS:
        elapsed = progress * num_epochs
        moment = Moment(1 + int(elapsed), num_epochs, progress)
        losses = objective.arguments(outputs, target, moment=moment)
        yield from _answers(hooks, ("member_loss", "ensemble_loss"), losses)
        yield from _answers(hooks, ("learning_rate",), {"base": 1.0, "epoch": elapsed, "num_epochs": num_epochs})


def _answers(hooks: RunHooks, names: tuple[str, ...], arguments: Mapping[str, Any]) -> Iterator[tuple[str, Answers]]:
    for hook in names:
        answers = list(hooks.results(hook, **arguments))
        if len(answers) > 1:
            yield hook, answers


def _says_nothing(ignored: Any, counted: Any, default: Any, hook: str) -> bool:
    """Whether an answer that does not count says nothing else than the one that does, or than the defaults."""
    if not isinstance(ignored, Tensor):
        return bool(ignored in (counted, default))
    if hook == "ensemble_loss" and not bool(ignored.any()):
        return True
    if hook == "member_loss" and default is not None and _is_multiple(ignored, default):
        return True
    return any(other is not None and _is_equal(ignored, other) for other in (counted, default))


def _is_equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.allclose(first, second.to(first.dtype), rtol=1e-4, atol=1e-6)


def _is_multiple(losses: Tensor, default: Tensor) -> bool:
    """Whether losses are those of the defaults times a positive factor."""
    factor = (losses * default).sum() / default.square().sum()
    return bool(factor > 0) and _is_equal(losses, default * factor)
