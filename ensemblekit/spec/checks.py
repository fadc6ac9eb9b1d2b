"""What the plugins of a spec object to: in the spec itself, and in the data once its form is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ensemblekit.core.dataset import DataInfo
from ensemblekit.core.errors import PluginError, Problem, SpecError
from ensemblekit.core.metrics import METRIC_GROUPS
from ensemblekit.core.objective import Objective
from ensemblekit.core.plugin import Family, Model, Plugin
from ensemblekit.core.verification import implemented_hooks
from ensemblekit.spec.sections import Spec


def spec_problems(spec: Spec, in_memory: bool = False) -> list[Problem]:
    """Return the problems that plugins see in a spec, and in its data if its form is known without loading it.

    Args:
        spec: the spec.
        in_memory: whether data is passed in Python, so that the data set needs no files.
    """
    problems = [] if in_memory else [problem.under("data") for problem in _call(spec.data, "check_source")]
    problems += [*_combiner_problems(spec), *_metric_problems(spec), *_fold_problems(spec)]
    problems += [*_collect(spec, "check_spec", spec), *_never_fitted(spec)]
    return problems if spec.data.info is None else problems + data_problems(spec, spec.data.info)


def data_problems(spec: Spec, info: DataInfo) -> list[Problem]:
    """Return the problems that the plugins of a spec see in data of this task and these shapes."""
    weights = class_weight_problems(spec.training.class_weights, info)
    return [*_collect(spec, "check_data", spec, info), *_missing_outputs(spec, info), *weights]


def check_data(spec: Spec, info: DataInfo) -> None:
    """Raise a `SpecError` with everything that does not fit the loaded data."""
    if problems := data_problems(spec, info):
        raise SpecError(problems, f'the spec and the data of "{spec.data.name}"')


def class_weight_problems(class_weights: str | Sequence[float] | None, info: DataInfo) -> Iterator[Problem]:
    """Yield the reasons why weights of classes cannot be used with this data."""
    path, num_classes = "training.class_weights", max(2, info.num_outputs)  # one output is enough for two classes
    if class_weights is not None and info.task != "classification":
        fix = "remove it; samples of any task can have weights of their own"
        yield Problem(path, f"weights of classes are set, but the task is {info.task}", fix)
    elif class_weights is not None and class_weights != "balanced" and len(class_weights) != num_classes:
        fix = 'give one weight for each class, in their order, or "balanced"'
        yield Problem(path, f"{len(class_weights)} weights for {num_classes} classes", fix)


def _combiner_problems(spec: Spec) -> Iterable[Problem]:
    """Yield the reasons why the combiner of a spec would have no effect, or take that of a method."""
    if spec.combiner is None:
        return
    name = spec.combiner.name
    if "combine" not in implemented_hooks(type(spec.combiner)):
        yield Problem("ensemble.combiner", f'"{name}" does not implement combine', "implement it with @hookimpl")
    for method in spec.methods:
        if {"combine", "fit_combiner"} & set(implemented_hooks(type(method))):
            what = f'"{name}" combines the members\' outputs, but so does the method "{method.name}"'
            yield Problem("ensemble.combiner", what, "remove the combiner, or use another method")


def _fold_problems(spec: Spec) -> Iterable[Problem]:
    """Yield the reasons why members cannot each be trained without a fold of the data."""
    folds, members = spec.data.folds, spec.ensemble.members
    if folds is None:
        return
    path, remove = "data.folds", "remove data.folds"
    if members < folds:
        what = f"{folds} folds for {members} member{'s' * (members != 1)}: some folds would be left out by no member"
        yield Problem(path, what, f"set ensemble.members to at least {folds}, or lower or remove data.folds")
    for model in {model.key: model for model in spec.member_models}.values():
        if isinstance(model, Family):
            what = f'the members of "{model.name}" share weights, so that each learns from the folds of the others'
            yield Problem(path, what, f"{remove}, or use a model whose members are networks of their own")
        elif model.knows_outputs:
            what = f'members of "{model.name}" are not trained here: they may have seen their fold'
            yield Problem(path, what, f"{remove}, or use a model that is trained")
    for group in spec.auxiliary_groups:
        what = f'the auxiliary group "{group.name}" sees all folds, and members learn from it'
        yield Problem(path, what, f"{remove}, or the group")
    for method in spec.methods:
        if not Objective([method], spec.loss).separable:
            what = f'"{method.name}" lets members learn from the outputs of others, which have seen their fold'
            yield Problem(path, what, f'{remove}, or use a method such as "independent" or "bagging"')


def _metric_problems(spec: Spec) -> Iterable[Problem]:
    """Yield the metrics whose names are those of built-in ones."""
    built_in = {name for names in METRIC_GROUPS.values() for name in names}
    for index, metric in enumerate(spec.metrics):
        if metric.name in built_in:
            what = f'"{metric.name}" is also the name of a built-in metric'
            yield Problem(f"metrics.{index}", what, "register it by another name")


def _never_fitted(spec: Spec) -> Iterator[Problem]:
    """Yield the models that have to be fitted, but are parameters of a model that does not do it."""
    for path, plugin in spec.plugins():
        for key, inner in plugin.inner_plugins() if isinstance(plugin, Model) and not plugin.fitted else ():
            if isinstance(inner, Model) and inner.fitted:
                what = f'"{inner.name}" has to be fitted to the data, which "{plugin.name}" does not do'
                yield Problem(f"{path}.{key}", what, "choose a model that learns by gradients")


def _collect(spec: Spec, check: str, *arguments: object) -> list[Problem]:
    found = []
    for path, plugin in spec.plugins(inner=False):
        for problem in _call(plugin, check, *arguments):
            elsewhere = problem.path.startswith("/")
            found.append(Problem(problem.path[1:], problem.what, problem.fix) if elsewhere else problem.under(path))
    return found


def _call(plugin: Plugin, check: str, *arguments: object) -> list[Problem]:
    result: Any = getattr(plugin, check)(*arguments)
    problems = list(result) if isinstance(result, Iterable) else [result]
    if not all(isinstance(problem, Problem) for problem in problems):
        what = f'plugin "{plugin.name}": {check}() returned something other than problems'
        raise PluginError(what, fix="yield Problem(…)", plugin=plugin.name)
    return problems


def _missing_outputs(spec: Spec, info: DataInfo) -> Iterator[Problem]:
    """Yield the auxiliary groups and named outputs that methods need and the spec does not have."""
    groups = {group.name: group.outputs or spec.ensemble.members for group in spec.auxiliary_groups}
    num_outputs = spec.loss.num_outputs(info)
    sizes = {"members": spec.ensemble.members, "outputs": num_outputs, "ensemble": num_outputs}
    named = {*spec.loss.slices(num_outputs), *spec.member_models[0].extra_outputs(info.input_shape)}
    for method in spec.methods:
        for name, kind in method.required_groups().items():
            # any multiple of a member's outputs can be those of an ensemble
            fits = groups[name] % num_outputs == 0 if kind == "ensemble" and name in groups else False
            if not fits and groups.get(name) != sizes[kind]:
                what = f'"{method.name}" needs an auxiliary group "{name}" with {sizes[kind]} outputs'
                got = f"; it has {groups[name]}" if name in groups else ", and there is none"
                fix = f'[[ensemble.groups]] with role = "auxiliary", name = "{name}", outputs = {sizes[kind]}'
                yield Problem("ensemble.groups", what + got, f"write {fix}")
        for name in method.required_outputs():
            if name not in named:
                what = f'"{method.name}" needs outputs called "{name}", which neither the model nor the loss has'
                yield Problem(
                    "model", what, "use a model or a loss that gives them: extra_outputs() or slices() say so"
                )
