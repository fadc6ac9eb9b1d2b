"""The members of one run or of several as one pool to choose from, if they fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from ensemblekit.core.dataset import DataInfo
from ensemblekit.core.errors import DataError, UsageError
from ensemblekit.core.objective import COMBINING_HOOKS, Objective
from ensemblekit.core.plugin import Combination, Method, Model
from ensemblekit.core.verification import implemented_hooks
from ensemblekit.inference.combining import Combiner
from ensemblekit.inference.metadata import saved_info
from ensemblekit.inference.outputs import check_finite
from ensemblekit.members.layout import run_objective
from ensemblekit.members.python_model import PythonModel
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.json_files import as_written
from ensemblekit.runs.outputs import KeptOutputs
from ensemblekit.runs.run import Run
from ensemblekit.runs.samples import SplitSamples
from ensemblekit.spec.groups import Group
from ensemblekit.spec.sections import Spec

SPLITS = ("validation", "test")
_SHARED = ("task", "input_shape", "num_outputs", "classes", "transform", "target_scaling", "preparation")
"""What model.json says about inputs and targets; runs of one pool have the same."""
_ONE_RUN = "choose from this run alone, or choose how members are combined: --combiner mean"


@dataclass(frozen=True)
class Candidate:
    """A member that can be chosen."""

    run: Run
    index: int
    """Among the members of its run."""
    network: int
    """Index of its network in the model of its run."""
    model: Model

    @property
    def methods(self) -> tuple[Method, ...]:
        """Those that it was trained by."""
        return self.run.spec.methods

    @property
    def parameters(self) -> int:
        """The number of its parameters."""
        return int(self.run.members[self.index]["parameters"])


@dataclass(frozen=True)
class Pool:
    """Members of runs on the same data, and how a choice of them is combined."""

    candidates: tuple[Candidate, ...]
    spec: Spec
    """The spec of the first run, with the methods and the combiner of a choice; its members are those of that run."""
    info: DataInfo
    metadata: dict[str, Any]
    """What model.json of the first run says."""
    combiner: Combiner
    """Combines the outputs of all members; `of_size` is for a choice."""
    splits: dict[str, KeptOutputs]
    """The outputs of all members on validation and test data, in the original units."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs that the members are from."""
        return tuple({candidate.run.path: candidate.run for candidate in self.candidates}.values())

    def objective_with(self, combiner: Combination) -> Objective:
        """Return the objective with another combiner."""
        return run_objective(replace(self.spec, combiner=combiner), self.info, self.combiner.objective.methods)

    def kept(self, split: str, members: Sequence[int]) -> KeptOutputs:
        """Return the outputs of some members on a split."""
        kept = self.splits[split]
        return replace(kept, outputs=kept.outputs[list(members)])


def read_pool(runs: Sequence[Run], combiner: Combination | None = None) -> Pool:
    """Pool the members of runs.

    Args:
        runs: finished runs on the same data.
        combiner: how a choice of members is combined. Default: as in the runs, which then have to agree.

    Raises:
        UsageError: runs do not fit together, have no validation data, or combine their members in a way that is not
            defined for some of them.
        DataError: all validation samples are of one class.
        NumericError: outputs are not finite.
    """
    metadata = [RunDirectory.open(run.path).read_metadata() for run in runs]
    spec = _common_spec(runs, combiner)
    splits = {split: _pooled(runs, split) for split in SPLITS}
    for run, values in zip(runs[1:], metadata[1:], strict=True):
        for key in _SHARED:
            if values.get(key) != metadata[0].get(key):
                raise _different(f'"{key}" of their data', run, runs[0])
    _check_classes(splits["validation"], runs)
    with as_written(runs[0].path / "model.json"):
        info = saved_info(metadata[0])
    candidates = tuple(
        candidate for run, own in zip(runs, metadata, strict=True) for candidate in _candidates(run, own)
    )
    methods: Sequence[Method] = runs[0].combiner().objective.methods if len(runs) == 1 else spec.methods
    objective = run_objective(spec, info, methods)
    _check_combination(objective, runs[0])
    scaling = runs[0].combiner().target_scaling
    pooled = Combiner(objective, len(candidates), target_scaling=scaling, extra_metrics=spec.known_metrics)
    return Pool(candidates, spec, info, metadata[0], pooled, splits)


