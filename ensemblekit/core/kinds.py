"""The kinds of plugins: one row for each. Every list of kinds in the project comes from this table.

A new kind is a row here and a base class. Rows name code as "module:attribute", so that listing kinds imports nothing.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ensemblekit.core.plugin import Plugin


@dataclass(frozen=True)
class Kind:
    """One kind of plugin."""

    name: str
    plural: str
    section: str
    """The header of its table in a spec."""
    base: str
    """The class that plugins of this kind derive from."""
    contract: str
    """The checks that such a plugin has to pass."""
    template: str = ""
    """The summary of a package that `ensemblekit new` starts with one; empty if there is no template."""
    built_in: str = ""
    """What can be named beside plugins, and where it is listed; empty if there is nothing."""

    @property
    def group(self) -> str:
        """The group of entry points that registers plugins of this kind."""
        return f"ensemblekit.{self.plural}"

    @property
    def base_class(self) -> type[Plugin]:
        """The class that plugins of this kind derive from; imports it."""
        base: type[Plugin] = pkgutil.resolve_name(self.base)
        return base

    @property
    def public_base(self) -> str:
        """The base class as a plugin author imports it."""
        return f"ensemblekit.{self.base.partition(':')[2]}"

    def load_contract(self) -> Any:
        """Import the checks of this kind."""
        return pkgutil.resolve_name(self.contract)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "method",
            "methods",
            "[method]",
            "ensemblekit.core.plugin:Method",
            "ensemblekit.testing.method:MethodContract",
            "An ensembling method for ensemblekit.",
        ),
        Kind(
            "model",
            "models",
            "[model]",
            "ensemblekit.core.plugin:Model",
            "ensemblekit.testing.model_contracts:model_contract",
            "A base model for ensemblekit.",
        ),
        Kind(
            "dataset",
            "datasets",
            "[data]",
            "ensemblekit.core.dataset:Dataset",
            "ensemblekit.testing.dataset:DatasetContract",
            "A data set for ensemblekit.",
        ),
        Kind(
            "loss",
            "losses",
            "[training.loss]",
            "ensemblekit.core.losses:Loss",
            "ensemblekit.testing.loss:LossContract",
        ),
        Kind(
            "combiner",
            "combiners",
            "[ensemble.combiner]",
            "ensemblekit.core.plugin:Combination",
            "ensemblekit.testing.combiner:CombinerContract",
            "A combiner of members' outputs for ensemblekit.",
        ),
        Kind(
            "optimizer",
            "optimizers",
            "[training.optimizer]",
            "ensemblekit.spec.optimizers:OptimizerPlugin",
            "ensemblekit.testing.optimizer:OptimizerContract",
            "An optimizer for ensemblekit.",
            built_in="AdaBelief and those of torch.optim: ensemblekit inspect training.optimizer",
        ),
        Kind(
            "schedule",
            "schedules",
            "[training.schedule]",
            "ensemblekit.spec.schedules:Schedule",
            "ensemblekit.testing.schedule:ScheduleContract",
            "A learning-rate schedule for ensemblekit.",
        ),
        Kind(
            "augmentation",
            "augmentations",
            "[[data.augment]]",
            "ensemblekit.core.augmentation:Augmentation",
            "ensemblekit.testing.augmentation:AugmentationContract",
            "An augmentation of training images for ensemblekit.",
        ),
        Kind(
            "mix",
            "mixes",
            "[training.mix]",
            "ensemblekit.core.augmentation:BatchAugmentation",
            "ensemblekit.testing.mix:MixContract",
            "A mixture of training samples for ensemblekit.",
        ),
        Kind(
            "metric",
            "metrics",
            "[[metrics]]",
            "ensemblekit.core.metrics:Metric",
            "ensemblekit.testing.metric:MetricContract",
            "A metric for ensemblekit.",
        ),
        Kind(
            "extension",
            "extensions",
            "[[extensions]]",
            "ensemblekit.core.plugin:Extension",
            "ensemblekit.testing.extension:ExtensionContract",
            "An extension for ensemblekit.",
        ),
    )
}
