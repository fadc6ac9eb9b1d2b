"""Batches: their content and order, from memory and from a stream."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from ensemblekit import (
    Data,
    DataError,
    DataInfo,
    Dataset,
    ImageDataset,
    PluginError,
    Splits,
    data_from_datasets,
    load_data,
)
from ensemblekit.data import sources

IMAGES = torch.randint(256, (101, 3, 12, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(101) % 4
TEST_IMAGES, TEST_CLASSES = IMAGES[:40].flip(0), CLASSES[:40].flip(0)
INFO = DataInfo("classification", (3, 12, 10), 4)


class MapStyle(TorchDataset[Any]):
    """Samples by number, counted as they are read; `targets` only if asked for."""

    def __init__(self, inputs: Any, targets: Any, with_targets: bool = True) -> None:
        self.inputs, self.labels, self.reads = inputs, targets, 0
        if with_targets:
            self.targets = targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.reads += 1
        return self.inputs[index], self.labels[index]


class Tensors(ImageDataset):
    """Images as tensors."""

    def load(self, seed: int) -> Splits:
        return Splits((IMAGES, CLASSES), (TEST_IMAGES, TEST_CLASSES), INFO, classes=("a", "b", "c", "d"))


class Mapped(ImageDataset):
    """The same images one by one."""

    def load(self, seed: int) -> Splits:
        train = MapStyle(IMAGES, CLASSES.tolist())
        return Splits(train, MapStyle(TEST_IMAGES, TEST_CLASSES, with_targets=False), INFO)


class Features(Dataset):
    """Tensors or data sets of the test's choice."""

    _train: Any
    _test: Any
    _info: DataInfo = DataInfo("classification", (5,), 2)

    def load(self, seed: int) -> Splits:
        return Splits(self._train, self._test, self._info)


GOOD = (torch.randn(20, 5), torch.arange(20) % 2)


def features(train: Any = GOOD, test: Any = GOOD, info: DataInfo | None = None, **parameters: Any) -> Features:
    dataset = Features(**parameters)
    dataset._train, dataset._test = train, test
    if info is not None:
        dataset._info = info
    return dataset


def everything(data: Data, seed: int = 0, epoch: int = 1) -> list[Tensor]:
    assert data.validation is not None
    batches = [
        *data.train.training_batches(8, seed, epoch),
        *data.train.batches(8),
        *data.validation.batches(8),
        *data.test.batches(8),
    ]
    return [tensor for batch in batches for tensor in (batch.inputs, batch.targets, batch.index)]


def all_equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


# Content of a batch


def test_batches_carry_inputs_targets_and_the_indices_of_the_samples() -> None:
    data = load_data(Tensors(validation_fraction=0), 0)
    for batch in data.train.training_batches(16, seed=0, epoch=3):
        assert batch.inputs.dtype == torch.float32
        assert torch.equal(batch.inputs, IMAGES[batch.index] * torch.tensor(1 / 255))
        assert torch.equal(batch.targets, CLASSES[batch.index])


def test_evaluation_batches_are_in_order_and_complete() -> None:
    batches = list(load_data(Tensors(augment=("crop", "flip")), 0).test.batches(16))
    assert torch.cat([batch.index for batch in batches]).tolist() == list(range(40))
    assert torch.equal(torch.cat([batch.targets for batch in batches]), TEST_CLASSES)
    assert torch.equal(torch.cat([batch.inputs for batch in batches]), TEST_IMAGES * torch.tensor(1 / 255))


@pytest.mark.parametrize(("batch_size", "lengths"), [(50, [50, 51]), (40, [40, 40, 21]), (200, [101]), (1, [1] * 101)])
def test_a_last_training_batch_of_one_sample_joins_the_one_before(batch_size: int, lengths: list[int]) -> None:
    batches = load_data(Tensors(validation_fraction=0), 0).train.training_batches(batch_size, 0, 0)
    assert [len(batch.index) for batch in batches] == lengths


def test_uint8_features_are_scaled_too() -> None:
    table = (torch.full((20, 5), 51, dtype=torch.uint8), torch.arange(20) % 2)
    batch = next(load_data(features(table, table), 0).test.batches(4))
    torch.testing.assert_close(batch.inputs, torch.full((4, 5), 0.2))


