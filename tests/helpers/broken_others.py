"""Data sets, extensions and losses with one fault each, and the checks that must find it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from urllib.request import urlopen

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from ensemblekit import (
    DataError,
    DataInfo,
    Dataset,
    Extension,
    GrowingEnsemble,
    Loss,
    Prepared,
    Splits,
    generator,
    hookimpl,
)

OFFLINE = "offline, it loads or says where to put its files"
VALID = "its samples and targets are valid"
DECLARED = "its declared info matches the loaded data"
PREPARES = "new files can be prepared"
DISJOINT = "its splits do not overlap"
REPRODUCIBLE = "loading is reproducible from the seed"
LIMITS = "limit_train and limit_test are respected"
DATA_TRAINS = "a run on it trains"


def blobs(seed: int, count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4, generator=generator(seed, count)), torch.arange(count) % 3


class GoodData(Dataset):
    """Random inputs of three classes."""

    @property
    def info(self) -> DataInfo:
        return DataInfo("classification", (4,), 3)

    def load(self, seed: int) -> Splits:
        return Splits(blobs(seed, 60), blobs(seed, 30), self.info, classes=("a", "b", "c"))


class PreparesNothing(GoodData):
    """Returns a preparation that it has no use for."""

    def load(self, seed: int) -> Splits:
        return replace(super().load(seed), preparation={"mean": 0.5})


class PreparesFromTensors(GoodData):
    """Returns a preparation that cannot be saved."""

    def load(self, seed: int) -> Splits:
        return replace(super().load(seed), preparation={"mean": torch.zeros(4)})

    def prepare(self, path: Path, preparation: Mapping[str, Any]) -> Prepared:
        return Prepared(torch.zeros(1, 4))


class Downloads(GoodData):
    """Does not catch the error of a failed download."""

    def load(self, seed: int) -> Splits:
        urlopen("http://example.invalid/data")
        return super().load(seed)


class _InACache(GoodData):
    """Needs a file in the cache."""

    def places(self) -> Sequence[Path]:
        return (Path(os.environ["ENSEMBLEKIT_DATA"], "blobs.bin"),)


class SaysNotWhere(_InACache):
    """Does not say where its file goes."""

    def load(self, seed: int) -> Splits:
        raise DataError("blobs are missing", fix="find them")


class SaysNotHow(_InACache):
    """Does not say what to do."""

    def load(self, seed: int) -> Splits:
        raise DataError("blobs are missing", str(self.places()[0]))


class LeavesAPart(_InACache):
    """Leaves half a download behind."""

    def load(self, seed: int) -> Splits:
        file = self.places()[0]
        file.parent.mkdir(parents=True)
        file.write_bytes(b"half")
        raise DataError("the download failed", str(file), "put it there")


class NotANumber(GoodData):
    """Has a nan in its inputs."""

    def load(self, seed: int) -> Splits:
        inputs, targets = blobs(seed, 60)
        inputs[3, 1] = torch.nan
        return Splits((inputs, targets), blobs(seed, 30), self.info)


class OutOfRange(GoodData):
    """Numbers its classes from one."""

    def load(self, seed: int) -> Splits:
        inputs, targets = blobs(seed, 60)
        return Splits((inputs, targets + 1), blobs(seed, 30), self.info)


class TooFewNames(GoodData):
    """Names two of three classes."""

    def load(self, seed: int) -> Splits:
        return Splits(blobs(seed, 60), blobs(seed, 30), self.info, classes=("a", "b"))


class DeclaresOtherwise(GoodData):
    """Declares five features and loads four."""

    @property
    def info(self) -> DataInfo:
        return DataInfo("classification", (5,), 3)

    def load(self, seed: int) -> Splits:
        return Splits(blobs(seed, 60), blobs(seed, 30), DataInfo("classification", (4,), 3))


class DeclaresOtherClasses(DeclaresOtherwise):
    """Declares four classes and loads three."""

    @property
    def info(self) -> DataInfo:
        return DataInfo("classification", (4,), 4)


class TestsOnTraining(GoodData):
    """Tests on samples that it trains on, in another order."""

    def load(self, seed: int) -> Splits:
        inputs, targets = blobs(seed, 60)
        return Splits((inputs, targets), (inputs.flip(0)[:20].clone(), targets.flip(0)[:20].clone()), self.info)


class TestsPartlyOnTraining(GoodData):
    """Tests on thirty samples, nine of which it trains on."""

    def load(self, seed: int) -> Splits:
        train, test = blobs(seed, 60), blobs(seed, 30)
        for own, others in zip(test, train, strict=True):
            own[:9] = others[40:49]
        return Splits(train, test, self.info)


class NoSeed(GoodData):
    """Does not take a seed."""

    def load(self) -> Splits:
        return super().load(0)


class Slips(GoodData):
    """Has a typo in load()."""

    def load(self, seed: int) -> Splits:
        return super().load(sead)  # noqa: F821 - the fault


class LoadsNothing(GoodData):
    """Does not return its splits."""

    def load(self, seed: int) -> Splits:
        super().load(seed)


class SameMemory(GoodData):
    """Returns the training data for both splits."""

    def load(self, seed: int) -> Splits:
        part = blobs(seed, 60)
        return Splits(part, (part[0], part[1]), self.info)


class IgnoresTheSeed(GoodData):
    """Samples from torch's global generator."""

    def load(self, seed: int) -> Splits:
        return Splits((torch.randn(60, 4), torch.arange(60) % 3), blobs(seed, 30), self.info)


