"""Loads class folders, or an archive of them: decoded and cached, or streamed from disk."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ensemblekit import DataError, Decoding, fits_in_memory
from ensemblekit_datasets.class_folders import ClassFolders, arrange
from ensemblekit_datasets.decoded_cache import cache_key, read_cache, write_cache
from ensemblekit_datasets.image_sources import Folder, ImageSource, open_source
from ensemblekit_datasets.parallel_decoding import decode_all

if TYPE_CHECKING:
    from ensemblekit_datasets.parallel_decoding import Pixels

CACHE_FORMAT = 1
"""To be raised whenever the same files would be decoded or kept differently."""


class StreamedImages(Dataset[tuple[Tensor, int]]):
    """Image files that are decoded when they are asked for: (uint8 (C, H, W), class index)."""

    def __init__(self, folder: Path, names: Sequence[str], targets: Tensor, decoding: Decoding) -> None:
        self.folder, self.names, self.targets, self.decoding = folder, names, targets, decoding

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        [(name, data)] = Folder(self.folder).read([self.names[index]])
        return torch.tensor(self.decoding(data, f"{self.folder}/{name}")), int(self.targets[index])

    def subset(self, indices: Tensor) -> StreamedImages:
        """The images at these indices."""
        names = [self.names[index] for index in indices.tolist()]
        return StreamedImages(self.folder, names, self.targets[indices], self.decoding)


Part = tuple[Tensor, Tensor] | StreamedImages


@dataclass(frozen=True)
class LoadedFolders:
    """The parts of the data by name ("train", "test", "validation", or only "all") and what they share."""

    parts: Mapping[str, Part]
    classes: tuple[str, ...]
    shape: tuple[int, int, int]


def load_folders(
    path: Path, decoding: Decoding, storage: Literal["auto", "memory", "stream"], cache: Path
) -> LoadedFolders:
    """The images of a folder or archive as tensors if they are to be in memory, else as streams.

    Either way each file is decoded once before anything is returned, so a bad one is found before training;
    later loads read what was found from `cache`, as long as the contents are the same.
    """
    source = open_source(path)
    fingerprint = source.fingerprint()
    key = cache_key(CACHE_FORMAT, fingerprint, decoding)
    unpacked = cache / "unpacked" / fingerprint
    decoded_file = cache / "decoded" / f"{key}.safetensors"
    index_file = cache / "decoded" / f"{key}-index.safetensors"

    def in_memory(num_bytes: int) -> bool:
        return storage == "memory" or (storage == "auto" and fits_in_memory(num_bytes))

    if decoded_file.exists() and in_memory(decoded_file.stat().st_size) and (found := read_cache(decoded_file)):
        return _decoded(*found)
    if (found := read_cache(index_file)) and not in_memory(found[1]["num_bytes"]):
        return _streamed(*found, _on_disk(source, found[1]["names"], unpacked), decoding)

    folders = arrange(source.entries(), source.path)
    shape = next(decode_all(source.read([next(chain(*folders.names.values()))]), decoding, source.path))[1].shape
    num_bytes = sum(map(len, folders.names.values())) * int(torch.Size(shape).numel())
    notes = {"classes": folders.classes, "shape": shape, "num_bytes": num_bytes}
    targets = {f"{part}.targets": torch.tensor(found) for part, found in folders.targets.items()}
    if in_memory(num_bytes):
        tensors = targets | _decode_into_tensors(source, folders, decoding, shape)
        write_cache(decoded_file, tensors, notes)
        return _decoded(tensors, notes)
    on_disk = _on_disk(source, folders.names, unpacked)
    for _ in _checked(on_disk, folders, decoding, shape):
        pass
    notes["names"] = dict(folders.names)
    write_cache(index_file, targets, notes)
    return _streamed(targets, notes, on_disk, decoding)


def _decoded(tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> LoadedFolders:
    parts = {name.removesuffix(".images"): images for name, images in tensors.items() if name.endswith(".images")}
    pairs = {part: (images, tensors[f"{part}.targets"]) for part, images in parts.items()}
    return LoadedFolders(pairs, tuple(notes["classes"]), tuple(notes["shape"]))


def _streamed(
    tensors: Mapping[str, Tensor], notes: Mapping[str, Any], source: Folder, decoding: Decoding
) -> LoadedFolders:
    parts = {
        part: StreamedImages(source.path, names, tensors[f"{part}.targets"], decoding)
        for part, names in notes["names"].items()
    }
    return LoadedFolders(parts, tuple(notes["classes"]), tuple(notes["shape"]))


def _checked(
    source: ImageSource, folders: ClassFolders, decoding: Decoding, shape: tuple[int, ...]
) -> Iterator[tuple[str, Pixels]]:
    """Every image by name, decoded, and of the one shape that batches can be made of."""
    for name, pixels in decode_all(source.read(chain(*folders.names.values())), decoding, source.path):
        if pixels.shape != shape:
            what = f"image sizes differ: expected {_by(shape)} like the first, got {_by(pixels.shape)}"
            raise DataError(what, f"{source.path}/{name}", "set data.size to resize all")
        yield name, pixels


def _decode_into_tensors(
    source: ImageSource, folders: ClassFolders, decoding: Decoding, shape: tuple[int, ...]
) -> dict[str, Tensor]:
    tensors = {part: torch.empty((len(names), *shape), dtype=torch.uint8) for part, names in folders.names.items()}
    rows = {name: tensors[part].numpy()[i] for part, names in folders.names.items() for i, name in enumerate(names)}
    for name, pixels in _checked(source, folders, decoding, shape):
        rows[name][...] = pixels
    return {f"{part}.images": images for part, images in tensors.items()}


def _on_disk(source: ImageSource, names: Mapping[str, Sequence[str]], unpacked: Path) -> Folder:
    """The folder that has the files: the source itself, or `unpacked`, which appears in one step.

    Only files that `arrange` took for images are written, under names that the archive's check let pass.
    """
    if isinstance(source, Folder):
        return source
    if unpacked.exists():
        return Folder(unpacked)
    try:
        unpacked.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".unpack-", dir=unpacked.parent) as staging:
            contents = Path(staging, "contents")
            for name, data in source.read(chain(*names.values())):
                file = contents / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
            os.replace(contents, unpacked)
    except OSError as error:
        fix = "set ENSEMBLEKIT_DATA to a folder with room"
        raise DataError(f"cannot unpack {source.path}: {error.strerror}", str(unpacked), fix) from error
    return Folder(unpacked)


def _by(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