def test_regression_targets_are_float32_columns() -> None:
    part = (torch.randn(20, 5), torch.randn(20, dtype=torch.float64))
    data = load_data(features(part, part, DataInfo("regression", (5,), 1)), 0)
    assert (data.test.targets.shape, data.test.targets.dtype) == ((20, 1), torch.float32)
    assert len(data.train) == 18


# Order and randomness


def test_order_and_augmentation_are_functions_of_seed_and_epoch() -> None:
    dataset = Tensors(augment=("crop", "flip", "rotate"), padding=2)
    first = everything(load_data(dataset, 0), seed=5, epoch=2)
    data = load_data(dataset, 0)
    list(data.train.training_batches(8, seed=5, epoch=1))
    torch.manual_seed(123)
    assert all_equal(first, everything(data, seed=5, epoch=2))
    for other in ({"seed": 5, "epoch": 3}, {"seed": 6, "epoch": 2}):
        changed = next(data.train.training_batches(8, **other))
        assert not torch.equal(changed.index, first[2])


def test_the_augmentation_of_a_sample_does_not_depend_on_the_batch_size() -> None:
    train = load_data(Tensors(augment=("crop", "flip", "rotate")), 0).train
    small, large = (torch.cat([batch.inputs for batch in train.training_batches(size, 0, 0)]) for size in (4, 64))
    assert torch.equal(small, large)


@pytest.mark.parametrize("storage", ["memory", "stream"])
def test_batches_leave_torchs_global_generator_and_threads_alone(storage: str) -> None:
    data = load_data(Mapped(storage=storage, augment=("crop", "flip")), 0)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    everything(data)
    assert torch.equal(state, torch.get_rng_state())
    assert threads == torch.get_num_threads()


def test_augment_false_gives_the_plain_images_in_the_same_order() -> None:
    train = load_data(Tensors(augment=("crop", "flip"), validation_fraction=0), 0).train
    plain = next(train.training_batches(8, 0, 0, augment=False))
    augmented = next(train.training_batches(8, 0, 0))
    assert torch.equal(plain.index, augmented.index)
    assert torch.equal(plain.inputs, IMAGES[plain.index] * torch.tensor(1 / 255))
    assert not torch.equal(plain.inputs, augmented.inputs)


def test_flipped_images_are_the_image_or_its_mirror_image_about_half_of_the_time() -> None:
    train = load_data(Tensors(augment=("flip",), validation_fraction=0), 0).train
    batch = next(train.training_batches(101, 0, 0))
    images = IMAGES[batch.index] * torch.tensor(1 / 255)
    same, mirrored = ((batch.inputs == other).all(dim=(1, 2, 3)) for other in (images, images.flip(-1)))
    assert bool((same ^ mirrored).all())
    assert 30 < int(mirrored.sum()) < 71


# Splits


def test_validation_is_cut_from_training_data_by_seed_with_classes_in_proportion() -> None:
    data = load_data(Tensors(validation_fraction=0.2), 0)
    assert data.validation is not None
    assert (len(data.train), len(data.validation), len(data.test)) == (81, 20, 40)
    assert data.validation.targets.bincount().tolist() == [5, 5, 5, 5]
    together = torch.cat([data.train.inputs, data.validation.inputs]).flatten(1)
    assert len(together.unique(dim=0)) == 101
    again, other = (load_data(Tensors(validation_fraction=0.2), seed).validation for seed in (0, 1))
    assert torch.equal(again.inputs, data.validation.inputs)
    assert not torch.equal(other.inputs, data.validation.inputs)


def test_limits_keep_classes_in_proportion_and_leave_validation_as_it_is() -> None:
    data = load_data(Tensors(limit_train=20, limit_test=8), 0)
    full = load_data(Tensors(), 0)
    assert data.train.targets.bincount().tolist() == [5, 5, 5, 5]
    assert data.test.targets.bincount().tolist() == [2, 2, 2, 2]
    assert torch.equal(data.validation.inputs, full.validation.inputs)
    index = torch.cat([batch.index for batch in data.train.training_batches(6, 0, 0)])
    assert index.sort().values.tolist() == list(range(20))


