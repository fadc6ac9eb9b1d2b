"""Fashion-MNIST from idx files in exactly the published format, a few images long."""

from __future__ import annotations

import gzip
import hashlib
import threading
from pathlib import Path

import pytest
import torch
import torchvision
from ensemblekit_datasets import downloads, fashion_mnist
from ensemblekit_datasets.fashion_mnist import FashionMNIST

from ensemblekit import DataError, DataInfo, ImageDataset, load_data


def idx(values: torch.Tensor) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.numpy().tobytes()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The four files, known to torchvision and to the data set by their checksums; Debian's folder is elsewhere."""
    random = torch.Generator().manual_seed(0)
    contents = {}
    for prefix, count in (("train", 30), ("t10k", 20)):
        images = torch.randint(256, (count, 28, 28), generator=random, dtype=torch.uint8)
        contents[f"{prefix}-images-idx3-ubyte.gz"] = idx(images)
        contents[f"{prefix}-labels-idx1-ubyte.gz"] = idx((torch.arange(count) % 10).to(torch.uint8))
    files = {name: gzip.compress(data, mtime=0) for name, data in contents.items()}
    monkeypatch.setattr(
        fashion_mnist, "CONTENTS_SHA256", {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    )
    resources = [(name, hashlib.md5(data).hexdigest()) for name, data in files.items()]
    monkeypatch.setattr(torchvision.datasets.FashionMNIST, "resources", resources)
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "debian")
    return files


def put(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_images_and_labels_equal_torchvisions(files: dict[str, bytes], tmp_path: Path) -> None:
    raw = put(tmp_path / "FashionMNIST" / "raw", files)
    splits = FashionMNIST(root=tmp_path, download=False).load(0)
    for name, data in files.items():
        (raw / name).with_suffix("").write_bytes(gzip.decompress(data))
    for part, train in ((splits.train, True), (splits.test, False)):
        expected = torchvision.datasets.FashionMNIST(tmp_path, train=train)
        assert part[0].dtype == torch.uint8
        assert torch.equal(part[0], expected.data[:, None])
        assert torch.equal(part[1], expected.targets)
    assert splits.classes == tuple(torchvision.datasets.FashionMNIST.classes)


def test_debians_folder_is_found_whatever_its_gzip_headers_are(files: dict[str, bytes]) -> None:
    recompressed = {name: gzip.compress(gzip.decompress(data), 1, mtime=7) for name, data in files.items()}
    debian = put(fashion_mnist.DEBIAN_FOLDER, recompressed)
    dataset = FashionMNIST()
    assert dataset.found_at() == debian
    assert dataset.load(0).train[0].shape == (30, 1, 28, 28)


def test_the_users_own_folder_comes_before_debians(files: dict[str, bytes], cache: Path) -> None:
    put(fashion_mnist.DEBIAN_FOLDER, files)
    downloaded = put(cache / "FashionMNIST" / "raw", files)
    assert FashionMNIST().found_at() == downloaded


def test_it_is_downloaded_once_and_silently(files, server, monkeypatch, cache, capfd) -> None:
    server.files = files
    monkeypatch.setattr(torchvision.datasets.FashionMNIST, "mirrors", ["http://127.0.0.1:9/", server.url])
    first = FashionMNIST().load(0)
    server.files = {}
    assert torch.equal(FashionMNIST().load(0).test[0], first.test[0])
    assert FashionMNIST().found_at() == cache / "FashionMNIST" / "raw"
    assert sorted(file.name for file in (cache / "FashionMNIST" / "raw").iterdir()) == sorted(files)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("fault", ["cut", "another file"])
def test_a_bad_download_is_a_checksum_mismatch_and_leaves_no_file(fault, files, server, monkeypatch, cache) -> None:
    server.files = files if fault == "cut" else dict.fromkeys(files, b"something else")
    server.cut_at = 100 if fault == "cut" else None
    monkeypatch.setattr(torchvision.datasets.FashionMNIST, "mirrors", [server.url])
    with pytest.raises(DataError, match="checksum mismatch") as raised:
        FashionMNIST().load(0)
    assert raised.value.exit_code == 3
    assert [file for file in cache.rglob("*") if file.is_file()] == []


def test_a_server_that_stalls_is_given_up(files, server, monkeypatch) -> None:
    server.stall = threading.Event()
    monkeypatch.setattr(downloads, "TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(torchvision.datasets.FashionMNIST, "mirrors", [server.url])
    with pytest.raises(DataError, match=r"download failed: .*timed out"):
        FashionMNIST().load(0)


def test_without_files_or_network_the_error_says_what_to_put_where(files, monkeypatch, cache) -> None:
    monkeypatch.setattr(torchvision.datasets.FashionMNIST, "mirrors", ["http://127.0.0.1:9/"])
    put(cache / "FashionMNIST" / "raw", {"t10k-labels-idx1-ubyte.gz": files["t10k-labels-idx1-ubyte.gz"]})
    for dataset, reason in ((FashionMNIST(), "download failed"), (FashionMNIST(download=False), "download = false")):
        with pytest.raises(DataError, match=reason) as raised:
            dataset.load(0)
        message = str(raised.value)
        for name, data in files.items():
            listed = f"{name} (md5 {hashlib.md5(data).hexdigest()})" in message
            assert listed == (name != "t10k-labels-idx1-ubyte.gz")
        assert all(str(path) in message for path in dataset.places())
        assert "image_folder" in message


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"no gzip", lambda data: gzip.compress(b"x")])
def test_a_damaged_file_is_a_checksum_mismatch(damage, files: dict[str, bytes], cache: Path) -> None:
    name = "train-images-idx3-ubyte.gz"
    raw = put(cache / "FashionMNIST" / "raw", files | {name: damage(files[name])})
    with pytest.raises(DataError, match="checksum mismatch") as raised:
        FashionMNIST().load(0)
    assert str(raw / name) in str(raised.value)


def test_the_published_checksums_are_of_the_published_file_names() -> None:
    assert list(fashion_mnist.CONTENTS_SHA256) == [name for name, _ in torchvision.datasets.FashionMNIST.resources]


def test_the_input_shape_known_before_loading_is_that_of_the_network(files: dict[str, bytes], cache: Path) -> None:
    put(cache / "FashionMNIST" / "raw", files)
    assert FashionMNIST().info == DataInfo("classification", (1, 28, 28), 10)
    larger = FashionMNIST(size=32)
    assert larger.info.input_shape == load_data(larger, 0).train.inputs.shape[1:] == (1, 32, 32)
    assert FashionMNIST(size=32, crop_size=24).info.input_shape == (1, 24, 24)


def test_the_papers_defaults_are_flips_without_normalisation() -> None:
    assert [augmentation.name for augmentation in FashionMNIST().augment] == ["flip"]
    assert FashionMNIST().normalise is False
    fields, base = FashionMNIST.model_fields, ImageDataset.model_fields
    assert all(fields[name].description == base[name].description for name in base)