def _common_spec(runs: Sequence[Run], combiner: Combination | None) -> Spec:
    """Return the first run's spec with the methods and the combiner that all share."""
    first = runs[0]
    for run in runs[1:]:
        if run.spec.loss.key != first.spec.loss.key:
            raise _different("the losses", run, first, "choose from runs that were trained with the same loss")
        if run.spec.engine.precision != first.spec.engine.precision:
            raise _different("engine.precision", run, first, "choose from runs of the same precision")
        if len(names := _python_models(run) | _python_models(first)) > 1:
            what = f"the models that were passed in Python ({', '.join(sorted(names))})"
            raise _different(what, run, first, "choose from runs of one such model, or make plugins of them")
        if combiner is None and _key(run.spec.combiner) != _key(first.spec.combiner):
            raise _different("the combiners", run, first, "choose how members are combined: --combiner mean")
    chosen = combiner or first.spec.combiner
    if len(runs) > 1:
        for run in runs:
            _check_can_be_pooled(run, chosen)
    methods = common_methods([run.spec.methods for run in runs]) if len(runs) > 1 else first.spec.methods
    groups = tuple(replace(group, loss=None, optimizer=None) for group in first.spec.groups)
    data = first.spec.data.model_copy(update={"folds": None})  # nothing of a choice was trained without a fold
    return replace(first.spec, data=data, methods=methods, combiner=chosen, groups=groups, extensions=(), sweep=None)


def _python_models(run: Run) -> set[str]:
    """Return the names of the classes or functions that a run was started with; only one can be passed to load it."""
    return {model.factory for model in run.spec.member_models if isinstance(model, PythonModel)}


def _check_can_be_pooled(run: Run, combiner: Combination | None) -> None:
    """Raise a `UsageError` if a method of a run decides how its members predict together."""
    if combiner is not None:
        return
    for method in run.spec.methods:
        if set(COMBINING_HOOKS) & set(implemented_hooks(type(method))):
            what = f'"{method.name}" combines its members in its own way, which members of other runs have no part in'
            raise UsageError(what, str(run.path), _ONE_RUN)


def _check_combination(objective: Objective, run: Run) -> None:
    """Raise a `UsageError` unless the combination is defined for any choice of members."""
    if objective.combines_more:
        what = "predictions need networks beside the members, so that no choice of members predicts"
        raise UsageError(what, str(run.path), "choose from other runs")
    deciding = [objective.combiner] if objective.combiner is not None else list(objective.methods)
    hooks = [(plugin, implemented_hooks(type(plugin))) for plugin in deciding]
    if any("fit_combiner" in implemented for _, implemented in hooks):
        what = "the combination is fitted to the outputs of all members, so that it is not defined for some of them"
        raise UsageError(what, str(run.path), "choose another combination: --combiner mean, and --replace for weights")
    for plugin, implemented in hooks:
        by_index = "combine" in implemented and "members" in signature(implemented["combine"]).parameters
        remembers = isinstance(plugin, Method) and type(plugin).state is not Method.state and "combine" in implemented
        if by_index or remembers:
            what = f'"{plugin.name}" treats each member by its index, so that a choice of members is not defined'
            raise UsageError(what, str(run.path), "choose another combination: --combiner mean")