def test_a_validation_part_that_the_data_set_brings_is_used() -> None:
    class WithValidation(Tensors):
        def load(self, seed: int) -> Splits:
            return Splits((IMAGES, CLASSES), (IMAGES, CLASSES), INFO, validation=(TEST_IMAGES, TEST_CLASSES))

    data = load_data(WithValidation(), 0)
    assert len(data.train) == 101
    assert torch.equal(data.validation.inputs, TEST_IMAGES)


def test_no_validation_fraction_means_no_validation() -> None:
    assert load_data(Tensors(validation_fraction=0), 0).validation is None


# Images


def test_statistics_are_those_of_the_training_part_alone() -> None:
    data = load_data(Tensors(normalise=True, validation_fraction=0.3), 0)
    images = torch.cat([batch.inputs for batch in data.train.batches(16)]).double()
    torch.testing.assert_close(images.mean(dim=(0, 2, 3)), torch.zeros(3).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(images.std(dim=(0, 2, 3), correction=0), torch.ones(3).double(), atol=1e-6, rtol=0)


def test_statistics_that_come_with_the_data_are_used() -> None:
    class WithStatistics(Tensors):
        def load(self, seed: int) -> Splits:
            part = (IMAGES, CLASSES)
            return Splits(part, part, INFO, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))

    inputs = next(load_data(WithStatistics(normalise=True), 0).test.batches(101)).inputs
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))
    torch.testing.assert_close(inputs, (IMAGES / 255 - mean) / std, atol=2e-6, rtol=0)


def test_crop_size_is_what_the_network_sees_random_in_training_and_the_centre_else() -> None:
    data = load_data(Tensors(crop_size=8, augment=("crop",), validation_fraction=0), 0)
    assert data.info.input_shape == (3, 8, 8)
    scaled = IMAGES * torch.tensor(1 / 255)
    test = next(data.train.batches(101)).inputs
    assert torch.equal(test, scaled[:, :, 2:10, 1:9])
    batch = next(data.train.training_batches(101, 0, 0))
    windows = scaled[batch.index].unfold(2, 8, 1).unfold(3, 8, 1).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)
    matches = (windows == batch.inputs.unsqueeze(1)).all(dim=(2, 3, 4))
    assert bool((matches.sum(1) == 1).all())
    assert bool((matches.sum(0) > 0).all())


def test_size_resizes_images_when_they_are_read() -> None:
    ours, streamed = (load_data(cls(size=6, storage="stream"), 0) for cls in (Tensors, Mapped))
    assert ours.info.input_shape == (3, 6, 6)
    assert all_equal(everything(ours), everything(streamed))


# Storage


@pytest.mark.parametrize("parameters", [{}, {"augment": ("crop", "flip", "rotate"), "normalise": True}])
def test_tensors_memory_and_stream_give_the_same_batches(parameters: dict[str, Any]) -> None:
    tensors = everything(load_data(Tensors(**parameters), 3))
    memory = load_data(Mapped(storage="memory", **parameters), 3)
    stream = load_data(Mapped(storage="stream", **parameters), 3)
    assert isinstance(memory.train.inputs, Tensor)
    assert not isinstance(stream.train.inputs, Tensor)
    assert all_equal(tensors, everything(memory))
    assert all_equal(tensors, everything(stream))


def test_auto_storage_streams_what_does_not_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("ensemblekit.data.loading.fits_in_memory", lambda num_bytes: bool(asked.append(num_bytes)))
    assert not isinstance(load_data(Mapped(), 0).train.inputs, Tensor)
    assert asked == [141 * 3 * 12 * 10]
    monkeypatch.setattr("ensemblekit.data.loading.fits_in_memory", lambda num_bytes: True)
    assert isinstance(load_data(Mapped(), 0).train.inputs, Tensor)


def test_samples_beyond_a_limit_are_not_read_if_the_targets_are_known() -> None:
    inputs = torch.randn(100, 5)
    train = MapStyle(inputs, [0, 1] * 50)
    load_data(features(train, limit_train=10, validation_fraction=0), 0)
    # the first one again to see the shape, and some again to see whether they stay the same
    assert train.reads == 10 + 1 + sources.REREAD


