"""The workloads of the benchmark, read from workloads.toml beside this file."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from importlib.resources import files
from typing import Any, Literal, Self

import torch
from torch import Tensor

from ensemblekit.core.dataset import DataInfo
from ensemblekit.core.errors import UsageError, choices
from ensemblekit.core.objective import Objective
from ensemblekit.core.registry import discover
from ensemblekit.core.seeds import generator
from ensemblekit.data.in_memory import InMemoryData
from ensemblekit.data.loading import Batch
from ensemblekit.engines.settings import EngineSettings
from ensemblekit.members.growing import GrowingMembers
from ensemblekit.members.layout import output_layout
from ensemblekit.members.state import MemberState
from ensemblekit.ranks.group import ALONE, Group
from ensemblekit.spec.reader import load_spec
from ensemblekit.spec.sections import Spec
from ensemblekit.training.cooperation import network_ranks

SEED = 0


@dataclass(frozen=True)
class Workload:
    """One workload, in plain values, so that it can be sent to another process."""

    name: str
    title: str
    kind: Literal["training", "inference", "pipeline"]
    input_shape: tuple[int, ...]
    num_outputs: int
    batch_size: int
    steps: int
    """Steps of each contestant in one round."""
    rounds: int
    seconds: float = 30.0
    """About how long all of its measurements take on two cores: for estimates of the remaining time."""
    naive: str = ""
    """The loss of the hand-written loop; only for training."""
    spec: dict[str, Any] = field(default_factory=dict)
    """The sections of a spec, except data."""

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Self:
        return cls(**{**table, "input_shape": tuple(table["input_shape"])})

    def to_table(self) -> dict[str, Any]:
        """A table that `from_table` turns back into an equal workload."""
        return asdict(self)

    def __getstate__(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}  # not the cached spec

    def changed(self, **sections: dict[str, Any]) -> Self:
        """A copy with other values in sections of its spec, for example ``ensemble={"members": 2}``."""
        merged = {name: {**self.spec.get(name, {}), **section} for name, section in sections.items()}
        return replace(self, spec={**self.spec, **merged})

    @cached_property
    def run_spec(self) -> Spec:
        """The whole spec, validated."""
        return load_spec({**self.spec, "data": InMemoryData().to_table()}, None, discover())

    @property
    def info(self) -> DataInfo:
        return DataInfo("classification", self.input_shape, self.num_outputs)

    @property
    def learning_rate(self) -> float:
        return self.run_spec.optimizer.learning_rate

    def objective(self) -> Objective:
        return Objective(self.run_spec.methods, self.run_spec.loss)

    def settings(self, device: torch.device, group: Group = ALONE) -> EngineSettings:
        return EngineSettings(
            device, self.run_spec.optimizer, recompute=self.run_spec.engine.recompute, width=self.width, group=group
        )

    @property
    def width(self) -> int:
        """Columns of the outputs, C."""
        return output_layout(self.run_spec, self.info).width

    def members(self, device: torch.device, group: Group = ALONE) -> list[MemberState]:
        """The members as late in a run: a method that starts with fewer of them has frozen copies of the last one.

        Those of other processes of the group have shapes, but no values.
        """
        num_members = self.run_spec.ensemble.members
        ranks = network_ranks(self.run_spec, self.info, device, group)
        members = GrowingMembers(self.run_spec, self.info, device, group=group, ranks=ranks)
        members.start(self.objective().hooks.call.members_at_start(num_members=num_members))
        while len(members) < num_members:
            members.keep_copy(len(members) - 1)
        return members.states

    def batch(self, device: torch.device) -> Batch:
        """Random inputs and classes, always the same."""
        source = generator(SEED, "bench")
        inputs = torch.randn(self.batch_size, *self.input_shape, generator=source)
        targets = torch.randint(self.num_outputs, (self.batch_size,), generator=source)
        return Batch(inputs.to(device), targets.to(device), torch.arange(self.batch_size, device=device))

    def sample_weights(self, device: torch.device) -> Tensor | None:
        """The weights (B, M) of the batch's samples, if the method has any."""
        hooks, num_members = self.objective().hooks, self.run_spec.ensemble.members
        weights = hooks.sample_weights(self.batch_size, num_members, SEED, self.batch(torch.device("cpu")).targets)
        return None if weights is None else weights.to(device)


def all_workloads(quick: bool = False) -> dict[str, Workload]:
    """All workloads by name; with `quick` fewer and smaller ones."""
    workloads = {}
    tables = tomllib.loads(files(__package__).joinpath("workloads.toml").read_text(encoding="utf-8"))
    for name, table in tables.items():
        changes = table.pop("quick", None)
        if not quick or changes is not None:
            workloads[name] = Workload.from_table({"name": name, **table, **(changes if quick and changes else {})})
    return workloads


def select_workloads(names: Sequence[str], quick: bool = False) -> list[Workload]:
    """The workloads of these names, or all workloads if there are no names.

    Raises:
        UsageError: A name is unknown, or the workload is left out with `quick`.
    """
    known = all_workloads(quick)
    for name in names:
        if name not in known:
            left_out = quick and name in all_workloads()
            what = f'workload "{name}" is too large for --quick' if left_out else f'no workload "{name}"'
            raise UsageError(what, "--only", choices(name, known))
    return [known[name] for name in dict.fromkeys(names)] if names else list(known.values())
