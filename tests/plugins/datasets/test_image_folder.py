"""Class folders and archives of them: their images, rejected content, the cache."""

from __future__ import annotations

import os
import stat
import tarfile
import zipfile
from pathlib import Path

import ensemblekit_datasets.folder_loading as folder_loading
import numpy as np
import pytest
import torch
import torchvision
from ensemblekit_datasets import archives, image_sources
from ensemblekit_datasets.decoded_cache import UNPACKED_NOTE
from ensemblekit_datasets.image_folder import ImageFolder
from helpers.image_files import WRITERS, Files, as_folder, as_tar, as_zip, pixels, png
from PIL import Image

import ensemblekit as ek
from ensemblekit import DataError
from ensemblekit.inference.prediction import predict_files


@pytest.fixture
def files(image_bytes) -> Files:
    """Two classes, three training and two test images each, in the four formats that lose nothing or little."""
    names = [
        *(f"train/{label}/{i}.{suffix}" for label in ("dog", "cat") for i, suffix in enumerate(("png", "BMP", "webp"))),
        *(f"test/{label}/{i}.png" for label in ("dog", "cat") for i in range(2)),
    ]
    formats = {"png": "PNG", "BMP": "BMP", "webp": "WEBP"}
    return {name: image_bytes(pixels(i), formats[name.rpartition(".")[2]]) for i, name in enumerate(names)}


every_form = pytest.mark.parametrize("form", list(WRITERS))


def error_of(path: Path, **parameters) -> str:
    with pytest.raises(DataError) as raised:
        ImageFolder(path=path, **parameters).load(0)
    assert raised.value.exit_code == 3
    return raised.value.line


@every_form
@pytest.mark.parametrize("around", ["", "my-images/"])
def test_folders_and_archives_give_the_pixels_that_were_stored(form, around, files, tmp_path) -> None:
    wrapped = {around + name: data for name, data in files.items()}
    extras = {around + "notes.txt": b"!", "__MACOSX/train/cat/._0.png": b"!", around + "train/cat/.hidden.png": b"!"}
    splits = ImageFolder(path=WRITERS[form](tmp_path / form, wrapped | extras)).load(0)
    assert splits.classes == ("cat", "dog")
    assert splits.info.input_shape == (3, 6, 5)
    assert splits.info.num_outputs == 2
    assert splits.train[1].tolist() == [0, 0, 0, 1, 1, 1]
    assert splits.test[1].tolist() == [0, 0, 1, 1]
    order = list(files)
    expected = [name for label in splits.classes for name in sorted(order) if name.startswith(f"train/{label}/")]
    stored = np.stack([pixels(order.index(name)).transpose(2, 0, 1) for name in expected])
    assert splits.train[0].dtype == torch.uint8
    assert np.array_equal(splits.train[0].numpy(), stored)


@every_form
def test_a_stream_gives_the_same_values_as_memory(form, files, tmp_path) -> None:
    path = WRITERS[form](tmp_path / form, files)
    for _ in range(2):  # found by reading, then in the cache
        memory, stream = (ImageFolder(path=path, storage=storage).load(0) for storage in ("memory", "stream"))
        assert stream.info == memory.info
        for streamed, (images, targets) in ((stream.train, memory.train), (stream.test, memory.test)):
            assert torch.equal(streamed.targets, targets)
            assert len(streamed) == len(images)
            for i in range(len(images)):
                image, target = streamed[i]
                assert torch.equal(image, images[i])
                assert image.dtype == torch.uint8
                assert type(target) is int
                assert target == targets[i]


def test_a_stream_feeds_the_workers_of_a_data_loader(files, tmp_path) -> None:
    path = as_folder(tmp_path / "images", files)
    stream = ImageFolder(path=path, storage="stream").load(0).train
    loader = torch.utils.data.DataLoader(stream, batch_size=6, num_workers=1, multiprocessing_context="fork")
    images, targets = next(iter(loader))
    assert torch.equal(images, ImageFolder(path=path).load(0).train[0])
    assert torch.equal(targets, stream.targets)