def test_a_stream_is_read_once_for_its_checks_and_its_statistics() -> None:
    train = MapStyle(IMAGES, CLASSES.tolist())
    test = MapStyle(TEST_IMAGES, TEST_CLASSES.tolist())
    dataset = {"seed": 0, "storage": "stream", "validation_fraction": 0}
    plain = data_from_datasets(train, test, **dataset)
    reads = train.reads
    normalised = data_from_datasets(train, test, normalise=True, **dataset)
    assert train.reads == 2 * reads
    assert plain.fingerprint == normalised.fingerprint


@pytest.mark.parametrize("length", [1, 40, 101])
def test_channel_statistics_do_not_depend_on_the_chunks_or_the_dtype(length: int) -> None:
    values = IMAGES.double() / 255
    for images in (IMAGES, values.float()):
        statistics = sources.ChannelStatistics()
        for chunk in images.split(length):
            statistics.add(chunk)
        mean, std = statistics.result()
        exact = images.dtype == torch.uint8
        torch.testing.assert_close(mean, values.mean((0, 2, 3)), rtol=1e-14 if exact else 1e-7, atol=0)
        torch.testing.assert_close(std, values.std((0, 2, 3), correction=0), rtol=1e-12 if exact else 1e-6, atol=0)


def test_everything_runs_on_the_meta_device() -> None:
    dataset = Tensors(augment=("crop", "flip", "rotate"), normalise=True, crop_size=8)
    for tensor in everything(load_data(dataset, 0).to("meta")):
        assert tensor.is_meta
    for tensor in everything(load_data(Mapped(storage="stream"), 0).to("meta")):
        assert tensor.is_meta


class Counted(MapStyle):
    """Large samples that count how many of them are in memory at a time."""

    def __init__(self) -> None:
        super().__init__(range(100), [0, 1] * 50)
        self.alive = self.most_alive = 0

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        sample = torch.zeros(3, 400, 400, dtype=torch.uint8)
        weakref.finalize(sample, self._release)
        return sample, self.labels[index]

    def _release(self) -> None:
        self.alive -= 1


def test_a_stream_needs_the_memory_of_a_batch_in_checks_and_in_training() -> None:
    counted = Counted()
    data = data_from_datasets(counted, counted, seed=0, storage="stream", normalise=True, validation_fraction=0)
    assert counted.most_alive <= 2**24 // 480_000 + 2
    counted.most_alive = 0
    for _ in data.train.training_batches(4, 0, 0):
        pass
    for _ in data.test.batches(4):
        pass
    assert 4 <= counted.most_alive <= 5


# Python data sets


def images_as(kind: Callable[[Tensor], Any]) -> MapStyle:
    return MapStyle([kind(image) for image in IMAGES], CLASSES.tolist(), with_targets=False)


@pytest.mark.parametrize(
    "kind",
    [Tensor.clone, Tensor.numpy, lambda image: Image.fromarray(image.permute(1, 2, 0).numpy())],
    ids=["tensor", "array", "image"],
)
@pytest.mark.parametrize("storage", ["memory", "stream"])
def test_map_style_data_sets_of_every_kind_give_the_same_batches(kind: Callable[[Tensor], Any], storage: str) -> None:
    test = MapStyle(TEST_IMAGES, TEST_CLASSES)
    data = data_from_datasets(images_as(kind), test, seed=1, storage=storage, augment=("flip",), normalise=True)
    assert data.info == INFO
    expected = load_data(Tensors(augment=("flip",), normalise=True), 1)
    assert all_equal(everything(data), everything(expected))


def test_numbers_are_inputs_and_targets_of_a_regression() -> None:
    numbers = MapStyle(np.linspace(0, 1, 10).tolist(), np.linspace(0, 2, 10).tolist(), with_targets=False)
    data = data_from_datasets(numbers, numbers, seed=0, validation_fraction=0.2, standardise_targets=False)
    assert data.info == DataInfo("regression", (1,), 1)
    batch = next(data.test.batches(10))
    torch.testing.assert_close(batch.targets, 2 * batch.inputs)


