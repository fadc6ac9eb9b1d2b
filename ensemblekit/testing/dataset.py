"""The contract of a data set: it loads the same from the same seed, and says where its files go if they are absent.

No check connects to anything: a data set whose files are absent is only asked what it says of that.
"""

from __future__ import annotations

import inspect
from functools import cached_property, partial

import torch

from ensemblekit.core.errors import DataError
from ensemblekit.core.plugin import Dataset, Splits
from ensemblekit.data.loading import Data, load_data
from ensemblekit.testing.checks import Check, ContractError, difference, form, look_at, takes
from ensemblekit.testing.offline import empty_machine, no_network
from ensemblekit.testing.overlap import shared_samples

SEED = 3
BATCH_SIZE = 7


class DatasetBench:
    """A data set and what it loads, once."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.dataset_class = type(dataset)

    def load(self) -> Splits:
        with no_network():
            return self.dataset.load(SEED)

    @cached_property
    def splits(self) -> Splits:
        return self.load()

    @cached_property
    def data(self) -> Data:
        return self.ready(self.dataset)

    def ready(self, dataset: Dataset) -> Data:
        with no_network():
            return load_data(dataset, SEED)


def dataset_checks(dataset: Dataset) -> list[Check]:
    """The checks of a data set besides those of any plugin."""
    bench = DatasetBench(dataset)
    loads = Check("without network and files it loads, or says where files go", dataset, partial(offline, bench))
    if _files_are_absent(dataset):
        return [loads]
    sound = Check("its samples and targets are valid", dataset, partial(valid, bench), (loads,))
    claims = {
        "what it declares is what it loads": declared_info,
        "its parts have no samples in common": disjoint,
        "the same seed gives the same samples in the same order": stable,
        "limits are respected": limits,
    }
    others = [Check(name, dataset, partial(function, bench), (loads, sound)) for name, function in claims.items()]
    return [loads, sound, *others]


def _files_are_absent(dataset: Dataset) -> bool:
    try:
        return bool(dataset.places()) and dataset.found_at() is None
    except Exception:  # the checks will say what is wrong with it
        return False


def offline(bench: DatasetBench) -> None:
    """On a machine that has nothing: it loads, or a `DataError` names the place and leaves nothing half-made there."""
    where = look_at(bench.dataset_class, "load")
    if not takes(bench.dataset.load, SEED):
        fix = "take the seed, whether or not there is anything random to derive from it"
        raise ContractError("load(seed)", f"load{inspect.signature(bench.dataset.load)}", where, fix)
    with empty_machine() as folder:
        places = [str(place) for place in bench.dataset.places()]
        try:
            loaded: object = bench.dataset.load(SEED)
        except DataError as error:
            _check_advice(error, places, where)
            left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
            if left:
                fix = "download to a temporary name, and rename it when it is whole"
                raise ContractError("no files after a failed download", ", ".join(left), where, fix) from None
            return
        except Exception as error:
            if not _is_of_the_machine(error):
                raise
            raise ContractError(
                "the data, or a DataError(what, where, fix) if its files are not there",
                f"{type(error).__name__}: {error}",
                where,
                "catch what a missing file or a failed download raises, and say where files may be put",
            ) from error
    if not isinstance(loaded, Splits):
        raise ContractError("ensemblekit.Splits from load()", form(loaded), where, "end it with return Splits(…)")


def _is_of_the_machine(error: BaseException | None) -> bool:
    """Whether a missing file or network is behind an error."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error is not None


def _check_advice(error: DataError, places: list[str], where: str) -> None:
    text = str(error)
    if not error.fix:
        raise ContractError("a DataError that says what to do", text, where, "give it a third argument") from None
    if places and not any(place in text for place in places):
        expected = f"an error that names where files are looked for, such as {places[0]}"
        raise ContractError(expected, text, where, "put self.places() into the message") from None


