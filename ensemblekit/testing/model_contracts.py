"""Which checks a model has to pass, by how it comes to its outputs."""

from __future__ import annotations

from ensemblekit.core.plugin import Family, Model
from ensemblekit.testing.common import PluginContract
from ensemblekit.testing.family import FamilyContract
from ensemblekit.testing.fitted_model import FittedModelContract, KnownOutputsContract
from ensemblekit.testing.model import ModelContract


def model_contract(plugin: Model) -> PluginContract[Model]:
    """Return the contract of a model."""
    if plugin.knows_outputs:
        return KnownOutputsContract(plugin)
    if plugin.fitted:
        return FittedModelContract(plugin)
    return FamilyContract(plugin) if isinstance(plugin, Family) else ModelContract(plugin)