def test_class_names_of_a_data_set_count_even_if_a_class_does_not_occur() -> None:
    train = MapStyle(torch.randn(10, 5), [0, 1] * 5)
    train.classes = ["x", "y", "z"]
    data = data_from_datasets(train, (torch.randn(4, 5), torch.tensor([0, 1, 0, 1])), seed=0)
    assert (data.info.num_outputs, data.classes) == (3, ("x", "y", "z"))


# The classes -1 and +1

SIGNS = GOOD[1] * 2 - 1


@pytest.mark.parametrize("storage", ["memory", "stream"])
@pytest.mark.parametrize("with_targets", [True, False])
@pytest.mark.parametrize("num_outputs", [1, 2])
def test_the_classes_minus_one_and_plus_one_become_indices(storage: str, with_targets: bool, num_outputs: int) -> None:
    info = DataInfo("classification", (5,), num_outputs)
    mapped = MapStyle(GOOD[0], SIGNS, with_targets)
    for part in ((GOOD[0], SIGNS), (GOOD[0], SIGNS.to(torch.int8)), mapped):
        only_plus = (GOOD[0][:3], torch.ones(3, dtype=torch.int64))
        data = load_data(features(part, only_plus, info, storage=storage, validation_fraction=0), 0)
        assert data.classes == ("-1", "+1")
        assert data.train.targets.dtype == torch.int64
        assert torch.equal(data.train.targets, GOOD[1])
        assert torch.equal(torch.cat([batch.targets for batch in data.train.batches(7)]), GOOD[1])
        assert data.test.targets.tolist() == [1, 1, 1]


def test_signs_in_python_data_are_two_classes() -> None:
    data = data_from_datasets((GOOD[0], SIGNS), (GOOD[0], SIGNS), seed=0)
    assert data.info.num_outputs == 2
    assert data.classes == ("-1", "+1")


# Bad data


def with_value(index: int, value: float) -> tuple[Tensor, Tensor]:
    inputs = GOOD[0].clone()
    inputs[index, 2] = value
    return inputs, GOOD[1]


def ragged() -> MapStyle:
    return MapStyle([torch.zeros(5)] * 7 + [torch.zeros(6)] + [torch.zeros(5)] * 12, GOOD[1].tolist())


class Undecodable(MapStyle):
    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index == 4:
            raise OSError("truncated file picture.jpeg")
        return super().__getitem__(index)


BAD = {
    "label range": (
        lambda: features((GOOD[0], GOOD[1] + 1)),
        r'expected class indices from 0 to 1, got 2; data set "features", train sample 1; ',
    ),
    "negative label": (lambda: features(test=(GOOD[0], GOOD[1] - 1)), "from 0 to 1, got -1; .* test sample 0; "),
    "signs and indices": (
        lambda: features((GOOD[0], SIGNS)),
        'targets are class indices here, but -1 and .1 in another split; data set "features", test; ',
    ),
    "signs of three classes": (
        lambda: features((GOOD[0], SIGNS), info=DataInfo("classification", (5,), 3)),
        "from 0 to 2, got -1; .* train sample 0; ",
    ),
    "a sign in one sample only": (
        lambda: features(_with_index(), test=(GOOD[0], SIGNS), storage="stream"),
        "target is 0, but -1",
    ),
    "real labels": (lambda: features((GOOD[0], GOOD[1] / 2)), "expected one class index per sample, got float32"),
    "text labels": (lambda: features(MapStyle(GOOD[0], ["cat"] * 20)), "expected a class index or real numbers"),
    "nan": (lambda: features(with_value(13, float("nan"))), r"not a finite number: nan at \[2\]; .* train sample 13; "),
    "inf in a map": (
        lambda: features(test=MapStyle(*with_value(3, float("inf")))),
        r"inf at \[2\]; .* test sample 3; ",
    ),
    "ragged": (
        lambda: features(ragged()),
        r"expected float32 of shape \(5,\) .* got float32 of shape \(6,\); .* train sample 7; ",
    ),
    "ragged stream": (
        lambda: features(ragged(), storage="stream"),
        r"got float32 of shape \(6,\); .* train sample 7; ",
    ),
    "unlike test": (
        lambda: features(test=(torch.zeros(4, 6), GOOD[1][:4])),
        r"expected float32 of shape \(5,\) .* got float32 of shape \(6,\); .* test sample 0; ",
    ),
    "empty": (lambda: features(test=(torch.zeros(0, 5), GOOD[1][:0])), r'no samples; data set "features", test; '),
    "empty map": (lambda: features(MapStyle([], [])), r'no samples; data set "features", train; '),
    "lengths": (lambda: features((GOOD[0], GOOD[1][:3])), "20 inputs, but 3 targets"),
    "declared shape": (
        lambda: features(info=DataInfo("classification", (4,), 2)),
        r"expected inputs of shape \(4,\), got \(5,\)",
    ),
    "nan target": (
        lambda: features((GOOD[0], torch.full((20,), float("nan"))), info=DataInfo("regression", (5,), 1)),
        "target is not finite: .* train sample 0; ",
    ),
    "target width": (
        lambda: features((GOOD[0], torch.zeros(20, 2)), info=DataInfo("regression", (5,), 1)),
        r"expected 1 real values per sample, got shape \(2,\)",
    ),
    "two targets": (
        lambda: features(_disagreeing()),
        "target is 1, but 0 in the data set's attribute `targets`; .* train sample 6; ",
    ),
    "not a pair": (lambda: features(_not_pairs()), r"expected a pair \(input, target\), got Tensor; .* sample 0; "),
    "not a tensor": (lambda: features(MapStyle(["a"] * 20, GOOD[1].tolist())), "expected a tensor, an array"),
    "undecodable": (
        lambda: features(Undecodable(*GOOD), storage="stream"),
        "cannot be read: truncated file picture.jpeg; .* train sample 4; ",
    ),
    "large crop": (lambda: Tensors(crop_size=11), "crop_size is 11, but images are only 12×10"),
}


