"""Losses with one fault each in what they say about their outputs, and the checks that must find it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from ensemblekit import DataInfo, Problem, Spec
from helpers.broken_others import LOSS_TRAINS, PER_SAMPLE, GoodLoss
from helpers.probabilistic_losses import NormalNLL, Pinball

SLICES = "the parts of its outputs add up"
POINT = "its point prediction has a value for each target"
RESCALE = "its outputs can be converted to other units"


class ForTwoClasses(GoodLoss):
    """Can be used for two classes only."""

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        if info.num_outputs != 2:
            yield Problem("", "not two classes", "use another loss")


class ForOneValue(NormalNLL):
    """Can be used for one real value only."""

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        if info.num_outputs != 1 or info.task != "regression":
            yield Problem("", "not one real value", "use another loss")


GOOD = (NormalNLL, Pinball, ForTwoClasses, ForOneValue)


class ForNobody(GoodLoss):
    """Accepts no data."""

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        yield Problem("", "not today", "try tomorrow")


class SmallBatchesOnly(GoodLoss):
    """Cannot take more than four samples."""

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        if outputs.shape[-2] > 4:
            raise ValueError("too many samples")
        return super().per_sample(outputs, target)


class MissingSlice(NormalNLL):
    """Does not name its variance."""

    def slices(self, num_outputs: int) -> Mapping[str, int]:
        return {"mean": num_outputs // 2}


class KeepsItsUnits(NormalNLL):
    """Does not convert anything."""

    def rescale(self, outputs: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        return outputs


class RescalesOneWay(NormalNLL):
    """Rounds when it converts."""

    def rescale(self, outputs: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        return super().rescale(outputs, convert).round()


class TwoPoints(NormalNLL):
    """Gives all its outputs as the point prediction, and accepts all data."""

    def point(self, outputs: Tensor) -> Tensor:
        return outputs

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        return ()


class DefaultRescale(NormalNLL):
    """Does not say how its variance is converted."""

    def rescale(self, outputs: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        return convert(outputs)


FAULTS: list[tuple[type, set[str], tuple[str, ...]]] = [
    (ForNobody, {PER_SAMPLE}, ("not today", "ForNobody.check_data")),
    (SmallBatchesOnly, {LOSS_TRAINS}, ("ValueError: too many samples", "per_sample(), ")),
    (MissingSlice, {SLICES}, ("add up to the 4 outputs", "MissingSlice.slices")),
    (TwoPoints, {POINT}, ("shape (2, 4, 2)", "shape (2, 4, 4)", "TwoPoints.point")),
    (KeepsItsUnits, {RESCALE}, ("the point prediction in other units", "KeepsItsUnits.rescale")),
    (RescalesOneWay, {RESCALE}, ("a conversion and its inverse", "RescalesOneWay.rescale")),
    (DefaultRescale, {RESCALE}, ("2 values of the targets", "DefaultRescale.rescale")),
]
