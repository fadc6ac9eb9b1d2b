"""The contract of a data set: it loads the same samples from the same seed, and says where missing files belong.

No check connects to the network: a data set whose files are missing is only asked for its error message.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from ensemblekit.core.dataset import Dataset, Splits
from ensemblekit.core.errors import DataError
from ensemblekit.core.plugin import PREDICTED
from ensemblekit.core.tasks import TASKS
from ensemblekit.data.loading import Data, load_data
from ensemblekit.testing.checks import Check, check
from ensemblekit.testing.common import PluginContract
from ensemblekit.testing.offline import empty_machine, no_network
from ensemblekit.testing.overlap import describe_overlap
from ensemblekit.testing.reviews import accepts, describe, mismatch
from ensemblekit.testing.toy_run import NUM_TEST, NUM_TRAIN, toy_registry, toy_spec, train_toy_run

SEED = 3
BATCH_SIZE = 7


class DatasetContract(PluginContract[Dataset]):
    """The checks of a data set."""

    kind = "dataset"

    def checks(self) -> list[Check]:
        """All checks; if the files are missing, only those that need none of them."""
        return self.select(PluginContract, DatasetContract.offline) if self._files_are_missing() else super().checks()

    def _files_are_missing(self) -> bool:
        try:
            return bool(self.plugin.places()) and self.plugin.found_at() is None
        except Exception:  # the checks report what is wrong with these methods
            return False

    @cached_property
    def splits(self) -> Splits:
        """The result of `load`."""
        with no_network():
            return self.plugin.load(SEED)

    @cached_property
    def data(self) -> Data:
        """The data as a run would use it."""
        return self._prepared(self.plugin)

    def _prepared(self, dataset: Dataset) -> Data:
        with no_network():
            return load_data(dataset, SEED)

    @check("offline, it loads or says where to put its files")
    def offline(self) -> None:
        """Without network and files it loads, or raises a helpful `DataError` and leaves no partial files."""
        if not accepts(self.plugin.load, SEED):
            got = f"load{inspect.signature(self.plugin.load)}"
            raise self.violation("load(seed)", got, "load", "add the argument, even if nothing is random")
        with empty_machine() as folder:
            places = [str(place) for place in self.plugin.places()]
            try:
                loaded: object = self.plugin.load(SEED)
            except DataError as error:
                self._check_advice(error, places)
                left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
                if left:
                    fix = "download to a temporary name, and rename the file when it is complete"
                    raise self.violation("no files after a failed download", ", ".join(left), "load", fix) from None
                return
            except Exception as error:
                if not _has_os_error(error):
                    raise
                raise self.violation(
                    "the data, or a DataError(what, where, fix) if files are missing",
                    f"{type(error).__name__}: {error}",
                    "load",
                    "catch the error of a missing file or a failed download, and say where the files can be put",
                ) from error
        if not isinstance(loaded, Splits):
            raise self.violation(
                "ensemblekit.Splits from load()", describe(loaded), "load", "end load() with return Splits(…)"
            )

    def _check_advice(self, error: DataError, places: list[str]) -> None:
        text = str(error)
        if not error.fix:
            fix = "give the DataError a third argument"
            raise self.violation("a DataError that says what to do", text, "load", fix) from None
        if places and not any(place in text for place in places):
            expected = f"an error that names a directory or file to put the data in, such as {places[0]}"
            raise self.violation(expected, text, "load", "add self.places() to the message") from None

    @check("its samples and targets are valid", needs=[offline])
    def valid(self) -> None:
        """Everything that the core checks before a run: equal shapes, finite numbers, class indices in range."""
        try:
            info = self.data.info
        except DataError as error:
            expected = "finite samples of one shape, each with a target in range"
            raise self.violation(expected, f"{error.what}; {error.where}", "load", error.fix) from error
        names = self.splits.classes
        named = info.num_outputs if info.task == "multilabel" else max(2, info.num_outputs)
        if names is not None and TASKS[info.task].has_probabilities and len(names) != named:
            got = f"{len(names)} names: {', '.join(names[:5])}"
            what = f"a name for each of the {info.num_outputs} {PREDICTED[info.task]}, or no names"
            raise self.violation(what, got, "load")

    @check("its declared info matches the loaded data", needs=[offline, valid])
    def declared_info(self) -> None:
        """A spec is validated against `info` before anything is loaded."""
        declared, loaded = self.plugin.info, self.data.info
        if declared is not None and declared != loaded:
            fix = "declare the info that load() returns, or None"
            raise self.violation(str(declared), f"{loaded} after loading", "info", fix)

    @check("new files can be prepared", needs=[offline, valid])
    def preparation(self) -> None:
        """If `load` returns a preparation, there is a `prepare` that takes it."""
        preparation = self.splits.preparation
        if preparation is None:
            return
        if type(self.plugin).prepare is Dataset.prepare:
            fix = "override prepare(self, path, preparation), or return no preparation"
            raise self.violation("a prepare() for the preparation of load()", "none", "load", fix)
        if not accepts(self.plugin.prepare, Path("new.csv"), preparation):
            got = f"prepare{inspect.signature(self.plugin.prepare)}"
            raise self.violation("prepare(path, preparation)", got, "prepare", "take both arguments")

    @check("its splits do not overlap", needs=[offline, valid])
    def disjoint(self) -> None:
        """No split repeats another one; a few duplicates, as real data has them, are allowed."""
        parts = {"train": self.splits.train, "test": self.splits.test, "validation": self.splits.validation}
        splits = [(name, part) for name, part in parts.items() if part is not None]
        for index, (name, part) in enumerate(splits):
            for other_name, other in splits[index + 1 :]:
                overlap = describe_overlap(part, other)
                if overlap:
                    fix = "split the data once, for example with ensemblekit.hold_out"
                    raise self.violation(f"no samples of {name} in {other_name}", overlap, "load", fix)

    @check("loading is reproducible from the seed", needs=[offline, valid])
    def reproducible(self) -> None:
        """Samples keep their index, on which sample weights and resumed runs depend."""
        torch.default_generator.manual_seed(1)
        again = self._prepared(self.plugin)
        expected = "the same samples when loaded again with the same seed"
        fix = "derive all randomness from the seed: ensemblekit.generator(seed, …)"
        for name in ("train", "validation", "test"):
            left, right = getattr(self.data, name), getattr(again, name)
            if left is None or right is None:
                continue
            if len(left) != len(right) or not torch.equal(left.targets, right.targets):
                raise self.violation(expected, f"other targets in {name}", "load", fix)
            for one, other in zip(left.batches(BATCH_SIZE), right.batches(BATCH_SIZE), strict=True):
                if wrong := mismatch(other.inputs, one.inputs, 0.0):
                    got = f"{wrong} in samples {one.index.tolist()} of {name}"
                    raise self.violation(expected, got, "load", fix)
        self._check_order()

    def _check_order(self) -> None:
        """Training reads samples in another order than evaluation does, and must get the same ones."""
        plain = {
            int(index): sample
            for batch in self.data.train.batches(BATCH_SIZE)
            for index, sample in zip(batch.index, batch.inputs, strict=True)
        }
        for batch in self.data.train.training_batches(BATCH_SIZE, SEED, epoch=1, augment=False):
            for index, sample in zip(batch.index.tolist(), batch.inputs, strict=True):
                if wrong := mismatch(sample, plain[index], 0.0):
                    fix = "let __getitem__ depend on the index alone"
                    raise self.violation(f"the same sample {index} in any reading order", wrong, "load", fix)

    @check("limit_train and limit_test are respected", needs=[offline, valid])
    def limits(self) -> None:
        """The core applies the limits to everything that `load` returns."""
        train, test = (max(1, len(part) // 2) for part in (self.data.train, self.data.test))
        limited = self._prepared(self.plugin.model_copy(update={"limit_train": train, "limit_test": test}))
        for name, part, expected in (("limit_train", limited.train, train), ("limit_test", limited.test, test)):
            if len(part) != expected:
                raise self.violation(
                    f"{expected} samples with {name} = {expected}",
                    f"{len(part)} samples",
                    "load",
                    f"return all samples from load(), whatever {name} is",
                )

    @check("a run on it trains", needs=[offline, valid, reproducible, limits])
    def training(self) -> None:
        """One epoch through the ordinary training path, on a few samples of this data set."""
        registry = toy_registry(self.plugin)
        few = self.plugin.model_copy(update={"limit_train": NUM_TRAIN, "limit_test": NUM_TEST})
        loss = TASKS[self.data.info.task].default_loss()
        with no_network():
            train_toy_run(replace(toy_spec(registry), data=few, loss=loss), registry)


def _has_os_error(error: BaseException | None) -> bool:
    """Whether a missing file or network is the cause of an error."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error is not None
