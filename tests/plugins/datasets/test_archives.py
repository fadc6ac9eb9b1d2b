"""Archives that would fill the memory, and archives that two processes unpack."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from ensemblekit_datasets import archives, folder_loading
from ensemblekit_datasets.archives import TarArchive, ZipArchive
from ensemblekit_datasets.cifar import CIFAR10
from ensemblekit_datasets.image_folder import ImageFolder
from helpers.image_files import as_tar, as_zip, encoded, pixels, png, two_classes

from ensemblekit import DataError
from ensemblekit.core import memory

MIB = 2**20
ZEROS = 256 * MIB


def zip_bomb(path: Path) -> Path:
    """A member that declares 10 bytes, but unpacks to many MiB."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("train/a/0.png", "w") as file:
            for _ in range(ZEROS // MIB):
                file.write(bytes(MIB))
        for name in ("train/b/0.png", "test/a/0.png", "test/b/0.png"):
            archive.writestr(name, encoded(pixels(0)))
    content = path.read_bytes()
    path.write_bytes(content.replace(ZEROS.to_bytes(4, "little"), (10).to_bytes(4, "little")))
    return path


def tar_bomb(path: Path) -> Path:
    """A member whose attributes are many MiB long."""
    header = tarfile.TarInfo("attributes")
    header.type, header.size = tarfile.XHDTYPE, ZEROS
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(header.tobuf())
        for _ in range(ZEROS // MIB):
            file.write(bytes(MIB))
    return path


def image_bomb(path: Path) -> Path:
    """Small files of large images: 48 MB each, 768 MB together."""
    return as_zip(path, two_classes(encoded(np.zeros((4000, 4000, 3), np.uint8)), count=4))


PROGRAM = """
import json, sys
from pathlib import Path
from ensemblekit_datasets.image_folder import ImageFolder
from ensemblekit.bench.peak_memory import _peak, _reset_peak
from ensemblekit import DataError, Decoding
import numpy, torch, PIL.PngImagePlugin, ensemblekit_datasets.folder_loading
for path in sys.argv[1:]:
    before = _reset_peak()
    try:
        train = ImageFolder(path=Path(path), storage="stream").load(0).train
        what = f"{len(train)} images"
    except DataError as error:
        what = error.line
    print(json.dumps([what, _peak() - before]))
"""


@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
def test_bombs_are_refused_and_streams_decoded_with_little_memory(tmp_path: Path) -> None:
    paths = [
        zip_bomb(tmp_path / "members.zip"),
        tar_bomb(tmp_path / "header.tar.gz"),
        image_bomb(tmp_path / "images.zip"),
    ]
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, paths)], capture_output=True, text=True, check=True, timeout=300
    )
    results = [json.loads(line) for line in child.stdout.splitlines()]
    (zip_error, zip_bytes), (tar_error, tar_bytes), (images, images_bytes) = results
    assert f"archive is truncated or damaged: Bad CRC-32 for file 'train/a/0.png'; {paths[0]}" in zip_error
    assert f"a header is longer than {archives.MAX_HEADER_BYTES} bytes; {paths[1]}" in tar_error
    assert images == "8 images"
    assert zip_bytes < 50 * MIB
    assert tar_bytes < 50 * MIB
    assert images_bytes < 400 * MIB


def test_a_zip_member_is_read_only_to_its_declared_size(tmp_path: Path) -> None:
    archive = ZipArchive(zip_bomb(tmp_path / "members.zip"))
    with pytest.raises(DataError, match="truncated or damaged: Bad CRC"):
        list(archive.read(["train/a/0.png"]))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_members_whose_decompression_has_no_limit_are_refused(method: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "images.zip", "w", method) as archive:
        archive.writestr("train/a/0.png", b"?")
    with pytest.raises(DataError, match=r"'train/a/0\.png' is neither stored nor deflated"):
        ZipArchive(tmp_path / "images.zip").entries()


@pytest.mark.parametrize("name", ["images.tar.gz", "images.tar"])
def test_many_members_in_few_bytes_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_tar(tmp_path / name, {f"train/a/{i}.png": b"" for i in range(300)})
    assert len(TarArchive(path).entries()) == 300
    monkeypatch.setattr(archives, "ALWAYS_ALLOWED_MEMBERS", 100)
    assert len(TarArchive(as_tar(tmp_path / "images.tar", two_classes(b"x", 40))).entries()) == 160
    if name == "images.tar.gz":
        with pytest.raises(DataError, match=r"at most \d+ are allowed in an archive of this size"):
            TarArchive(path).entries()


