"""The run spec: a TOML file whose sections are the plugins' own pydantic models.

Reading collects every problem before it gives up, each with its dotted path, what is wrong and what is allowed.
A spec can only name plugins that are installed or that a person gave on the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import tomli_w
from pydantic import Field, ValidationError

from ensemblekit.errors import EnsemblekitError, PluginError, Problem, SpecError, UsageError, choices
from ensemblekit.losses import Loss
from ensemblekit.optimizers import Optimizer, optimizer_classes, optimizer_section
from ensemblekit.parameters import readable, short
from ensemblekit.plugin import Dataset, Method, Model, Plugin, Section
from ensemblekit.registry import Registry
from ensemblekit.schedules import SCHEDULES, Schedule
from ensemblekit.tables import override, read_toml

AnySection = TypeVar("AnySection", bound=Section)
AnyPlugin = TypeVar("AnyPlugin", bound=Plugin)


class EnsembleSection(Section):
    """How many members there are."""

    members: int = Field(5, ge=1, le=10_000, description="number of members, M")


class TrainingSection(Section):
    """How the members are trained; the loss, the optimizer and the schedule are tables of their own."""

    epochs: int = Field(10, ge=1, description="passes over the training data")
    batch_size: int = Field(128, ge=1, description="samples in one step, B")


class EngineSection(Section):
    """How and where the computation runs; no result depends on it beyond rounding."""

    name: Literal["auto", "sequential", "threaded", "stacked", "distributed"] = Field(
        "auto", description="how members are computed; auto measures and picks the fastest"
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|mps|meta|cuda(:\d+)?)$", description="auto takes cuda, then mps, then cpu"
    )


MAX_SEED = 2**63 - 1
DEFAULT_LOSS = "cross_entropy"
DEFAULT_OPTIMIZER = "adabelief"
DEFAULT_SCHEDULE = "constant"


@dataclass(frozen=True)
class Spec:
    """A validated spec: every plugin it names is an instance, every default is filled in."""

    data: Dataset
    model: Model
    methods: tuple[Method, ...]
    loss: Loss
    optimizer: Optimizer
    schedule: Schedule
    ensemble: EnsembleSection = field(default_factory=EnsembleSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    engine: EngineSection = field(default_factory=EngineSection)
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The spec as plain tables, with all defaults; `load_spec` reads it back to an equal spec."""
        tables = [method.to_table() for method in self.methods]
        loss = self.loss.to_table()
        return {
            "seed": self.seed,
            "data": self.data.to_table(),
            "model": self.model.to_table(),
            "ensemble": self.ensemble.to_table(),
            "method": tables[0] if len(tables) == 1 else tables,
            "training": {
                **self.training.to_table(),
                "loss": loss["name"] if len(loss) == 1 else loss,
                "optimizer": self.optimizer.to_table(),
                "schedule": self.schedule.to_table(),
            },
            "engine": self.engine.to_table(),
        }

    def to_toml(self) -> str:
        """The spec as a TOML file."""
        return tomli_w.dumps(self.to_dict())


def load_spec(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None, registry: Registry) -> Spec:
    """Read and validate a spec; `overrides` maps dotted paths to values. Raises a `SpecError` with all problems."""
    name = "the given spec" if isinstance(source, Mapping) else str(source)
    tables = dict(deepcopy(source)) if isinstance(source, Mapping) else read_toml(Path(source))
    reader = _Reader(registry)
    for path, value in (overrides or {}).items():
        reader.attempt(lambda path=path, value=value: override(tables, path, value))  # type: ignore[misc]
    spec = reader.read(tables)
    if spec is None or reader.problems:
        raise SpecError(reader.problems, name)
    return spec


def build_plugin(base: type[AnyPlugin], value: str | Mapping[str, Any], registry: Registry) -> AnyPlugin:
    """One plugin from its table, or from its name alone."""
    reader = _Reader(registry)
    plugin = reader.plugin(base, value, base.kind)
    if plugin is None:
        raise SpecError(reader.problems, f"the given {base.kind}")
    return plugin


