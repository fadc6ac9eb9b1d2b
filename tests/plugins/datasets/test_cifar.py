"""CIFAR from pickled batches in exactly the published format, a few images long."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from ensemblekit_datasets.cifar import CIFAR10, CIFAR100

from ensemblekit import DataError, DataInfo, ImageDataset, load_data

SETS = [(CIFAR10, torchvision.datasets.CIFAR10), (CIFAR100, torchvision.datasets.CIFAR100)]


def batch(label_key: str, num_classes: int, seed: int) -> bytes:
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (num_classes, 3072), dtype=np.uint8)
    return pickle.dumps({"data": data, label_key: list(range(num_classes))}, protocol=2)


def pretend(reader, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Replace torchvision's checksums by those of these files; return the archive of them."""

    def listed(names):
        return [[name, hashlib.md5(files[name]).hexdigest()] for name in names]

    meta = reader.meta["filename"]
    tests = [name for name in files if name.startswith("test")]
    monkeypatch.setattr(reader, "train_list", listed(name for name in files if name not in (*tests, meta)))
    monkeypatch.setattr(reader, "test_list", listed(tests))
    monkeypatch.setattr(reader, "meta", reader.meta | {"md5": hashlib.md5(files[meta]).hexdigest()})
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{reader.base_folder}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    archive = buffer.getvalue()
    monkeypatch.setattr(reader, "tgz_md5", hashlib.md5(archive).hexdigest())
    return archive


def published(reader) -> dict[str, bytes]:
    """Stand-ins for the files of torchvision's table, by the same names and with the same keys."""
    ten = reader is torchvision.datasets.CIFAR10
    key, num_classes = ("labels", 10) if ten else ("fine_labels", 100)
    names = [name for name, _ in [*reader.train_list, *reader.test_list]]
    files = {name: batch(key, num_classes, seed) for seed, name in enumerate(names)}
    labels = [f"class {i}" for i in range(num_classes)]
    return files | {reader.meta["filename"]: pickle.dumps({reader.meta["key"]: labels}, protocol=2)}


