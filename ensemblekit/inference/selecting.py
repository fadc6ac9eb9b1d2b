"""Chooses the best members of runs by their validation outputs, and writes them as a run of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ensemblekit.core.errors import UsageError
from ensemblekit.core.metrics import flat_metrics, member_metrics
from ensemblekit.core.objective import Objective
from ensemblekit.core.plugin import Combination
from ensemblekit.core.registry import Registry
from ensemblekit.core.verification import implemented_hooks
from ensemblekit.inference.budget import Budget, Costs
from ensemblekit.inference.combining import Combiner
from ensemblekit.inference.pooling import Candidate, Pool, common_methods, group_models
from ensemblekit.inference.selection import (
    EXHAUSTIVE_LIMIT,
    EXHAUSTIVE_OUTPUTS,
    Choice,
    Search,
    exhaustive,
    greedy,
    greedy_with_replacement,
    number_of_sets,
)
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.outputs import KeptOutputs, is_too_large
from ensemblekit.runs.run import Run
from ensemblekit.spec.reader import build_plugin
from ensemblekit.spec.sections import Spec
from ensemblekit.training.environment import environment
from ensemblekit.training.finishing import result
from ensemblekit.training.resuming import SELECTED

WEIGHTED = "weighted"
"""The combiner of members that were chosen with replacement: its weights are the shares of the picks."""


@dataclass(frozen=True)
class SelectionRequest:
    """What to choose."""

    members: int | None = None
    """How many members; None: as many as have the lowest validation loss."""
    replace: bool = False
    """Whether members may be picked more than once, and then have more weight."""
    budget: Budget | None = None
    search: Search = "auto"


@dataclass(frozen=True)
class Selection:
    """The run that was written for chosen members, and how they were chosen."""

    run: Run
    """The new run."""
    chosen: list[dict[str, Any]]
    """For each member: `run` it is from, index `member` there, and `count`, how often it was picked."""
    curve: list[dict[str, Any]]
    """For each number of `members`: validation loss, accuracy or MSE, the cost if there is a budget, which members are
    `chosen`, by INDEX or RUN:INDEX, and whether it `is_selected`."""
    search: str
    """"greedy", "greedy with replacement" or "exhaustive"."""
    combiner: str
    """The combination under which members were chosen."""
    all_members: dict[str, Any]
    """The row of the curve for all members of the pool."""

    @property
    def path(self) -> Path:
        """The directory of the new run."""
        return self.run.path

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values: metrics on validation and test data by name, and the rest."""
        return {
            "path": str(self.path),
            "search": self.search,
            "combiner": self.combiner,
            "members": len(self.chosen),
            **self.run.validation,
            **self.run.metrics,
            "chosen": self.chosen,
            "curve": self.curve,
            "all_members": self.all_members,
        }


@dataclass(frozen=True)
class Selected:
    """The choice from a pool."""

    pool: Pool
    choice: Choice
    path: tuple[Choice, ...]
    """The best choice of each size, or after each pick."""
    search: str
    """"greedy", "greedy with replacement" or "exhaustive"."""
    costs: Costs
    weighted: Combination | None = None
    """Combines members that were chosen with replacement; None: without."""

    @property
    def candidates(self) -> list[Candidate]:
        """The chosen members in the order of the runs."""
        return [self.pool.candidates[index] for index in self.choice.counts]

    def selection(self, run: Run) -> Selection:
        """Return what a user sees, with the run that was written."""
        num_members = len(self.pool.candidates)
        everything = Choice(tuple(range(num_members)), _Losses(self.pool)(range(num_members)))
        curve, name = [self._row(choice) for choice in self.path], combination_name(self.pool.combiner.objective)
        return Selection(run, chosen_members(self), curve, self.search, name, self._row(everything))

    def _row(self, choice: Choice) -> dict[str, Any]:
        """Describe a choice: number of members, loss and accuracy or MSE on validation data, cost."""
        metrics = self.combiner_of(choice).metrics(self.kept("validation", choice))
        row: dict[str, Any] = {"members": choice.size, "validation_loss": choice.loss}
        if self.weighted is not None:
            row = {"picks": len(choice.picks), **row}
        row |= {f"validation_{name}": metrics[name] for name in ("accuracy", "mse") if name in metrics}
        if self.costs.budget is not None:
            row[self.costs.budget.unit] = self.costs.total(choice.counts)
        return row | {"chosen": [self._label(member) for member in choice.counts], "is_selected": choice == self.choice}

    def _label(self, member: int) -> str:
        """Return the index of a member in its run, with the path of the run if there are several."""
        candidate = self.pool.candidates[member]
        return str(candidate.index) if len(self.pool.runs) == 1 else f"{candidate.run.path}:{candidate.index}"

    def kept(self, split: str, choice: Choice) -> KeptOutputs:
        """Return the outputs of the different members of a choice on a split."""
        return self.pool.kept(split, list(choice.counts))

    def combiner_of(self, choice: Choice) -> Combiner:
        """Return how the different members of a choice are combined."""
        sized = self.pool.combiner.of_size(choice.size)
        if self.weighted is None:
            return sized
        counts = torch.tensor(list(choice.counts.values()), dtype=torch.float64)
        weights = (counts / counts.sum()).float().unsqueeze(1)
        return replace(sized, objective=self.pool.objective_with(self.weighted), fitted=weights)


