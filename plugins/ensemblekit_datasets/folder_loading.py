"""Loading of class folders, or of an archive of them: decoded and cached, or streamed from disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ensemblekit import DataError, Decoding, atomic_write, fits_in_memory
from ensemblekit_datasets.class_folders import ClassFolders, arrange
from ensemblekit_datasets.decoded_cache import cache_key, read_cache, write_cache
from ensemblekit_datasets.image_sources import Folder, ImageSource, open_source
from ensemblekit_datasets.parallel_decoding import decode_all

if TYPE_CHECKING:
    from ensemblekit_datasets.parallel_decoding import Pixels

CACHE_FORMAT = 1
"""Version of the cached files: to be increased if the same images would be decoded or stored differently."""


class StreamedImages(Dataset[tuple[Tensor, int]]):
    """Image files that are decoded on demand: (uint8 (C, H, W), class index)."""

    def __init__(self, folder: Path, names: Sequence[str], targets: Tensor, decoding: Decoding) -> None:
        self.folder, self.names, self.targets, self.decoding = folder, names, targets, decoding

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        [(name, data)] = Folder(self.folder).read([self.names[index]])
        return torch.tensor(self.decoding(data, f"{self.folder}/{name}")), int(self.targets[index])

    def subset(self, indices: Tensor) -> StreamedImages:
        """Return the images at some indices."""
        names = [self.names[index] for index in indices.tolist()]
        return StreamedImages(self.folder, names, self.targets[indices], self.decoding)


Images = tuple[Tensor, Tensor] | StreamedImages


@dataclass(frozen=True)
class LoadedFolders:
    """The images of each split ("train", "test", "validation", or only "all"), their classes and their shape."""

    splits: Mapping[str, Images]
    classes: tuple[str, ...]
    shape: tuple[int, int, int]


def load_folders(
    path: Path, decoding: Decoding, storage: Literal["auto", "memory", "stream"], cache: Path
) -> LoadedFolders:
    """Load the images of a folder or archive as tensors if they are kept in memory, else as streams.

    Either way each file is decoded once before anything is returned, so that a damaged one is found before training;
    later loads read the result from the cache, as long as the content is the same.

    Args:
        path: The folder, or a .tar, .tar.gz, .tgz or .zip archive of it.
        decoding: Size and channels of the decoded images.
        storage: Whether to keep the images in memory; "auto": if they fit.
        cache: Directory for decoded images and unpacked archives.

    Raises:
        DataError: The layout is wrong, an archive is damaged or unsafe, or an image cannot be decoded.
    """
    source = open_source(path)
    fingerprint = source.fingerprint()
    key = cache_key(CACHE_FORMAT, fingerprint, decoding)
    unpacked = cache / "unpacked" / fingerprint
    decoded_file = cache / "decoded" / f"{key}.safetensors"
    index_file = cache / "decoded" / f"{key}-index.safetensors"

    def use_memory(num_bytes: int) -> bool:
        return storage == "memory" or (storage == "auto" and fits_in_memory(num_bytes))

    if decoded_file.exists() and use_memory(decoded_file.stat().st_size) and (cached := read_cache(decoded_file)):
        return _as_tensors(*cached)
    if (cached := read_cache(index_file)) and not use_memory(cached[1]["num_bytes"]):
        return _as_streams(*cached, _on_disk(source, cached[1]["names"], unpacked), decoding)

    folders = arrange(source.entries(), source.path)
    shape = next(decode_all(source.read([next(chain(*folders.names.values()))]), decoding, source.path))[1].shape
    num_bytes = sum(map(len, folders.names.values())) * int(torch.Size(shape).numel())
    metadata = {"classes": folders.classes, "shape": shape, "num_bytes": num_bytes}
    targets = {f"{split}.targets": torch.tensor(classes) for split, classes in folders.targets.items()}
    if use_memory(num_bytes):
        tensors = targets | _decode_into_tensors(source, folders, decoding, shape)
        write_cache(decoded_file, tensors, metadata)
        return _as_tensors(tensors, metadata)
    on_disk = _on_disk(source, folders.names, unpacked)
    for _ in _decode_checked(on_disk, folders, decoding, shape):
        pass
    metadata["names"] = dict(folders.names)
    write_cache(index_file, targets, metadata)
    return _as_streams(targets, metadata, on_disk, decoding)


def _as_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> LoadedFolders:
    images = {name.removesuffix(".images"): value for name, value in tensors.items() if name.endswith(".images")}
    pairs = {split: (inputs, tensors[f"{split}.targets"]) for split, inputs in images.items()}
    return LoadedFolders(pairs, tuple(metadata["classes"]), tuple(metadata["shape"]))


def _as_streams(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], source: Folder, decoding: Decoding
) -> LoadedFolders:
    streams = {
        split: StreamedImages(source.path, names, tensors[f"{split}.targets"], decoding)
        for split, names in metadata["names"].items()
    }
    return LoadedFolders(streams, tuple(metadata["classes"]), tuple(metadata["shape"]))


def _decode_checked(
    source: ImageSource, folders: ClassFolders, decoding: Decoding, shape: tuple[int, ...]
) -> Iterator[tuple[str, Pixels]]:
    """Decode every image and check that all have the same shape, as batches need it."""
    for name, pixels in decode_all(source.read(chain(*folders.names.values())), decoding, source.path):
        if pixels.shape != shape:
            expected, got = ("×".join(map(str, size)) for size in (shape, pixels.shape))
            what = f"image sizes differ: expected {expected} like the first, got {got}"
            raise DataError(what, f"{source.path}/{name}", "set data.size to resize all")
        yield name, pixels


def _decode_into_tensors(
    source: ImageSource, folders: ClassFolders, decoding: Decoding, shape: tuple[int, ...]
) -> dict[str, Tensor]:
    tensors = {split: torch.empty((len(names), *shape), dtype=torch.uint8) for split, names in folders.names.items()}
    rows = {name: tensors[split].numpy()[i] for split, names in folders.names.items() for i, name in enumerate(names)}
    for name, pixels in _decode_checked(source, folders, decoding, shape):
        rows[name][...] = pixels
    return {f"{split}.images": images for split, images in tensors.items()}


def _on_disk(source: ImageSource, names: Mapping[str, Sequence[str]], unpacked: Path) -> Folder:
    """Return the folder of the files: the source itself, or `unpacked`, which appears complete or not at all.

    Only the images that `arrange` selected are written, under names that the archive's checks have accepted.
    """
    if isinstance(source, Folder):
        return source
    if unpacked.exists():
        return Folder(unpacked)
    try:
        with atomic_write(unpacked) as staged:
            for name, data in source.read(chain(*names.values())):
                file = staged / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
    except OSError as error:
        fix = "set ENSEMBLEKIT_DATA to a folder with free space that you may write to"
        raise DataError(f"cannot unpack {source.path}: {error.strerror}", str(unpacked), fix) from error
    return Folder(unpacked)