def put(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(("plugin", "reader"), SETS)
def test_batches_become_images_in_the_order_of_the_files(plugin, reader, monkeypatch, cache) -> None:
    files = published(reader)
    pretend(reader, files, monkeypatch)
    folder = put(cache / reader.base_folder, files)
    dataset = plugin(download=False)
    splits = dataset.load(0)
    stored = np.concatenate([pickle.loads(files[name])["data"] for name, _ in reader.train_list])
    assert np.array_equal(splits.train[0].numpy(), stored.reshape(-1, 3, 32, 32))
    assert splits.train[0].dtype == torch.uint8
    assert splits.train[0].is_contiguous()
    assert torch.equal(splits.test[1], torch.arange(plugin.num_classes))
    assert splits.classes == tuple(f"class {i}" for i in range(plugin.num_classes))
    assert splits.info == dataset.info == DataInfo("classification", (3, 32, 32), plugin.num_classes)
    assert dataset.found_at() == folder


@pytest.mark.parametrize(("plugin", "reader"), SETS)
def test_it_is_downloaded_and_unpacked_once_and_silently(plugin, reader, monkeypatch, server, cache, capfd) -> None:
    server.files = {reader.filename: pretend(reader, published(reader), monkeypatch)}
    monkeypatch.setattr(reader, "url", server.url + reader.filename)
    first = plugin().load(0)
    server.files = {}
    assert torch.equal(plugin().load(0).train[0], first.train[0])
    assert {file.name for file in cache.iterdir()} == {reader.base_folder, reader.filename}
    assert capfd.readouterr() == ("", "")


def test_an_archive_put_there_by_hand_is_unpacked(monkeypatch, cache) -> None:
    reader = torchvision.datasets.CIFAR100
    put(cache, {reader.filename: pretend(reader, published(reader), monkeypatch)})
    assert CIFAR100().found_at() == cache / reader.filename
    assert CIFAR100(download=False).load(0).train[0].shape == (100, 3, 32, 32)


@pytest.mark.parametrize("cut_at", [0, 1000])
def test_a_cut_download_is_a_checksum_mismatch_and_leaves_no_file(cut_at, monkeypatch, server, cache) -> None:
    reader = torchvision.datasets.CIFAR100
    server.files = {reader.filename: pretend(reader, published(reader), monkeypatch)}
    server.cut_at = cut_at
    monkeypatch.setattr(reader, "url", server.url + reader.filename)
    with pytest.raises(DataError, match="checksum mismatch") as raised:
        CIFAR100().load(0)
    assert raised.value.exit_code == 3
    assert list(cache.iterdir()) == []


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("culprit", ["train", "test", "meta"])
def test_a_batch_with_a_wrong_checksum_is_never_unpickled(culprit, monkeypatch, cache, tmp_path) -> None:
    reader = torchvision.datasets.CIFAR100
    files = published(reader)
    pretend(reader, files, monkeypatch)
    folder = put(cache / reader.base_folder, files | {culprit: pickle.dumps(Canary(tmp_path / "canary"))})
    with pytest.raises(DataError, match="checksum mismatch") as raised:
        CIFAR100().load(0)
    assert str(folder / culprit) in str(raised.value)
    assert not (tmp_path / "canary").exists()


def test_an_archive_with_a_wrong_checksum_is_not_unpacked(monkeypatch, cache) -> None:
    reader = torchvision.datasets.CIFAR100
    archive = pretend(reader, published(reader), monkeypatch)
    put(cache, {reader.filename: archive[:-1] + b"x"})
    with pytest.raises(DataError, match="checksum mismatch"):
        CIFAR100().load(0)
    assert [file.name for file in cache.iterdir()] == [reader.filename]


def test_a_missing_batch_is_named(monkeypatch, cache) -> None:
    reader = torchvision.datasets.CIFAR100
    files = published(reader)
    pretend(reader, files, monkeypatch)
    (put(cache / reader.base_folder, files) / "test").unlink()
    with pytest.raises(DataError, match=f"test .md5 {reader.test_list[0][1]}. is missing"):
        CIFAR100().load(0)


@pytest.mark.parametrize(("plugin", "reader"), SETS)
def test_offline_the_error_names_file_checksum_paths_and_image_folder(plugin, reader, monkeypatch) -> None:
    monkeypatch.setattr(reader, "url", "http://127.0.0.1:9/")
    with pytest.raises(DataError) as raised:
        plugin().load(0)
    message = str(raised.value)
    assert f"{reader.filename} (md5 {reader.tgz_md5})" in message
    assert all(str(path) in message for path in plugin().places())
    assert 'data.name = "image_folder"' in message
    assert raised.value.exit_code == 3


def test_root_may_be_anywhere_and_starts_at_home_with_a_tilde(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert CIFAR10(root=Path("~/data")).places()[0] == tmp_path / "data" / "cifar-10-batches-py"
    monkeypatch.delenv("ENSEMBLEKIT_DATA")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert CIFAR10().folder == tmp_path / ".cache" / "ensemblekit"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert CIFAR10().folder == tmp_path / "xdg" / "ensemblekit"


def test_size_and_crop_size_change_what_the_network_sees(monkeypatch, cache) -> None:
    reader = torchvision.datasets.CIFAR100
    files = published(reader)
    pretend(reader, files, monkeypatch)
    put(cache / reader.base_folder, files)
    dataset = CIFAR100(size=16, crop_size=12, validation_fraction=0)
    data = load_data(dataset, 0)
    assert data.train.inputs.shape == (100, 3, 16, 16)
    assert dataset.info.input_shape == data.info.input_shape == (3, 12, 12)


@pytest.mark.parametrize("plugin", [CIFAR10, CIFAR100])
def test_the_papers_defaults_are_crops_flips_and_normalisation(plugin) -> None:
    assert [augmentation.name for augmentation in plugin().augment] == ["crop", "flip"]
    assert plugin().normalise is True
    fields, base = plugin.model_fields, ImageDataset.model_fields
    assert all(fields[name].description == base[name].description for name in base)