def test_auto_streams_what_does_not_fit_in_memory(files, tmp_path, monkeypatch) -> None:
    path = as_tar(tmp_path / "images.tar", files)
    asked = []
    monkeypatch.setattr(folder_loading, "fits_in_memory", lambda num_bytes: bool(asked.append(num_bytes)))
    assert isinstance(ImageFolder(path=path).load(0).train, folder_loading.StreamedImages)
    assert asked[-1] == 10 * 3 * 6 * 5
    assert isinstance(ImageFolder(path=path, storage="memory").load(0).train, tuple)
    monkeypatch.setattr(folder_loading, "fits_in_memory", lambda num_bytes: True)
    assert isinstance(ImageFolder(path=path).load(0).train, tuple)


def test_a_val_folder_is_the_validation_part_or_the_test_part_if_there_is_no_other(files, tmp_path) -> None:
    as_val = {name.replace("test/", "val/"): data for name, data in files.items() if name.startswith("test/")}
    both = ImageFolder(path=as_folder(tmp_path / "both", files | as_val)).load(0)
    assert torch.equal(both.validation[0], both.test[0])
    only = {name: data for name, data in files.items() if name.startswith("train/")} | as_val
    splits = ImageFolder(path=as_folder(tmp_path / "only", only)).load(0)
    assert torch.equal(splits.test[0], both.test[0])
    assert splits.validation is None


