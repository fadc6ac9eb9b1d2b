"""How often prediction sets or intervals hold the truth, and how large they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ensemblekit.core.losses import pick
from ensemblekit.inference.conformal import uniform_by_position

if TYPE_CHECKING:
    from ensemblekit.inference.combining import Combiner


@dataclass(frozen=True)
class Coverage:
    """What prediction sets or intervals were worth on data."""

    covered: Tensor
    """Whether the truth is in the set (N,), or in the interval (N, C)."""
    sizes: Tensor
    """The number of classes in the set (N,), or the width of the interval (N, C)."""
    classes: Tensor | None = None
    """The true classes (N,); None in regression."""

    def metrics(self) -> dict[str, float]:
        """Return `coverage`, and `mean_set_size` or `mean_interval_width`."""
        size = "mean_interval_width" if self.classes is None else "mean_set_size"
        return {"coverage": float(self.covered.double().mean()), size: float(self.sizes.double().mean())}

    def by_class(self, num_classes: int) -> list[float | None]:
        """Return the coverage of the samples of each class; None for a class without samples."""
        assert self.classes is not None
        parts = [self.covered[self.classes == index] for index in range(num_classes)]
        return [float(part.double().mean()) if len(part) else None for part in parts]

    def by_size(self) -> list[dict[str, Any]]:
        """Return number of samples and coverage of the sets of each size."""
        sizes: Sequence[int] = self.sizes.unique().tolist()
        parts = [(size, self.covered[self.sizes == size]) for size in sizes]
        return [{"size": size, "count": len(part), "coverage": float(part.double().mean())} for size, part in parts]


def measure_coverage(combiner: Combiner, outputs: Tensor, combined: Tensor, targets: Tensor) -> Coverage | None:
    """Measure the prediction sets or intervals of a run on data that it was not fitted to; None if it has none.

    Args:
        combiner: that of the run.
        outputs: the members' outputs (M, N, C), as they learnt them.
        combined: what they combine to (N, C).
        targets: classes (N,), or real values (N, C) as the members learnt them.
    """
    conformal, loss = combiner.conformal, combiner.loss
    if conformal is None:
        return None
    if conformal.is_for_classes:
        classes = (targets.flatten() > 0 if loss.takes == "margins" else targets).long()
        uniform = uniform_by_position(conformal.seed, "test", len(classes)).to(combined.device)
        sets = conformal.sets(loss.probabilities(combined.double()), uniform)
        return Coverage(pick(sets, classes), sets.sum(dim=-1), classes)
    values, spreads = values_and_spreads(combiner, outputs, combined)
    truth = targets.reshape(len(targets), -1).double()
    if combiner.target_scaling is not None:
        truth = combiner.target_scaling.restore(truth)
    half = conformal.half_widths(spreads)
    return Coverage((truth - values).abs() <= half, 2 * half)


def values_and_spreads(combiner: Combiner, outputs: Tensor, combined: Tensor) -> tuple[Tensor, Tensor]:
    """Return the predicted values (N, C) and the standard deviations over the members (N, C), in the original units."""
    loss = combiner.loss
    values = loss.point(combiner.restored(combined)).double()
    spreads = loss.point(combiner.restored(outputs)).double().std(dim=0, correction=0)
    return values, spreads
