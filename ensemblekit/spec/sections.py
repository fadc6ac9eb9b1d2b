"""The run spec: what a TOML file says, validated. Each part is described once, by its entry.

A new setting is a field of a section here; a new part is a field of `Spec` with its entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import tomli_w
from pydantic import Field, field_validator

from ensemblekit.core.augmentation import BatchAugmentation
from ensemblekit.core.dataset import Dataset
from ensemblekit.core.losses import DEFAULT_LOSSES, Loss
from ensemblekit.core.metrics import Metric
from ensemblekit.core.plugin import Combination, Extension, Family, Method, Model, Plugin, Section
from ensemblekit.spec.entries import (
    MISSING,
    EnsembleEntry,
    Entry,
    IntegerEntry,
    LossEntry,
    OptionalPluginEntry,
    OptionalSectionEntry,
    PluginChoiceEntry,
    PluginEntry,
    PluginsEntry,
    SectionEntry,
)
from ensemblekit.spec.groups import Group, GroupsEntry
from ensemblekit.spec.optimizers import AnyOptimizer, OptimizerPlugin, optimizer_classes, optimizer_section
from ensemblekit.spec.schedules import Schedule
from ensemblekit.spec.sweep import SweepSection

DEFAULT_LOSS = DEFAULT_LOSSES["classification"]
"""The default loss where the task is not known yet."""
ENGINES = {
    "threaded": "ensemblekit.engines.threaded:ThreadedEngine",
    "stacked": "ensemblekit.engines.stacked:StackedEngine",
    "sequential": "ensemblekit.engines.sequential:SequentialEngine",
}
"""The engines by name, each with the location of its class; "auto" measures them in this order."""

if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[("auto", *ENGINES)]


class EnsembleSection(Section):
    """How many members there are; `combiner` and `groups` are tables below it."""

    members: int = Field(5, ge=1, le=10_000, description="number of members, M")


class TrainingSection(Section):
    """How the members are trained; the loss, the optimizer, the schedule and the mix are tables of their own."""

    epochs: int = Field(10, ge=1, description="passes over the training data")
    batch_size: int = Field(128, ge=1, description="samples in one step, B")
    class_weights: Literal["balanced"] | tuple[Annotated[float, Field(ge=0)], ...] | None = Field(
        None,
        description="how much samples of each class count in the objective, in the order of the classes; balanced: "
        "all classes count the same; only ratios matter, and metrics are not weighted",
    )
    clip_norm: float | None = Field(
        None,
        gt=0,
        description="largest norm of a member's gradient of the objective, which has the method's factor such as 1/M",
    )
    evaluate_every: int = Field(1, ge=1, description="epochs between evaluations; the last epoch is always evaluated")
    patience: int | None = Field(
        None, ge=1, description="stop early after that many evaluations without a lower validation loss"
    )
    keep: Literal["last", "best"] = Field(
        "last", description="keep the weights of the last epoch, or those with the lowest validation loss"
    )
    checkpoint_every_minutes: float = Field(
        10.0, gt=0, description="minutes between checkpoints inside a long epoch; each epoch ends with one anyway"
    )
    keep_outputs: bool = Field(
        True, description="keep the members' outputs on validation and test data in the run, up to 512 MiB"
    )


class EngineSection(Section):
    """How and where the computation runs; results do not depend on it beyond rounding."""

    name: EngineName = Field("auto", description="how members are computed; auto measures and picks the fastest")
    device: str = Field("auto", description="auto takes cuda, then mps, then cpu; cuda:1 is the second of several")
    precision: Literal["float32", "bf16"] = Field("float32", description="precision of the networks; bf16 by autocast")
    compile: bool = Field(False, description="compile the networks first: slow to start, then faster on a GPU")
    recompute: bool = Field(
        False, description="compute activations again in the backward pass instead of storing them: slower, less memory"
    )

    rank_timeout: float = Field(
        45.0,
        gt=5,
        description="seconds without a sign of life after which a process of torchrun counts as lost, and all end",
    )
    journal: bool = Field(
        False,
        description="keep what processes of torchrun exchange since the last checkpoint, so that one that was killed "
        "is started again alone and catches up",
    )

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
            raise ValueError("must be auto, cpu, mps, cuda or cuda:N")
        return device


def _members_text(section: EnsembleSection) -> tuple[str, str]:
    return "members", str(section.members)


def _training_text(section: TrainingSection) -> tuple[str, str]:
    weights = section.class_weights
    text = f"{section.epochs} epoch{'s' * (section.epochs > 1)}, batch size {section.batch_size}"
    if weights is not None:
        text += f", class weights {weights if isinstance(weights, str) else ', '.join(f'{w:g}' for w in weights)}"
    return "training", text


def _engine_text(section: EngineSection) -> tuple[str, str]:
    return "engine", f"{section.name}, device {section.device}"


def _sweep_text(section: SweepSection) -> tuple[str, str]:
    parts = [
        ", ".join(f"{len(values)} × {key}" for key, values in section.grid.items()),
        f"{len(section.variants)} variants" if section.variants else "",
        f"{section.seeds} seeds" if section.seeds > 1 else "",
    ]
    return "sweep", f"{', '.join(filter(None, parts)) or 'one run'}: for ensemblekit sweep; train ignores it"


LOSS = LossEntry("training.loss", base=Loss, default=DEFAULT_LOSS, by_task=DEFAULT_LOSSES)
OPTIMIZER = PluginChoiceEntry(
    "training.optimizer",
    names=optimizer_classes,
    section_of=optimizer_section,
    default="adabelief",
    base=OptimizerPlugin,
    only_training=True,
)


@dataclass(frozen=True)
class NetworkPlan:
    """One network of an ensemble, and what it is built from."""

    index: int
    """The index that its seed is derived from: that of its first member; auxiliary networks follow the members."""
    members: int
    """The number of members that it computes: more than one only for a family."""
    group: Group


@dataclass(frozen=True)
class Spec:
    """A validated spec: every plugin that it names is an instance, every default is filled in."""

    seed: Annotated[int, IntegerEntry("seed")]
    data: Annotated[Dataset, PluginEntry("data", required=True, base=Dataset)]
    model: Annotated[Model, PluginEntry("model", required=True, base=Model)]
    groups: Annotated[tuple[Group, ...], GroupsEntry("ensemble.groups", optimizer=OPTIMIZER, loss=LOSS)]
    """Groups of members with models of their own, and auxiliary networks; empty if all members have `model`."""
    methods: Annotated[tuple[Method, ...], PluginsEntry("method", base=Method, single=True)]
    ensemble: Annotated[
        EnsembleSection,
        EnsembleEntry("ensemble", section=EnsembleSection, text=_members_text, nested=("groups", "combiner")),
    ]
    loss: Annotated[Loss, LOSS]
    optimizer: Annotated[AnyOptimizer, OPTIMIZER]
    schedule: Annotated[
        Schedule,
        PluginEntry("training.schedule", base=Schedule, default="constant", may_lack_name=True, only_training=True),
    ]
    training: Annotated[
        TrainingSection,
        SectionEntry(
            "training", section=TrainingSection, text=_training_text, nested=("loss", "optimizer", "schedule", "mix")
        ),
    ]
    engine: Annotated[EngineSection, SectionEntry("engine", section=EngineSection, text=_engine_text)]
    combiner: Annotated[Combination | None, OptionalPluginEntry("ensemble.combiner", base=Combination)] = None
    """How evaluations and predictions combine the members' outputs; None: as the methods do."""
    mix: Annotated[
        BatchAugmentation | None, OptionalPluginEntry("training.mix", base=BatchAugmentation, only_training=True)
    ] = None
    """How training samples are mixed with others of their batch; None: they are not."""
    metrics: Annotated[tuple[Metric, ...], PluginsEntry("metrics", base=Metric, only_training=True)] = ()
    """Metrics beside the built-in ones."""
    extensions: Annotated[tuple[Extension, ...], PluginsEntry("extensions", base=Extension, only_training=True)] = ()
    sweep: Annotated[
        SweepSection | None,
        OptionalSectionEntry("sweep", section=SweepSection, text=_sweep_text, only_training=True),
    ] = None
    """The runs of a sweep of this spec; a single run ignores it."""
    default_loss: Loss | None = field(default=None, compare=False, repr=False)
    """The loss, if the spec does not name one: where the task is known only once the data is loaded, it decides."""

    @property
    def member_models(self) -> tuple[Model, ...]:
        """The model of each member."""
        return tuple(group.model for group in self.member_groups for _ in range(group.members))

    @property
    def member_groups(self) -> tuple[Group, ...]:
        """The groups of members; a single one if the spec has none."""
        groups = tuple(group for group in self.groups if group.role == "member")
        return groups or (Group(self.ensemble.members, self.model),)

    @property
    def has_groups(self) -> bool:
        """Whether members are in groups of their own; if not, all have `model`."""
        return any(group.role == "member" for group in self.groups)

    @property
    def auxiliary_groups(self) -> tuple[Group, ...]:
        """The groups of auxiliary networks."""
        return tuple(group for group in self.groups if group.role == "auxiliary")

    @property
    def networks(self) -> tuple[NetworkPlan, ...]:
        """The networks in order: those of the members, then the auxiliary ones. A family is one network."""
        plans: list[NetworkPlan] = []
        index = 0
        for group in (*self.member_groups, *self.auxiliary_groups):
            size = group.members if isinstance(group.model, Family) and group.role == "member" else 1
            for _ in range(group.members // size):
                plans.append(NetworkPlan(index, size, group))
                index += size
        return tuple(plans)

    @property
    def known_metrics(self) -> tuple[Metric, ...]:
        """The metrics whose plugins are installed: a run can be used without the others."""
        return tuple(metric for metric in self.metrics if isinstance(metric, Metric))

    def plugins(self, inner: bool = True) -> Iterator[tuple[str, Plugin]]:
        """Yield every plugin of the spec with the dotted path of its section.

        Args:
            inner: Whether to yield also the plugins that are parameters of others.
        """
        for name, entry in ENTRIES.items():
            for path, plugin in entry.plugins(getattr(self, name)):
                yield from _with_inner(path, plugin) if inner else [(path, plugin)]

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as plain tables, with all defaults; `load_spec` reads them back to an equal spec."""
        tables: dict[str, Any] = {}
        # tables before the keys inside them
        for name, entry in sorted(ENTRIES.items(), key=lambda item: "." in item[1].path):
            *parents, key = entry.path.split(".")
            value = entry.write(getattr(self, name))
            table = tables[parents[0]] if parents else tables
            if value is not MISSING:
                table[key] = value
        return tables

    def to_toml(self) -> str:
        """Return the spec as the text of a TOML file."""
        return tomli_w.dumps(self.to_dict())


def _with_inner(path: str, plugin: Plugin) -> Iterator[tuple[str, Plugin]]:
    yield path, plugin
    for key, inner in plugin.inner_plugins():
        yield from _with_inner(f"{path}.{key}", inner)


ENTRIES: dict[str, Entry] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Spec, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
"""The entry of each attribute of `Spec`."""
TRAINING_KINDS = {
    entry.base.kind
    for entry in ENTRIES.values()
    if entry.only_training and isinstance(entry, PluginEntry | PluginsEntry | PluginChoiceEntry)
}
"""The kinds of plugins that only training needs."""