@pytest.mark.parametrize("storage", ["memory", "stream"])
def test_one_folder_is_cut_in_the_same_proportion_for_every_class(storage, image_bytes, tmp_path) -> None:
    counts = {"a": 10, "b": 20, "train": 5}  # a class may be called "train", as one of CIFAR-100 is
    names = [f"{label}/{i}.png" for label, count in counts.items() for i in range(count)]
    path = as_folder(tmp_path / "images", {name: image_bytes(pixels(i, 2, 2, 3)) for i, name in enumerate(names)})

    def targets_and_images(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        splits = ImageFolder(path=path, test_fraction=0.2, storage=storage).load(seed)
        if storage == "memory":
            return [splits.train, splits.test]
        return [(torch.stack([image for image, _ in part]), part.targets) for part in (splits.train, splits.test)]

    train, test = targets_and_images(0)
    assert torch.bincount(test[1]).tolist() == [2, 4, 1]
    assert torch.bincount(train[1]).tolist() == [8, 16, 4]
    everything = {image.numpy().tobytes() for image in torch.cat([train[0], test[0]])}
    assert everything == {pixels(i, 2, 2, 3).transpose(2, 0, 1).tobytes() for i in range(35)}
    assert torch.equal(targets_and_images(0)[1][0], test[0])
    assert not torch.equal(targets_and_images(1)[1][0], test[0])


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "LA"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_kind_of_image_becomes_the_wanted_channels(mode, channels, image_bytes, tmp_path) -> None:
    names = [f"{part}/{label}/0.png" for part in ("train", "test") for label in "ab"]
    path = as_folder(tmp_path / "images", dict.fromkeys(names, image_bytes(pixels(0), mode=mode)))
    images, _ = ImageFolder(path=path, channels=channels).load(0).train
    wanted = Image.open(path / names[0]).convert("L" if channels == 1 else "RGB")
    assert torch.equal(images[0], torchvision.transforms.functional.pil_to_tensor(wanted))


def test_jpeg_is_read_to_within_what_jpeg_loses(image_bytes, tmp_path) -> None:
    smooth = np.stack([*np.meshgrid(np.arange(0, 256, 8), np.arange(0, 256, 8)), np.full((32, 32), 99)], -1)
    names = [f"{part}/{label}/0.jpg" for part in ("train", "test") for label in "ab"]
    path = as_folder(tmp_path / "images", dict.fromkeys(names, image_bytes(smooth.astype(np.uint8), "JPEG")))
    images, _ = ImageFolder(path=path).load(0).train
    assert np.abs(images[0].numpy().transpose(1, 2, 0) - smooth).mean() < 3


@pytest.mark.parametrize("shape", [(40, 30, 3), (31, 47, 3), (8, 100, 3), (16, 16, 3), (3, 5, 3)])
def test_size_resizes_the_shorter_side_and_cuts_the_centre_as_torchvision_does(shape, image_bytes, tmp_path) -> None:
    names = [f"{part}/{label}/0.png" for part in ("train", "test") for label in "ab"]
    path = as_folder(tmp_path / "images", dict.fromkeys(names, image_bytes(pixels(0, *shape))))
    splits = ImageFolder(path=path, size=16, crop_size=12).load(0)
    usual = torchvision.transforms.Compose([torchvision.transforms.Resize(16), torchvision.transforms.CenterCrop(16)])
    expected = torchvision.transforms.functional.pil_to_tensor(usual(Image.fromarray(pixels(0, *shape))))
    assert torch.equal(splits.train[0][0], expected)
    assert splits.info.input_shape == (3, 12, 12)


@pytest.mark.parametrize("storage", ["memory", "stream"])
@pytest.mark.parametrize("file_format", ["PNG", "JPEG"])
def test_predictions_for_the_training_files_use_the_pixels_of_the_training(
    storage, file_format, image_bytes, tmp_path
) -> None:
    shapes = [(40, 30, 3), (31, 47, 3), (8, 100, 3), (16, 16, 3), (3, 5, 3)]
    names = [f"{part}/{label}/{i}.png" for part in ("train", "test") for label in "ab" for i in range(len(shapes))]
    contents = [image_bytes(pixels(i, *shapes[i % len(shapes)]), file_format) for i in range(len(names))]
    path = as_folder(tmp_path / "images", dict(zip(names, contents, strict=True)))
    parameters = {"path": str(path), "storage": storage, "size": 16, "crop_size": 12, "normalise": True}
    spec = ek.load_spec(
        {
            "data": {"name": "image_folder", "validation_fraction": 0, **parameters},
            "model": {"name": "mlp", "hidden": []},
            "ensemble": {"members": 1},
            "method": {"name": "independent"},
            "training": {"epochs": 1, "batch_size": 10, "loss": "cross_entropy"},
        }
    )
    ensemble = ek.load(ek.train(spec, out=tmp_path / "run", progress=False).path)
    seen: list[torch.Tensor] = []
    predict = ensemble.network_outputs
    ensemble.network_outputs = lambda inputs: (seen.append(inputs), predict(inputs))[1]
    predict_files(ensemble, [path / name for name in names])
    data = ek.load_data(spec.data, spec.seed)
    trained = [batch.inputs for split in (data.train, data.test) for batch in split.batches(10)]
    assert torch.equal(torch.cat(seen), torch.cat(trained))


# Bad data is found before training, wherever it is and however it is to be stored.


@every_form
@pytest.mark.parametrize("storage", ["memory", "stream"])
def test_an_undecodable_image_is_named_in_full(form, storage, files, image_bytes, tmp_path) -> None:
    path = WRITERS[form](tmp_path / form, files | {"test/dog/bad.jpg": image_bytes(pixels(0), "JPEG")[:-300]})
    message = error_of(path, storage=storage)
    assert "cannot decode image" in message
    assert (str(path) if storage == "memory" or form == "images" else "unpacked") in message
    assert "/test/dog/bad.jpg; expected PNG, JPEG, WebP or BMP, got" in message


@pytest.mark.parametrize(
    "data", [b"", b"no image", b"GIF89a\1\0\1\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\1\0\1\0\0\2\2D\1\0;"]
)
def test_what_is_none_of_the_four_formats_is_not_decoded(data, files, tmp_path) -> None:
    path = as_folder(tmp_path / "images", files | {"test/dog/bad.png": data})
    assert f"cannot decode image; {path}/test/dog/bad.png" in error_of(path)


@every_form
def test_images_of_differing_sizes_need_a_size(form, files, image_bytes, tmp_path) -> None:
    odd = {"train/cat/z.png": image_bytes(pixels(0, 7, 9, 3))}
    path = WRITERS[form](tmp_path / form, files | odd)
    message = error_of(path)
    assert "expected 3×6×5" in message
    assert "got 3×7×9" in message
    assert str(path / "train/cat/z.png") in message
    assert "data.size" in message
    assert ImageFolder(path=path, size=4).load(0).train[0].shape == (7, 3, 4, 4)


def test_an_empty_class_folder_is_named(files, tmp_path) -> None:
    path = as_folder(tmp_path / "images", files)
    (path / "test" / "bird").mkdir()
    (path / "train" / "bird").mkdir()
    assert f"class folder has no images; {path / 'test' / 'bird'}" in error_of(path)


def test_an_empty_class_folder_in_an_archive_is_named(files, tmp_path) -> None:
    path = as_tar(tmp_path / "images.tar", files)
    with tarfile.open(path, "a") as tar:
        member = tarfile.TarInfo("train/bird")
        member.type = tarfile.DIRTYPE
        tar.addfile(member)
    assert f"class folder has no images; {path}/train/bird" in error_of(path)


@every_form
def test_no_images_at_all_says_which_layouts_are_expected(form, tmp_path) -> None:
    message = error_of(WRITERS[form](tmp_path / form, {"train/cat/readme.txt": b"?", "test/cat/readme.txt": b"?"}))
    assert "no images" in message
    assert "train/<class>/<image>" in message


def test_train_and_test_must_have_the_same_classes(files, tmp_path) -> None:
    path = as_folder(tmp_path / "images", files | {"test/bird/0.png": files["test/cat/0.png"]})
    assert "different classes: 'bird'" in error_of(path)


def test_one_class_is_not_a_task(files, tmp_path) -> None:
    path = as_folder(tmp_path / "images", {name: data for name, data in files.items() if "cat" in name})
    assert "only one class: 'cat'" in error_of(path)


def test_a_class_of_one_image_cannot_be_cut(files, tmp_path) -> None:
    one = {"cat/0.png": files["test/cat/0.png"], "dog/0.png": files["test/dog/0.png"]}
    assert "class 'cat' has one image" in error_of(as_folder(tmp_path / "images", one))


@pytest.mark.parametrize("name", ["stray.png", "train/stray.png", "train/cat/deeper/stray.png"])
def test_an_image_outside_the_class_folders_is_named(name, files, tmp_path) -> None:
    inside = {key: data for key, data in files.items() if name != "stray.png" or key.startswith("train/")}
    path = as_folder(tmp_path / "images", inside | {name: files["test/cat/0.png"]})
    assert f"image is not in a class folder; {path}" in error_of(path)


def test_an_image_of_absurd_dimensions_is_refused(files, tmp_path) -> None:
    bomb = png(np.zeros((1, 1), np.uint8), width=60_000, height=60_000)
    message = error_of(as_folder(tmp_path / "images", files | {"test/cat/bomb.png": bomb}))
    assert "too many pixels" in message
    assert "/test/cat/bomb.png; make the image smaller" in message


def test_a_path_that_leads_nowhere_or_to_something_else_is_an_error(tmp_path) -> None:
    assert f"no such folder or archive; {tmp_path / 'nowhere'}" in error_of(tmp_path / "nowhere")
    (tmp_path / "images.rar").write_text("?")
    assert "use .tar, .tar.gz, .tgz, .zip" in error_of(tmp_path / "images.rar")


@pytest.mark.parametrize("form", ["images.tar", "images.tar.gz", "images.zip"])
def test_a_cut_archive_is_never_read_in_part(form, files, tmp_path) -> None:
    path = WRITERS[form](tmp_path / form, files)
    whole = path.read_bytes()
    content_end = len(whole.rstrip(b"\0")) if form == "images.tar" else len(whole)
    for length in range(0, content_end, max(content_end // 40, 1)):
        path.write_bytes(whole[:length])
        assert "archive is truncated or damaged" in error_of(path)


def test_a_tar_with_a_garbled_header_is_not_taken_for_a_shorter_one(files, tmp_path) -> None:
    path = as_tar(tmp_path / "images.tar", files)
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"train/cat/0.png")] ^= 1
    path.write_bytes(whole)
    assert "archive is truncated or damaged" in error_of(path)


# Archives are not trusted.

OUTSIDE = ["../outside.png", "/tmp/outside.png", "train/../../outside.png", "..\\outside.png", "C:/outside.png"]


def everything_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("form", ["images.tar.gz", "images.zip"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_member_that_leads_outside_is_refused_and_nothing_is_written(name, form, files, tmp_path) -> None:
    path = WRITERS[form](tmp_path / form, files | {name: files["test/cat/0.png"]})
    message = error_of(path, storage="stream")
    assert "unsafe archive" in message
    assert "a path that leads outside" in message
    assert everything_in(tmp_path) == {form}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar_are_refused(kind, files, tmp_path) -> None:
    path = as_tar(tmp_path / "images.tar", files)
    with tarfile.open(path, "a") as tar:
        member = tarfile.TarInfo("train/cat/link.png")
        member.type, member.linkname = kind, "../../test/cat/0.png"
        tar.addfile(member)
    assert "'train/cat/link.png' is a link or a device" in error_of(path, storage="stream")
    assert everything_in(tmp_path) == {"images.tar"}


def test_links_in_a_zip_are_refused(files, tmp_path) -> None:
    path = as_zip(tmp_path / "images.zip", files)
    with zipfile.ZipFile(path, "a") as archive:
        member = zipfile.ZipInfo("train/cat/link.png")
        member.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(member, "/etc/passwd")
    assert "is a link or a device" in error_of(path, storage="stream")


def test_archives_that_would_fill_the_disk_are_refused(files, tmp_path, monkeypatch) -> None:
    path = as_tar(tmp_path / "images.tar", files)
    monkeypatch.setattr(archives, "max_members", lambda archive: 9)
    assert "at most 9 are allowed" in error_of(path)
    monkeypatch.setattr(image_sources, "MAX_FILE_BYTES", 50)
    assert "at most 50 are allowed" in error_of(path)


@pytest.mark.parametrize("form", ["images.tar.gz", "images.zip"])
def test_an_archive_that_claims_to_be_endless_is_refused_by_its_headers(form, files, tmp_path) -> None:
    zeros = {f"train/cat/{i}.bmp": bytes(8 * 2**20) for i in range(3)}
    path = WRITERS[form](tmp_path / form, files | zeros)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archives, "ALWAYS_ALLOWED_BYTES", 2**20)
        assert "would unpack to more than" in error_of(path)


# What was decoded is kept.


@every_form
def test_the_second_load_decodes_nothing(form, files, tmp_path, monkeypatch) -> None:
    path = WRITERS[form](tmp_path / form, files)
    first = ImageFolder(path=path).load(0)
    monkeypatch.setattr(folder_loading, "decode_all", None)
    second = ImageFolder(path=path).load(0)
    assert all(torch.equal(a, b) for a, b in zip(first.train + first.test, second.train + second.test, strict=True))
    assert (first.classes, first.info) == (second.classes, second.info)


@every_form
def test_changed_contents_are_decoded_again(form, files, tmp_path) -> None:
    path = WRITERS[form](tmp_path / form, files)
    before = ImageFolder(path=path).load(0).train[0]
    changed = files | {"train/cat/0.png": files["test/cat/0.png"]}
    WRITERS[form](path, changed)
    os.utime(path if path.is_file() else path / "train/cat/0.png", ns=(1, 1))
    after = ImageFolder(path=path).load(0)
    assert torch.equal(after.train[0][0], after.test[0][0])
    assert torch.equal(after.train[0][1:], before[1:])


def test_other_parameters_have_a_cache_of_their_own(files, tmp_path) -> None:
    path = as_folder(tmp_path / "images", files)
    shapes = {
        ImageFolder(path=path, size=size, channels=c).load(0).train[0].shape for size in (None, 4) for c in (1, 3)
    }
    assert len(shapes) == 4


def test_a_damaged_cache_is_rebuilt_in_silence(files, tmp_path, cache, capfd) -> None:
    path = as_folder(tmp_path / "images", files)
    first = ImageFolder(path=path).load(0).train[0].clone()
    [kept] = (cache / "decoded").iterdir()
    damaged = bytearray(kept.read_bytes())
    damaged[-5] ^= 1
    kept.write_bytes(damaged)
    assert torch.equal(ImageFolder(path=path).load(0).train[0], first)
    assert kept.read_bytes() != damaged
    assert capfd.readouterr() == ("", "")


def test_a_stream_from_an_archive_unpacks_only_its_images_and_only_once(files, tmp_path, cache) -> None:
    path = as_zip(tmp_path / "images.zip", files | {"train/cat/run.sh": b"#!/bin/sh"})
    for _ in range(2):
        ImageFolder(path=path, storage="stream").load(0)
    [unpacked] = (cache / "unpacked").iterdir()
    assert {name for name in everything_in(unpacked) if (unpacked / name).is_file()} == {*files, UNPACKED_NOTE}


def test_where_it_is_looked_for_is_the_path(tmp_path) -> None:
    dataset = ImageFolder(path=tmp_path / "images")
    assert dataset.places() == (tmp_path / "images",)
    assert dataset.found_at() is None
    (tmp_path / "images").mkdir()
    assert dataset.found_at() == tmp_path / "images"