class _Reader:
    """Turns tables into a spec and collects the problems on the way."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.problems: list[Problem] = []

    def attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except EnsemblekitError as error:
            self.problems.append(Problem(error.where, error.what, error.fix, error.exit_code))

    def read(self, tables: dict[str, Any]) -> Spec | None:
        allowed = ("seed", "data", "model", "ensemble", "method", "training", "engine")
        for key in tables:
            if key not in allowed:
                self.problems.append(Problem(str(key), "unknown key", choices(str(key), allowed)))
        seed = self._seed(tables.get("seed", 0))
        data = self._required(Dataset, tables, "data")
        model = self._required(Model, tables, "model")
        methods = self._methods(tables.get("method", []))
        ensemble = self._ensemble(tables.get("ensemble", {}), methods)
        table = self._table(tables.get("training", {}), "training")
        loss = self.plugin(Loss, table.pop("loss", DEFAULT_LOSS), "training.loss")
        optimizer = self._optimizer(table.pop("optimizer", DEFAULT_OPTIMIZER))
        schedule = self._schedule(table.pop("schedule", DEFAULT_SCHEDULE))
        training = self._section(TrainingSection, table, "training", ("loss", "optimizer", "schedule"))
        engine = self._section(EngineSection, self._table(tables.get("engine", {}), "engine"), "engine")
        if self.problems:
            return None
        parts = (data, model, methods, loss, optimizer, schedule, ensemble, training, engine, seed)
        spec = Spec(*cast("tuple[Any, ...]", parts))  # none of them is None where there is no problem
        self._cross_check(spec)
        return spec

    def plugin(self, base: type[AnyPlugin], value: Any, path: str) -> AnyPlugin | None:
        """The plugin that a table, or a name alone, stands for."""
        named = self._named(value, path)
        if named is None:
            return None
        name, table = named
        try:
            plugin_class = self.registry.get(base.kind, name).load()
        except PluginError as error:
            known = name in self.registry.plugins(base.kind)
            where = f" ({error.where})" if error.where else ""
            code = PluginError.exit_code if known else UsageError.exit_code
            self.problems.append(Problem(f"{path}.name", error.what + where, error.fix, code))
            return None
        plugin = self._section(cast("type[AnyPlugin]", plugin_class), table, path)
        return None if plugin is None else plugin.named(name)

    def _required(self, base: type[Plugin], tables: dict[str, Any], key: str) -> Plugin | None:
        if key in tables:
            return self.plugin(base, tables[key], key)
        available = ", ".join(self.registry.plugins(base.kind)) or "none is installed"
        self.problems.append(Problem(key, "missing", f'add [{key}] with name = "…"; installed: {available}'))
        return None

    def _methods(self, value: Any) -> tuple[Method | None, ...]:
        if not isinstance(value, list | tuple):
            return (self.plugin(Method, value, "method"),)
        methods = tuple(self.plugin(Method, entry, f"method.{index}") for index, entry in enumerate(value))
        names = [method.name for method in methods if method]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            self.problems.append(Problem("method", f'"{name}" is listed twice', "list each method once"))
        return methods

    def _optimizer(self, value: Any) -> Optimizer | None:
        path = "training.optimizer"
        named = self._named(value, path)
        if named is None:
            return None
        name, table = named
        if name not in optimizer_classes():
            self.problems.append(Problem(f"{path}.name", f'no optimizer "{name}"', choices(name, optimizer_classes())))
            return None
        return self._section(optimizer_section(name), {"name": name, **table}, path)

    def _schedule(self, value: Any) -> Schedule | None:
        path = "training.schedule"
        named = self._named(value, path)
        if named is None:
            return None
        name, table = named
        if name not in SCHEDULES:
            self.problems.append(Problem(f"{path}.name", f'no schedule "{name}"', choices(name, SCHEDULES)))
            return None
        return self._section(SCHEDULES[name], {"name": name, **table}, path)

    def _ensemble(self, value: Any, methods: Sequence[Method | None]) -> EnsembleSection | None:
        """The section, its number of members filled in from a method that implies it."""
        section = self._section(EnsembleSection, self._table(value, "ensemble"), "ensemble")
        for method in methods:
            needed = method.required_members() if method else None
            if section is None or method is None or needed is None:
                continue
            if "members" not in section.model_fields_set:
                section = EnsembleSection(members=needed)
            elif section.members != needed:
                what = f'{section.members}, but the parameters of "{method.name}" make {needed} members'
                self.problems.append(Problem("ensemble.members", what, f"set it to {needed}, or leave it out"))
        return section

    def _seed(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SEED:
            self.problems.append(
                Problem("seed", f"{short(value)} is not a seed", f"give an integer from 0 to {MAX_SEED}")
            )
            return 0
        return value

    def _table(self, value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, Mapping):
            return dict(value)
        self.problems.append(Problem(path, f"{short(value)} is not a table", f"write [{path}] and its keys below"))
        return {}

    def _named(self, value: Any, path: str) -> tuple[str, dict[str, Any]] | None:
        """The name and the other keys of a table that chooses something by name."""
        if isinstance(value, str):
            return value, {}
        if not isinstance(value, Mapping):
            fix = f'write [{path}] with name = "…", or {path} = "…"'
            self.problems.append(Problem(path, f"{short(value)} is neither a table nor a name", fix))
            return None
        table = dict(value)
        name = table.pop("name", None)
        if not isinstance(name, str):
            what = "missing" if name is None else f"{short(name)} is not a name"
            self.problems.append(Problem(f"{path}.name", what, 'write name = "…"'))
            return None
        return name, table

    def _section(
        self, section: type[AnySection], table: dict[str, Any], path: str, more_keys: Sequence[str] = ()
    ) -> AnySection | None:
        try:
            return section.from_table(table)
        except ValidationError as error:
            self.problems += readable(error, section, path, more_keys)
        except (ValueError, TypeError, RecursionError) as error:  # nothing that TOML could hold
            self.problems.append(Problem(path, f"not plain values: {short(str(error))}", "use what TOML has"))
        return None

    def _cross_check(self, spec: Spec) -> None:
        listed = len(spec.methods) > 1
        sections: list[tuple[str, Plugin]] = [("data", spec.data), ("model", spec.model), ("training.loss", spec.loss)]
        sections += [(f"method.{i}" if listed else "method", method) for i, method in enumerate(spec.methods)]
        for path, plugin in sections:
            for problem in plugin.check_spec(spec):
                elsewhere = problem.path.startswith("/")
                self.problems.append(
                    Problem(problem.path[1:], problem.what, problem.fix) if elsewhere else problem.under(path)
                )