def combination_name(objective: Objective) -> str:
    """Return the name of the plugin that combines the members; "mean" if none does."""
    plugins = [objective.combiner] if objective.combiner is not None else list(objective.methods)
    return next((plugin.name for plugin in plugins if "combine" in implemented_hooks(type(plugin))), "mean")


def select_members(pool: Pool, request: SelectionRequest, registry: Registry) -> Selected:
    """Choose members of a pool by the validation loss of their combined output.

    Raises:
        UsageError: there are fewer members, the budget is too small, or weights are not possible.
    """
    num_members = len(pool.candidates)
    if request.members is not None and not 1 <= request.members <= num_members:
        what = f"{request.members} of {num_members} members cannot be chosen"
        raise UsageError(what, "--members", f"choose 1 to {num_members}")
    size = request.members or num_members
    search = _search(num_members, size, request, pool.splits["validation"].outputs[0].numel())
    costs = Costs(pool.candidates, request.budget)
    find = {"exhaustive": exhaustive, "greedy": greedy}.get(search, greedy_with_replacement)
    weighted = _weighted_combiner(pool, registry) if request.replace else None
    path = find(num_members, size, _Losses(pool), costs.affords)
    lowest = min(path, key=lambda choice: choice.loss)
    exact = request.members is not None and not request.replace and request.budget is None
    return Selected(pool, path[-1] if exact else lowest, tuple(path), search, costs, weighted)


def _search(num_members: int, size: int, request: SelectionRequest, num_outputs: int) -> str:
    """Return how to search; `num_outputs` are those of one member on the validation data."""
    number = number_of_sets(num_members, size)
    if request.replace:
        if request.search == "exhaustive":
            what = "a search with replacement is always greedy"
            raise UsageError(what, "--search exhaustive", "leave out --replace or --search")
        return "greedy with replacement"
    if request.search == "exhaustive" and number > 16 * EXHAUSTIVE_LIMIT:
        what = f"there are {number:,} sets of members, too many to try all"
        raise UsageError(what, "--search exhaustive", "choose fewer --members, or --search greedy")
    if request.search == "auto":
        is_small = number <= EXHAUSTIVE_LIMIT and number * num_outputs <= EXHAUSTIVE_OUTPUTS
        return "exhaustive" if is_small else "greedy"
    return request.search


def _weighted_combiner(pool: Pool, registry: Registry) -> Combination:
    if pool.combiner.objective.averages != "outputs":
        what = "a choice with replacement is a weighted mean of outputs, but the members are combined in another way"
        raise UsageError(what, "--replace", "leave it out, or choose --combiner mean")
    return build_plugin(Combination, WEIGHTED, registry)


class _Losses:
    """The validation loss of the combined output of members of a pool."""

    def __init__(self, pool: Pool) -> None:
        kept = pool.splits["validation"]
        self.combiner = pool.combiner
        self.outputs, self.targets = self.combiner.learned(kept.outputs), self.combiner.learned_targets(kept.targets)

    @torch.no_grad()
    def __call__(self, members: Sequence[int]) -> float:
        combined = self.combiner.of_size(len(members)).combine_learned(self.outputs[list(members)])
        return float(self.combiner.loss(combined.double(), self.targets).mean())


