"""What a run decides about its spec: the loss by the task of the data, and paths that hold in any directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ensemblekit.core.errors import SpecError
from ensemblekit.core.losses import DEFAULT_LOSSES
from ensemblekit.core.plugin import Section, Task
from ensemblekit.core.tasks import TASKS
from ensemblekit.spec.checks import spec_problems
from ensemblekit.spec.groups import Group
from ensemblekit.spec.sections import ENTRIES, Spec


def with_loss_for(spec: Spec, task: Task) -> Spec:
    """Return the spec with the default loss of a task, if it names none.

    Raises:
        SpecError: a plugin of the spec cannot be used with this loss.
    """
    name = DEFAULT_LOSSES[task]
    if spec.loss is not spec.default_loss or spec.loss.name == name:
        return spec
    loss = TASKS[task].default_loss().named(name)
    resolved = replace(spec, loss=loss, default_loss=loss)
    problems = spec_problems(resolved)
    if problems:
        raise SpecError(problems, f'the spec with the default loss for {task}, "{name}"')
    return resolved


def with_absolute_paths(spec: Spec) -> Spec:
    """Return the spec with every relative path of its plugins resolved against the current directory."""
    return replace(spec, **{name: _absolute(getattr(spec, name)) for name in ENTRIES})


def _absolute(value: Any) -> Any:
    if isinstance(value, Path):
        return value.absolute()
    if isinstance(value, tuple | list):
        return type(value)(_absolute(item) for item in value)
    if isinstance(value, dict):
        return {key: _absolute(item) for key, item in value.items()}
    if isinstance(value, Group):
        return replace(value, model=_absolute(value.model))
    if not isinstance(value, Section):
        return value
    fields = {name: (getattr(value, name), _absolute(getattr(value, name))) for name in type(value).model_fields}
    changed = {name: new for name, (old, new) in fields.items() if new is not old and new != old}
    return value.model_copy(update=changed) if changed else value