class _Shuffling(TorchDataset[Any]):
    targets = torch.zeros(60, dtype=torch.int64)

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        return torch.full((4,), float(self.reads)), 0


class AnotherEveryTime(GoodData):
    """Returns another sample whenever one is read."""

    storage: Literal["stream"] = Field("stream", description="how it is read")

    def load(self, seed: int) -> Splits:
        return Splits(_Shuffling(), blobs(seed, 30), self.info)


class LimitsItself(GoodData):
    """Applies the limit before the validation split is cut."""

    def load(self, seed: int) -> Splits:
        inputs, targets = blobs(seed, 60)
        return Splits((inputs[: self.limit_train], targets[: self.limit_train]), blobs(seed, 30), self.info)


class NeedsManySamples(GoodData):
    """Cannot be loaded with a small limit."""

    def load(self, seed: int) -> Splits:
        if self.limit_train is not None and self.limit_train < 25:
            raise ValueError("too few samples for a stratified split")
        return super().load(seed)


OBSERVES = "it only observes the run"
FINISHES = "a run with it finishes and resumes"
SAME_WITHOUT = "training is bit-identical without it"


class GoodExtension(Extension):
    """Reads the metrics."""

    @hookimpl
    def epoch_finished(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        assert metrics["epoch"] == epoch


class ChangesTheLoss(Extension):
    """Changes the objective, as only a method may."""

    @hookimpl
    def member_loss(self, outputs: Tensor) -> Tensor:
        return outputs.square().sum(dim=-1)


class ChangesTheRate(Extension):
    """Changes the learning rate, as only a method may."""

    @hookimpl
    def learning_rate(self, base: float) -> float:
        return base / 2


class Freezes(Extension):
    """Freezes a member."""

    @hookimpl
    def epoch_started(self, ensemble: GrowingEnsemble) -> None:
        ensemble.freeze(0)


class WantsAMetric(GoodExtension):
    """Reads a metric that does not exist."""

    @hookimpl
    def run_finished(self, metrics: Mapping[str, Any]) -> None:
        print(metrics["beauty"])


class FirstEpochOnly(GoodExtension):
    """Cannot be resumed, since it sets itself up in the first epoch."""

    _seen: Any = PrivateAttr(None)

    @hookimpl
    def epoch_started(self, epoch: int) -> None:
        if epoch == 1:
            self._seen = []
        self._seen.append(epoch)


PER_SAMPLE = "it returns one loss per sample for every dtype and device"
ALONE = "a sample's loss does not depend on the other samples"
GRADIENTS = "its gradients are correct and finite"
SECOND = "its declared second derivative is correct"
PROBABILITIES = "its probabilities sum to one"
LOSS_TRAINS = "a run with it trains"


class GoodLoss(Loss):
    """The squared logit of the true class's complement."""

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (1 - outputs.softmax(dim=-1)).square().gather(-1, target.expand(outputs.shape[:-1])[..., None])[..., 0]


class Reduced(GoodLoss):
    """Averages over the batch."""

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        return super().per_sample(outputs, target).mean(dim=-1)


class Centred(GoodLoss):
    """Subtracts the batch's mean."""

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        losses = super().per_sample(outputs, target)
        return losses - losses.mean(dim=-1, keepdim=True) / 2


class RootAtZero(GoodLoss):
    """Has no finite gradient at zero."""

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        return super().per_sample(outputs, target) + (0 * outputs).square().sum(dim=-1).sqrt()

    def quadratic_form(self, at: Tensor, target: Tensor, direction: Tensor) -> Tensor:
        return GoodLoss().quadratic_form(at, target, direction)


class WrongCurvature(GoodLoss):
    """Declares a wrong second derivative."""

    def quadratic_form(self, at: Tensor, target: Tensor, direction: Tensor) -> Tensor:
        return direction.square().sum(dim=-1)


class NoProbabilities(GoodLoss):
    """Returns logits as probabilities."""

    def probabilities(self, outputs: Tensor) -> Tensor:
        return outputs


class OtherLogarithm(GoodLoss):
    """Returns the outputs themselves as the logarithm of probabilities."""

    def log_probabilities(self, outputs: Tensor) -> Tensor:
        return outputs


class TooFewOutputs(GoodLoss):
    """Asks for networks with a single output, whatever the number of classes."""

    def num_outputs(self, info: DataInfo) -> int:
        return 1


FAULTS: list[tuple[type, set[str], tuple[str, ...]]] = [
    (Downloads, {OFFLINE}, ("URLError", "never connects to the network", "Downloads.load")),
    (SaysNotWhere, {OFFLINE}, ("blobs.bin", "self.places()")),
    (SaysNotHow, {OFFLINE}, ("a DataError that says what to do",)),
    (LeavesAPart, {OFFLINE}, ("no files after a failed download", "blobs.bin", "LeavesAPart.load")),
    (NotANumber, {VALID}, ("not a finite number", "sample 3", "NotANumber.load")),
    (OutOfRange, {VALID}, ("class indices from 0 to 2, got 3",)),
    (TooFewNames, {VALID}, ("a name for each of the 3 classes", "2 names: a, b")),
    (DeclaresOtherwise, {DECLARED}, ("(5,)", "(4,)", "DeclaresOtherwise.info")),
    (DeclaresOtherClasses, {VALID}, ("4 inputs and 3 classes", "`info` declares 4 inputs and 4 classes")),
    (PreparesNothing, {PREPARES}, ("a prepare() for the preparation", "PreparesNothing.load")),
    (PreparesFromTensors, {VALID}, ("a preparation that JSON cannot save", "not JSON serializable")),
    (TestsOnTraining, {DISJOINT}, ("no samples of train in test", "100% of its samples")),
    (TestsPartlyOnTraining, {DISJOINT}, ("no samples of train in test", "30% of its samples")),
    (NoSeed, {OFFLINE}, ("load(seed)", "load() ->", "add the argument", "NoSeed.load")),
    (Slips, {OFFLINE}, ("expected: no exception", "NameError", "load(), ", "super().load(sead)")),
    (LoadsNothing, {OFFLINE}, ("ensemblekit.Splits", "got: None", "end load() with return", "LoadsNothing.load")),
    (SameMemory, {DISJOINT}, ("the same memory",)),
    (IgnoresTheSeed, {REPRODUCIBLE}, ("loaded again with the same seed", "IgnoresTheSeed.load")),
    (AnotherEveryTime, {REPRODUCIBLE}, ("in any reading order", "AnotherEveryTime.load")),
    (LimitsItself, {LIMITS}, ("27 samples with limit_train = 27", "24 samples", "LimitsItself.load")),
    (NeedsManySamples, {DATA_TRAINS}, ("ValueError: too few samples", "load(), ")),
    (ChangesTheLoss, {OBSERVES}, ("member_loss", "ensemblekit.Method")),
    (ChangesTheRate, {OBSERVES}, ("learning_rate", "ensemblekit.Method")),
    (Freezes, {SAME_WITHOUT}, ("different weights", "do not freeze", "Freezes.epoch_started")),
    (WantsAMetric, {FINISHES}, ("KeyError: 'beauty'", "run_finished(), ")),
    (FirstEpochOnly, {FINISHES}, ("AttributeError: 'NoneType'", "epoch_started(), ", "self._seen.append(epoch)")),
    (Reduced, {PER_SAMPLE}, ("float32 of shape (2, 4)", "shape (2,)", "Reduced.per_sample")),
    (Centred, {ALONE}, ("single samples", "Centred.per_sample")),
    (RootAtZero, {GRADIENTS}, ("finite gradients", "RootAtZero.per_sample")),
    (WrongCurvature, {SECOND}, ("second derivative along a direction", "WrongCurvature.quadratic_form")),
    (TooFewOutputs, {PER_SAMPLE}, ("out of bounds", "per_sample(), ")),
    (OtherLogarithm, {PROBABILITIES}, ("logarithm of probabilities()", "OtherLogarithm.log_probabilities")),
    (NoProbabilities, {PROBABILITIES}, ("sum to 1", "NoProbabilities.probabilities")),
]
GOOD = (GoodData, GoodExtension, GoodLoss)