def write_selection(selected: Selected, out: Path | None, registry: Registry) -> RunDirectory:
    """Write chosen members as a finished run in a new directory; by default runs/selected-NUMBER.

    Raises:
        RunError: the directory cannot be used, or a model is damaged.
    """
    combiner = selected.combiner_of(selected.choice)
    spec = _spec_of(selected, combiner)
    kept = {split: selected.kept(split, selected.choice) for split in selected.pool.splits}
    learned = {
        split: replace(own, outputs=combiner.learned(own.outputs), targets=combiner.learned_targets(own.targets))
        for split, own in kept.items()
    }
    metrics = {split: flat_metrics(combiner.metrics(own), split) for split, own in kept.items()}
    tensors = _tensors(selected)
    if combiner.fitted is not None:
        tensors["combiner"] = combiner.fitted
    with RunDirectory.claim_next("selected") if out is None else RunDirectory.claim(out) as directory:
        directory.begin(spec.to_toml(), _environment(selected, spec, registry))
        metadata = {**selected.pool.metadata, "members": list(range(selected.choice.size))}
        directory.write_model(tensors, metadata | ({"methods": {}} if len(selected.pool.runs) > 1 else {}))
        outputs = {} if is_too_large(learned) else directory.write_outputs(learned)
        rows = _member_rows(selected, combiner, learned["test"])
        found = result(metrics, rows, history=(), seconds={}, stopped_early=False)
        directory.write_result({**found, **outputs, "notices": []})
        directory.write_status("finished")
    return directory


def _spec_of(selected: Selected, combiner: Combiner) -> Spec:
    """Return the spec of the chosen members."""
    models, spec = [candidate.model for candidate in selected.candidates], selected.pool.spec
    groups = group_models(models)
    if len(selected.pool.runs) > 1:
        spec = replace(spec, methods=common_methods([candidate.methods for candidate in selected.candidates]))
    ensemble = spec.ensemble.model_copy(update={"members": len(models)})
    chosen = combiner.objective.combiner
    assert chosen is None or isinstance(chosen, Combination)
    return replace(spec, model=models[0], groups=() if len(groups) == 1 else groups, ensemble=ensemble, combiner=chosen)


def _tensors(selected: Selected) -> dict[str, Any]:
    """Return the tensors of the chosen members, and what the methods of a single run remember."""
    models = {run.path: RunDirectory.open(run.path).read_model()[0] for run in selected.pool.runs}
    tensors: dict[str, Any] = {}
    for index, candidate in enumerate(selected.candidates):
        prefix = f"members.{candidate.network}."
        for name, value in models[candidate.run.path].items():
            if name.startswith(prefix):
                tensors[f"members.{index}.{name.removeprefix(prefix)}"] = value
    if len(models) == 1:
        first = models[selected.pool.runs[0].path]
        tensors |= {name: value for name, value in first.items() if name.startswith("methods.")}
    return tensors


def _environment(selected: Selected, spec: Spec, registry: Registry) -> dict[str, Any]:
    recorded = selected.pool.runs[0].environment
    facts: dict[str, Any] = {key: recorded.get(key) for key in ("device", "engine", "data")}
    return {**environment(spec, registry), **facts, SELECTED: chosen_members(selected), "search": selected.search}


def chosen_members(selected: Selected) -> list[dict[str, Any]]:
    """Return the run, the index there and the number of picks of each chosen member."""
    return [
        {"run": str(candidate.run.path.absolute()), "member": candidate.index, "count": count}
        for candidate, count in zip(selected.candidates, selected.choice.counts.values(), strict=True)
    ]


def _member_rows(selected: Selected, combiner: Combiner, test: KeptOutputs) -> list[dict[str, Any]]:
    """Return the metrics of each member on the test data, with what it is."""
    restore = None if combiner.target_scaling is None else combiner.target_scaling.restore
    rows = member_metrics(test.outputs, test.targets, combiner.loss, restore)
    return [
        {**candidate.run.members[candidate.index], **row}
        for row, candidate in zip(rows, selected.candidates, strict=True)
    ]