def _candidates(run: Run, metadata: dict[str, Any]) -> list[Candidate]:
    """Return the members of a run; each must be a network of its own that predicts as it would elsewhere."""
    for method in run.spec.methods:
        hooks = implemented_hooks(type(method))
        if "passes" in hooks:
            what = f'the members of "{method.name}" are stochastic passes of its networks'
            raise UsageError(what, str(run.path), "choose from runs whose members are networks of their own")
        if "member_inputs" in hooks:
            what = f'"{method.name}" shows each member inputs that depend on its index, which a choice would change'
            raise UsageError(what, str(run.path), "choose from runs whose members see the same inputs")
        if method.predictor() is not None:
            what = f'"{method.name}" predicts by the group "{method.predictor()}" alone, and not by its members'
            raise UsageError(what, str(run.path), "choose from other runs")
    with as_written(run.path / "model.json"):
        by_index = {plan.index: plan for plan in run.spec.networks}
        plans = [by_index[index] for index in metadata["members"]]
    networks = [(index, plan) for index, plan in enumerate(plans) if plan.group.role == "member"]
    for _, plan in networks:
        model = plan.group.model
        if plan.members > 1:
            what = f'"{model.name}" computes {plan.members} members in one network: to leave some out saves nothing'
            raise UsageError(what, str(run.path), "choose from runs whose members are networks of their own")
        if "member" in signature(model.build).parameters:
            what = f'"{model.name}" builds a network by the index of its member, which a choice would change'
            raise UsageError(what, str(run.path), "choose from runs of other models")
    return [Candidate(run, index, network, plan.group.model) for index, (network, plan) in enumerate(networks)]


def _pooled(runs: Sequence[Run], split: str) -> KeptOutputs:
    """Return the outputs of the members of all runs on a split, which must have the same samples in all of them."""
    kept = [run.outputs(split) for run in runs]
    first = SplitSamples.of(runs[0], kept[0], split)
    for run, own in zip(runs, kept, strict=True):
        if difference := SplitSamples.of(run, own, split).difference(first):
            fix = "pool runs on the same data; data.split_seed gives runs of different seeds the same validation data"
            raise UsageError(f"different {split} data: {difference}", f"{run.path}, pooled with {runs[0].path}", fix)
        check_finite(own.outputs, lambda index, run=run: f"{split} sample {index} of {run.path}")  # type: ignore[misc]
    # all networks' outputs are left out: a combination that needs them is refused
    return replace(kept[0], outputs=torch.cat([own.outputs for own in kept]), networks=None)


def _check_classes(validation: KeptOutputs, runs: Sequence[Run]) -> None:
    targets = validation.targets
    if not targets.is_floating_point() and len(targets.unique()) < 2:
        what = f"all {len(targets)} validation samples are of one class, so that members cannot be compared"
        raise DataError(what, str(runs[0].path), "train with more validation data: data.validation_fraction")


def _different(what: str, run: Run, first: Run, fix: str = "pool runs on the same data") -> UsageError:
    return UsageError(f"{what} differ", f"{run.path}, pooled with {first.path}", fix)


def _key(plugin: Method | Combination | None) -> str | None:
    return None if plugin is None else plugin.key


def common_methods(methods: Sequence[tuple[Method, ...]]) -> tuple[Method, ...]:
    """Return the methods of several runs if they are the same and remember nothing, which would be that of one run."""
    keys = [[method.key for method in own] for own in methods]
    remembers = any(type(method).state is not Method.state for method in methods[0])
    return () if remembers or any(own != keys[0] for own in keys) else methods[0]


def group_models(models: Sequence[Model]) -> tuple[Group, ...]:
    """Return groups of members with these models in this order; equal neighbours share one."""
    groups: list[Group] = []
    for model in models:
        if groups and groups[-1].model.key == model.key:
            groups[-1] = replace(groups[-1], members=groups[-1].members + 1)
        else:
            groups.append(Group(1, model))
    return tuple(groups)


def check_distinct(paths: Sequence[Path]) -> None:
    """Raise a `UsageError` if a run is named twice."""
    resolved = [path.resolve() for path in paths]
    for path, full in zip(paths, resolved, strict=True):
        if resolved.count(full) > 1:
            raise UsageError("the run is named twice", str(path), "name each run once; --replace weights members")
