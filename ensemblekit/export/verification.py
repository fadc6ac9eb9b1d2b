"""Runs an exported graph beside the original, on the same samples, and measures how far their outputs differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ensemblekit.core.errors import NumericError
from ensemblekit.core.seeds import generator
from ensemblekit.export.graph_outputs import graph_outputs
from ensemblekit.export.samples import Samples
from ensemblekit.inference.combining import Combiner
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.inference.inputs import as_inputs

TOLERANCE = 1e-4
"""Largest difference: of probabilities and small numbers absolute, of those above 1 relative, of predictions of
standardised targets in standard deviations of the targets."""
ROUNDING = 1e-6
"""Relative size of changes of the inputs that stand for rounding."""
TRIALS = 8
"""How often inputs are changed to see whether rounding decides an output."""
Runner = Callable[[Sequence[Tensor]], Mapping[str, Tensor]]
"""Runs a graph that was read back from its file: inputs to outputs by name."""


@dataclass(frozen=True)
class Agreement:
    """How far the outputs of a graph differ from those of the original."""

    differences: Mapping[str, float]
    """The largest one of each output."""
    samples: str
    """What was compared: `64 test samples`."""
    batch_sizes: tuple[int, ...]
    num_unstable: int = 0
    """Samples that were left out since the original's own outputs change by more if inputs change by rounding."""

    @property
    def largest(self) -> float:
        """The largest difference of all outputs."""
        return max(self.differences.values())


def verify(ensemble: Ensemble, samples: Samples, run: Runner, name: str) -> Agreement:
    """Compare a graph with the original on batches of several sizes.

    Raises:
        NumericError: an output differs by more than `TOLERANCE`, and not since rounding decides it.
    """
    sizes = tuple(sorted({1, min(3, len(samples)), len(samples)}))
    expected = reference(ensemble, samples.inputs)
    by_sample = torch.zeros(len(expected), len(samples), dtype=torch.float64)
    for size in sizes:
        batch = samples.first(size)
        actual = run(batch.raw)
        own = reference(ensemble, batch.inputs)
        found = [difference(ensemble.combiner, key, actual[key], own[key]) for key in expected]
        by_sample[:, :size] = by_sample[:, :size].maximum(torch.stack(found))
    wrong = (by_sample > TOLERANCE).any(dim=0)
    unstable = _unstable(ensemble, samples.inputs, expected) & wrong if bool(wrong.any()) else wrong
    kept = by_sample[:, ~unstable]
    largest = kept.amax(dim=1) if kept.numel() else torch.full((len(expected),), torch.inf)
    agreement = Agreement(
        dict(zip(expected, largest.tolist(), strict=True)), samples.description, sizes, int(unstable.sum())
    )
    if not agreement.largest <= TOLERANCE:
        worst = max(agreement.differences, key=agreement.differences.__getitem__)
        what = f"the output {worst} of the graph differs from the original by {agreement.largest:.2g}"
        fix = "nothing was written; try the other --format, and report the model of the run"
        raise NumericError(f"{what}, more than {TOLERANCE:g}, on {samples.description}", name, fix)
    return agreement


def reference(ensemble: Ensemble, inputs: Tensor) -> dict[str, Tensor]:
    """Return what the original computes, by the names of a graph's outputs."""
    with torch.no_grad():
        outputs = ensemble.network_outputs(inputs)
        return graph_outputs(ensemble.combiner, ensemble.info.task, outputs, ensemble.num_passes or 1)


def difference(combiner: Combiner, name: str, actual: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference of each sample (B,), float64, in the units of `TOLERANCE`; nan counts as inf."""
    actual, expected = actual.double(), expected.double()
    scaling = combiner.target_scaling
    if scaling is not None and name == "member_outputs":
        actual, expected = combiner.learned(actual).double(), combiner.learned(expected).double()
        scaling = None
    units = expected.abs().clamp_min(1) if scaling is None else torch.tensor(scaling.std, dtype=torch.float64)
    differences = torch.where(actual == expected, 0, ((actual - expected) / units).abs())
    differences = differences.nan_to_num(torch.inf, torch.inf)
    batch_first = differences.movedim(1, 0) if name == "member_outputs" else differences
    return batch_first.flatten(1).amax(dim=1) if batch_first.ndim > 1 else batch_first


def _unstable(ensemble: Ensemble, inputs: Tensor, expected: Mapping[str, Tensor]) -> Tensor:
    """Return for which samples (N,) rounding decides: a sign or a threshold in the networks is as good as met."""
    prepared = as_inputs(inputs, ensemble.info.input_shape, ensemble.transform, ensemble.device, ensemble.dtype)
    source, unstable = generator(ensemble.spec.seed, "export", "rounding"), torch.zeros(len(inputs), dtype=torch.bool)
    scale = ROUNDING * prepared.abs().amax()
    for _ in range(TRIALS):
        noise = torch.rand(prepared.shape, generator=source, dtype=prepared.dtype) * 2 - 1
        changed = reference(ensemble, prepared + scale * noise)
        for name, values in expected.items():
            unstable |= difference(ensemble.combiner, name, changed[name], values) > TOLERANCE
    return unstable