def valid(bench: DatasetBench) -> None:
    """Everything that the core checks before a run: forms, finite numbers, class indices in range."""
    try:
        data = bench.data
    except DataError as error:
        what = "samples of one form, finite, each with a target in range"
        raise ContractError(
            what, f"{error.what}; {error.where}", look_at(bench.dataset_class, "load"), error.fix
        ) from error
    classes = bench.splits.classes
    info = data.info
    if classes is not None and info.task == "classification" and len(classes) != max(2, info.num_outputs):
        got = f"{len(classes)} names: {', '.join(classes[:5])}"
        where = look_at(bench.dataset_class, "load")
        raise ContractError(f"a name for each of the {info.num_outputs} classes, or none at all", got, where)


def declared_info(bench: DatasetBench) -> None:
    """A spec is checked by what is declared, before anything is loaded."""
    declared, found = bench.dataset.info, bench.data.info
    if declared is not None and declared != found:
        where = look_at(bench.dataset_class, "info")
        raise ContractError(str(declared), f"{found} when it is loaded", where, "declare what load() gives, or None")


def disjoint(bench: DatasetBench) -> None:
    """No part is, or repeats, another part; single duplicates, which real data has, are no fault."""
    splits = bench.splits
    parts = {"train": splits.train, "test": splits.test, "validation": splits.validation}
    given = [(name, part) for name, part in parts.items() if part is not None]
    for place, (name, part) in enumerate(given):
        for other_name, other in given[place + 1 :]:
            shared = shared_samples(part, other)
            if shared:
                raise ContractError(
                    f"other samples in {other_name} than in {name}",
                    shared,
                    look_at(bench.dataset_class, "load"),
                    "cut the data into parts once, as with ensemblekit.hold_out",
                )


def stable(bench: DatasetBench) -> None:
    """Samples keep their index, by which weights are drawn and runs are resumed."""
    where = look_at(bench.dataset_class, "load")
    fix = "derive everything random from the given seed: ensemblekit.generator(seed, …)"
    first = bench.data
    torch.default_generator.manual_seed(1)
    second = bench.ready(bench.dataset)
    for name in ("train", "validation", "test"):
        left, right = getattr(first, name), getattr(second, name)
        if left is None or right is None:
            continue
        if len(left) != len(right) or not torch.equal(left.targets, right.targets):
            got = f"others in the part {name}"
            raise ContractError("the same samples when it is loaded again with the same seed", got, where, fix)
        for one, other in zip(left.batches(BATCH_SIZE), right.batches(BATCH_SIZE), strict=True):
            if not torch.equal(one.inputs, other.inputs):
                got = f"{difference(other.inputs, one.inputs, 0.0)} in samples {one.index.tolist()} of {name}"
                raise ContractError("the same inputs when it is loaded again with the same seed", got, where, fix)
    plain = {
        int(index): sample
        for batch in first.train.batches(BATCH_SIZE)
        for index, sample in zip(batch.index, batch.inputs, strict=True)
    }
    for batch in first.train.training_batches(BATCH_SIZE, SEED, epoch=1, augment=False):
        for index, sample in zip(batch.index.tolist(), batch.inputs, strict=True):
            if not torch.equal(sample, plain[index]):
                got = difference(sample, plain[index], 0.0)
                fix = "let __getitem__ be a function of the index alone"
                raise ContractError(f"the same sample {index} in whatever order samples are read", got, where, fix)


def limits(bench: DatasetBench) -> None:
    """`limit_train` and `limit_test` are the core's to apply, to all that `load` gives."""
    train, test = (max(1, len(part) // 2) for part in (bench.data.train, bench.data.test))
    limited = bench.ready(bench.dataset.model_copy(update={"limit_train": train, "limit_test": test}))
    for name, part, expected in (("limit_train", limited.train, train), ("limit_test", limited.test, test)):
        if len(part) != expected:
            raise ContractError(
                f"{expected} samples with {name} = {expected}",
                f"{len(part)} samples",
                look_at(bench.dataset_class, "load"),
                f"let load() give all samples, whatever {name} is",
            )
