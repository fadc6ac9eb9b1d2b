"""Distils a trained ensemble into one network: the spec of that run, and what is refused before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ensemblekit.core.errors import PluginError, RunError, UsageError
from ensemblekit.core.plugin import Family, Model
from ensemblekit.core.registry import Registry, class_info
from ensemblekit.data.fingerprint import check_same_data
from ensemblekit.data.loading import Data, load_data
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.members.python_model import NAME, NetworkLike
from ensemblekit.members.python_specs import with_data
from ensemblekit.runs.run import Run
from ensemblekit.spec.reader import build_plugin, load_spec
from ensemblekit.spec.sections import Spec

METHOD, FROZEN, TRUNK = "distillation", "frozen", "multi_head"
"""The plugins that a spec of distillation names, by which everyone could write it."""


@contextmanager
def needs_teacher_model(path: str | Path) -> Iterator[None]:
    """Say in errors within it how to pass the model of a run that was started with a model from Python."""
    try:
        yield
    except PluginError as error:
        if error.plugin != NAME:
            raise
        fix = "distil it from Python: ensemblekit.distil(RUN, teacher_model=…)"
        python_fix = "pass the model of the run too: teacher_model=…"
        raise PluginError(error.what, str(path), fix, plugin=NAME, python_fix=python_fix) from None


def with_teacher_model(registry: Registry, model: NetworkLike) -> Registry:
    """Return a registry whose plugin for networks of another run knows the model that run was started with in Python.

    Args:
        registry: the plugins.
        model: that model, as for `ensemblekit.load`.
    """
    frozen = registry.get(Model.kind, FROZEN).load()
    content = {
        "network": staticmethod(model) if callable(model) and not isinstance(model, type) else model,
        "__module__": frozen.__module__,
    }
    bound = type(frozen.__name__, (frozen,), {**content, "__doc__": frozen.__doc__})
    return registry.with_replaced(class_info(bound, FROZEN, "teacher_model"))


def check_teacher(teacher: Run) -> None:
    """Raise an error if the ensemble of a run cannot be distilled.

    The student learns the mean of the members' distributions for the same inputs; where that is not what the ensemble
    predicts, it would learn something else.

    Raises:
        RunError: the run has not finished, or its files are damaged.
        PluginError: a plugin of the run is not installed.
        UsageError: the ensemble predicts something else than the mean of its members.
    """
    if teacher.status != "finished":
        what = f"the run is {teacher.status}, and only a finished ensemble can be distilled"
        raise RunError(what, str(teacher.path), f"ensemblekit resume {teacher.path}")
    if reason := _other_prediction(teacher.ensemble):
        what = f"the student would learn the mean of the members, but {reason}"
        raise UsageError(what, str(teacher.path), "distil a run whose ensemble is the mean of its members")


def _other_prediction(ensemble: Ensemble) -> str:
    """Say what an ensemble predicts with beside the mean of its members' outputs; empty if there is nothing."""
    objective, combiner = ensemble.combiner.objective, ensemble.combiner
    if objective.predictor is not None or objective.combines_more:
        return "its predictions need more than the members"
    if objective.members.have_views:
        return "each of its members sees inputs of its own"
    if objective.hooks.passes(ensemble.spec.ensemble.members) is not None:
        return "its predictions are those of stochastic passes"
    if ensemble.spec.combiner is None:  # a combiner takes the members as they are; a method may have trained a sum
        outputs = torch.rand(combiner.num_members, 4, ensemble.loss.num_outputs(ensemble.info)).to(ensemble.dtype)
        if not torch.allclose(combiner.combine_networks(outputs, 1), outputs.mean(dim=0), rtol=1e-3):
            names = ", ".join(f'"{method.name}"' for method in ensemble.methods)
            return f"{names} combines them differently"
    return ""


def student_spec(
    teacher: Run,
    model: str | Mapping[str, Any],
    registry: Registry,
    method: Mapping[str, Any],
    uncertainty: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> Spec:
    """Return the spec of a network that learns from the ensemble of a run, with the data and training of that run.

    Args:
        teacher: the run.
        model: name or table of the network.
        registry: the plugins.
        method: parameters of the method; the others have their defaults.
        uncertainty: whether the network gets an output for each member of the ensemble, to learn their disagreement.
        overrides: values by dotted path.

    Raises:
        SpecError: the model is unknown, cannot take the inputs, or an override is invalid.
        UsageError: there is no disagreement to learn.
    """
    ensemble, spec = teacher.ensemble, teacher.spec
    count = ensemble.combiner.num_members
    tables = spec.to_dict()
    tables.pop("sweep", None)
    tables["model"], members = _with_heads(model, count, registry) if uncertainty else (model, 1)
    tables["data"].pop("folds", None)  # the student learns from the ensemble, which has seen all folds
    # the seed may be overridden; other samples would be held out then
    tables["data"].setdefault("split_seed", spec.seed)
    tables["engine"] |= {"name": "auto", "device": "auto"}
    learn = "members" if uncertainty else "mean"
    tables["method"] = {"name": METHOD, **method, "learn": learn}
    frozen = {"name": FROZEN, "run": str(teacher.path.absolute()), "member": "all"}
    size = count * ensemble.loss.num_outputs(ensemble.info)
    group = {"role": "auxiliary", "name": "teacher", "outputs": size, "model": frozen}
    tables["ensemble"] = {"members": members, "groups": [group]}
    return load_spec(tables, overrides, registry)


def _with_heads(model: str | Mapping[str, Any], count: int, registry: Registry) -> tuple[str | Mapping[str, Any], int]:
    """Return a model that computes so many members in one network, and their number."""
    if count < 2:
        what = "the ensemble has a single member, which disagrees with nobody"
        raise UsageError(what, "uncertainty", "leave it out, or distil an ensemble of several members")
    if isinstance(build_plugin(Model, model, registry), Family):
        return model, count
    return {"name": TRUNK, "model": model}, count


def labels_spec(spec: Spec, registry: Registry) -> Spec:
    """Return the spec of the same network with the same settings, but trained on the labels alone."""
    tables = spec.to_dict()
    tables["method"] = "independent"
    del tables["ensemble"]["groups"]
    return load_spec(tables, None, registry)


def same_data(teacher: Run, spec: Spec, data: Any, only_train: bool) -> tuple[Spec, Data]:
    """Load the data that the student learns from, which must be that of its teacher.

    Args:
        teacher: the run.
        spec: that of the student.
        data: the data, if the teacher was trained with data from Python.
        only_train: whether the spec may have other data for tests.

    Raises:
        DataError: the data is missing, or not what the teacher was trained on.
    """
    spec, loaded = with_data(spec, data)
    loaded = loaded or load_data(spec.data, spec.seed)
    recorded, now = teacher.environment.get("data"), loaded.fingerprint
    if only_train and isinstance(recorded, Mapping):
        recorded, now = ({"train": each["train"]} for each in (recorded, now))
    check_same_data(recorded, now, spec.data.name)
    return spec, loaded
