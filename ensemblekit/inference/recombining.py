"""Another combination of a trained ensemble's members: what would the run be with another combiner?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ensemblekit.core.errors import UsageError
from ensemblekit.core.plugin import Combination
from ensemblekit.inference.combining import Combiner
from ensemblekit.inference.kept_outputs import RunLoader
from ensemblekit.runs.run import read_spec
from ensemblekit.spec.reader import build_plugin


def other_combiner(loader: RunLoader, value: str | Mapping[str, Any], data: Any = None) -> Combiner:
    """Return how the members of a run would be combined by another combiner.

    Parameters of it are fitted to the kept validation outputs. A calibration of the run belongs to its own combination
    and is not used, unless that is the one named.

    Args:
        loader: that of the run.
        value: name or table of the combiner.
        data: the same data as for training, if it was passed in Python and the run has kept no outputs.

    Raises:
        SpecError: there is no such combiner.
        UsageError: the run cannot be combined by it.
    """
    own = loader.combiner()
    if value == own.name:
        return own
    spec, where = read_spec(loader.directory, loader.registry), str(loader.directory.path)
    plugin = build_plugin(Combination, value, loader.registry)
    changed = replace(spec, combiner=plugin)
    for problem in (*plugin.check_spec(changed), *plugin.check_data(changed, loader.info)):
        raise UsageError(problem.what, f'combiner "{plugin.name}" for {where}', problem.fix)
    combiner = loader.plain_combiner(changed)
    if combiner.objective.predictor is not None:
        what = f'its predictions are those of "{combiner.objective.predictor}" alone: there is nothing to combine'
        raise UsageError(what, where, "evaluate it without another combiner")
    if not combiner.objective.final_hooks.fits_combiner:
        return combiner
    kept = loader.outputs("validation", data)
    networks = combiner.learned(kept.outputs) if kept.networks is None else kept.networks
    passes = len(kept.outputs) // combiner.num_members
    outputs = networks.unflatten(0, (passes, -1)).mean(dim=0)  # as in training, of the mean over stochastic passes
    return replace(combiner, fitted=combiner.objective.fit_combiner(outputs, combiner.learned_targets(kept.targets)))