def _disagreeing() -> MapStyle:
    dataset = MapStyle(GOOD[0], GOOD[1].tolist())
    dataset.labels = [*dataset.targets[:6], 1, *dataset.targets[7:]]
    return dataset


def _with_index() -> MapStyle:
    dataset = MapStyle(GOOD[0], SIGNS.tolist())
    dataset.labels = [*dataset.targets[:6], 0, *dataset.targets[7:]]
    return dataset


def _not_pairs() -> TorchDataset[Any]:
    class OnlyInputs(MapStyle):
        def __getitem__(self, index: int) -> Any:
            return self.inputs[index]

    return OnlyInputs(GOOD[0], GOOD[1].tolist())


@pytest.mark.parametrize(("dataset", "message"), BAD.values(), ids=BAD.keys())
def test_bad_data_is_refused_before_training(dataset: Callable[[], Dataset], message: str) -> None:
    with pytest.raises(DataError) as raised:
        load_data(dataset(), 0)
    assert re.search(message, raised.value.line)


def test_images_without_a_channel_cannot_be_augmented() -> None:
    part = (IMAGES[:, 0], CLASSES)
    with pytest.raises(DataError, match=r"expected images of shape \(channels, height, width\), got \(12, 10\)"):
        data_from_datasets(part, part, seed=0, augment=("flip",))


class Grouped(Dataset):
    """Features whose samples belong to groups of four."""

    _groups: Tensor = torch.arange(20) // 4

    def load(self, seed: int) -> Splits:
        return Splits(GOOD, GOOD, DataInfo("classification", (5,), 2), groups=self._groups)


def test_groups_stay_whole_when_validation_samples_are_held_out_and_follow_the_samples_that_are_left():
    data = load_data(Grouped(validation_fraction=0.3, limit_train=9), 0)
    assert data.validation is not None
    assert data.train.groups is not None
    assert data.train.indices is not None
    assert data.train.groups.tolist() == (data.train.indices // 4).tolist()
    assert len(data.train) == 9
    assert not set(data.train.groups.tolist()) & set((data.validation.indices // 4).tolist())


@pytest.mark.parametrize("groups", [torch.arange(19), torch.zeros(20), torch.zeros(20, 1, dtype=torch.int64)])
def test_groups_that_do_not_fit_the_samples_are_an_error_of_the_plugin(groups):
    dataset = Grouped()
    dataset._groups = groups
    with pytest.raises(PluginError, match="groups that cannot be used"):
        load_data(dataset, 0)