def test_the_memory_of_the_machine_limits_the_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_tar(tmp_path / "images.tar", two_classes(b"x"))
    monkeypatch.setattr(archives, "memory_limit", lambda: 4 * 3 * archives.MEMORY_PER_MEMBER)
    with pytest.raises(DataError, match="at most 3 are allowed"):
        TarArchive(path).entries()


def test_an_endless_tail_of_a_gzipped_tar_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = as_tar(tmp_path / "images.tar", two_classes(b"x")).read_bytes()
    with gzip.open(tmp_path / "images.tar.gz", "wb", compresslevel=1) as file:
        file.write(plain + bytes(8 * MIB))
    monkeypatch.setattr(archives, "ALWAYS_ALLOWED_BYTES", 4 * MIB)
    with pytest.raises(DataError, match="would unpack to more than"):
        TarArchive(tmp_path / "images.tar.gz").entries()


def test_a_sparse_member_is_refused(tmp_path: Path) -> None:
    member = tarfile.TarInfo("train/a/0.png")
    member.type = tarfile.GNUTYPE_SPARSE
    with tarfile.open(tmp_path / "images.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(member, io.BytesIO())
    with pytest.raises(DataError, match="is a sparse file"):
        TarArchive(tmp_path / "images.tar").entries()


def test_a_chain_of_attributes_is_an_error(tmp_path: Path) -> None:
    header = tarfile.TarInfo("attributes")
    header.type = tarfile.XGLTYPE
    (tmp_path / "images.tar").write_bytes(header.tobuf() * 2000)
    with pytest.raises(DataError, match="truncated or damaged"):
        TarArchive(tmp_path / "images.tar").entries()


def test_images_that_do_not_fit_are_not_loaded_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_zip(tmp_path / "images.zip", two_classes(png(pixels(0)), 5))
    monkeypatch.setattr(folder_loading, "memory_limit", lambda: 20 * 90 - 1)
    with pytest.raises(DataError, match=r"the decoded images take 0\.0 GiB, but only 0\.0 GiB of memory") as raised:
        ImageFolder(path=path, storage="memory").load(0)
    assert 'data.storage = "stream"' in raised.value.fix
    assert len(ImageFolder(path=path, storage="stream").load(0).train) == 10
    monkeypatch.setattr(memory, "memory_limit", lambda: 20 * 90)
    assert len(ImageFolder(path=path).load(0).train) == 10


# Several processes, one cache


def test_two_that_unpack_one_archive_at_the_same_time_both_succeed(tmp_path: Path, monkeypatch) -> None:
    path = as_tar(tmp_path / "images.tar", two_classes(encoded(pixels(0)), 4))
    both_unpacked = threading.Barrier(2, timeout=60)
    replace = archives.TarArchive.read

    def read(self, names):
        yield from replace(self, names)
        if len(names) > 1 and threading.current_thread() in threads:
            both_unpacked.wait()

    loaded: list[torch.Tensor] = []

    def load() -> None:
        stream = ImageFolder(path=path, storage="stream").load(0).train
        loaded.append(torch.stack([image for image, _ in stream]))

    monkeypatch.setattr(folder_loading, "_first_shape", lambda *_: (3, 6, 5))
    monkeypatch.setattr(archives.TarArchive, "read", read)
    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == 2
    assert torch.equal(*loaded)


def test_cifar_that_another_process_has_just_unpacked_is_used(tmp_path: Path, monkeypatch) -> None:
    cifar = CIFAR10(root=tmp_path)
    batches, archive = cifar.places()
    archive.write_bytes(b"?")
    [file] = cifar.remote_files()
    monkeypatch.setattr("torchvision.datasets.utils.calculate_md5", lambda path: file.md5)

    def extract(source: Path, target: Path) -> None:
        (target / batches.name).mkdir()
        batches.mkdir()  # by the other process
        (batches / "test_batch").write_bytes(b"complete")

    monkeypatch.setattr("torchvision.datasets.utils.extract_archive", extract)
    cifar._unpack(archive, batches)
    assert (batches / "test_batch").read_bytes() == b"complete"
