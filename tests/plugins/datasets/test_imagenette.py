"""Imagenette from an archive in exactly the published layout, two images a class."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from ensemblekit_datasets import imagenette
from ensemblekit_datasets.downloads import RemoteFile
from ensemblekit_datasets.imagenette import CLASSES, Imagenette

from ensemblekit import DataError, DataInfo, ImageDataset

WORDNET_IDS = sorted(CLASSES)


def pretend(archive: bytes, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make these bytes the published archive, at this URL."""
    file = RemoteFile("imagenette2-160.tgz", (url,), hashlib.md5(archive).hexdigest())
    monkeypatch.setattr(imagenette, "ARCHIVE", file)


@pytest.fixture
def archive(image_bytes, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """imagenette2-160.tgz with photographs of different sizes, whose checksum the data set knows."""
    random = np.random.default_rng(0)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:

        def add(name: str, data: bytes) -> None:
            member = tarfile.TarInfo(f"imagenette2-160/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))

        add("noisy_imagenette.csv", b"path,noisy_labels_0\n")
        for part in ("train", "val"):
            for i, wordnet_id in enumerate(WORDNET_IDS):
                for j in range(2):
                    pixels = random.integers(0, 256, (160 + 10 * j, 160 + i, 3), dtype=np.uint8)
                    add(f"{part}/{wordnet_id}/{wordnet_id}_{j}.JPEG", image_bytes(pixels, "JPEG"))
    pretend(buffer.getvalue(), "http://127.0.0.1:9/imagenette2-160.tgz", monkeypatch)
    return buffer.getvalue()


def put(folder: Path, archive: bytes) -> Path:
    folder.mkdir(parents=True)
    (folder / "imagenette2-160.tgz").write_bytes(archive)
    return folder


def test_the_archive_is_read_in_place_as_torchvision_would_read_it(archive: bytes, tmp_path: Path) -> None:
    root = put(tmp_path / "data", archive)
    splits = Imagenette(root=root, download=False).load(0)
    assert not (root / "imagenette2-160").exists()
    with tarfile.open(root / "imagenette2-160.tgz") as tar:
        tar.extractall(root, filter="data")
    usual = torchvision.transforms.Compose(
        [
            torchvision.transforms.Resize(160),
            torchvision.transforms.CenterCrop(160),
            torchvision.transforms.PILToTensor(),
        ]
    )
    for part, split in ((splits.train, "train"), (splits.test, "val")):
        expected = torchvision.datasets.Imagenette(root, split, "160px", transform=usual)
        assert torch.equal(part[0], torch.stack([image for image, _ in expected]))
        assert part[1].tolist() == [target for _, target in expected]
    assert splits.classes == tuple(names[0] for names in expected.classes)
    assert splits.classes[0] == "tench"


def test_torchvisions_unpacked_folder_gives_the_same_as_the_archive(archive: bytes, tmp_path: Path) -> None:
    from_archive = Imagenette(root=put(tmp_path / "a", archive)).load(0)
    folder = tmp_path / "b"
    with tarfile.open(tmp_path / "a" / "imagenette2-160.tgz") as tar:
        tar.extractall(folder, filter="data")
    dataset = Imagenette(root=folder, download=False)
    assert dataset.found_at() == folder / "imagenette2-160"
    assert torch.equal(dataset.load(0).train[0], from_archive.train[0])


def test_a_stream_gives_the_same_images_as_memory(archive: bytes, tmp_path: Path) -> None:
    root = put(tmp_path / "data", archive)
    images, targets = Imagenette(root=root).load(0).train
    stream = Imagenette(root=root, storage="stream").load(0).train
    assert torch.equal(stream.targets, targets)
    assert all(torch.equal(stream[i][0], images[i]) and stream[i][1] == targets[i] for i in range(len(stream)))


def test_it_is_downloaded_once_and_silently(archive: bytes, server, monkeypatch, cache: Path, capfd) -> None:
    server.files = {"imagenette2-160.tgz": archive}
    pretend(archive, server.url + "imagenette2-160.tgz", monkeypatch)
    first = Imagenette().load(0)
    server.files = {}
    assert torch.equal(Imagenette().load(0).test[0], first.test[0])
    assert (cache / "imagenette2-160.tgz").read_bytes() == archive
    assert capfd.readouterr() == ("", "")


def test_a_cut_download_is_a_checksum_mismatch_and_leaves_no_file(archive, server, monkeypatch, cache) -> None:
    server.files, server.cut_at = {"imagenette2-160.tgz": archive}, 5000
    pretend(archive, server.url + "imagenette2-160.tgz", monkeypatch)
    with pytest.raises(DataError, match="checksum mismatch"):
        Imagenette().load(0)
    assert list(cache.iterdir()) == []


def test_an_archive_with_a_wrong_checksum_is_not_read(archive: bytes, cache: Path) -> None:
    put(cache, archive[:-1])
    with pytest.raises(DataError, match="checksum mismatch"):
        Imagenette().load(0)


def test_a_folder_with_other_classes_is_refused(image_bytes, cache: Path) -> None:
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            folder = cache / "imagenette2-160" / part / name
            folder.mkdir(parents=True)
            (folder / "0.png").write_bytes(image_bytes(np.zeros((4, 4, 3), np.uint8)))
    with pytest.raises(DataError, match=r"not Imagenette: expected .*n01440764"):
        Imagenette().load(0)


def test_offline_the_error_names_file_checksum_paths_and_image_folder(monkeypatch) -> None:
    pretend(b"", "http://127.0.0.1:9/imagenette2-160.tgz", monkeypatch)
    with pytest.raises(DataError) as raised:
        Imagenette().load(0)
    message = str(raised.value)
    assert f"imagenette2-160.tgz (md5 {hashlib.md5(b'').hexdigest()})" in message
    assert all(str(path) in message for path in Imagenette().places())
    assert "image_folder" in message


def test_the_papers_defaults_are_crops_of_128_and_rotations() -> None:
    dataset = Imagenette()
    assert dataset.info == DataInfo("classification", (3, 128, 128), 10)
    assert (dataset.size, dataset.crop_size) == (160, 128)
    assert [augmentation.name for augmentation in dataset.augment] == ["crop", "rotate"]
    assert dataset.normalise is True
    fields, base = Imagenette.model_fields, ImageDataset.model_fields
    assert all(fields[name].description == base[name].description for name in base)


def test_the_archive_and_the_classes_are_those_that_torchvision_knows() -> None:
    reader = torchvision.datasets.Imagenette
    [url] = imagenette.ARCHIVE.urls
    assert reader._ARCHIVES["160px"] == (url, imagenette.ARCHIVE.md5)
    assert {wordnet_id: names[0] for wordnet_id, names in reader._WNID_TO_CLASS.items()} == CLASSES
