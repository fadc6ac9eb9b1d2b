"""Loading of class folders, or of an archive of them: decoded and cached, or streamed from disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ensemblekit import DataError, Decoding, atomic_write, fits_in_memory, memory_limit
from ensemblekit_datasets.bad_images import BadImages
from ensemblekit_datasets.class_folders import ClassFolders, arrange
from ensemblekit_datasets.decoded_cache import UNPACKED_NOTE, cache_key, mark_used, read_cache, write_cache
from ensemblekit_datasets.decoded_rows import DecodedRows, RowWriter, Shape, room_on_disk
from ensemblekit_datasets.image_sources import Folder, ImageSource, open_source
from ensemblekit_datasets.parallel_decoding import decode_all
from ensemblekit_datasets.streamed_images import StreamedImages

CACHE_FORMAT = 2
"""Version of the cached files: to be increased if the same images would be decoded or stored differently."""

INDEX = "-index"
"""Suffix of the name of a cached file that has names and targets, but no images."""

ROWS = "-rows"
"""Suffix of the name of a cached file that has decoded images, which are read row by row."""

OnBad = Literal["error", "skip"]
Storage = Literal["auto", "memory", "stream"]


Images = tuple[Tensor, Tensor] | StreamedImages
Row = tuple[str, int]
"""Name and checksum of an image in the file of decoded images."""


@dataclass(frozen=True)
class LoadedFolders:
    """The images of each split ("train", "test", "validation", or only "all"), their classes and their shape."""

    splits: Mapping[str, Images]
    classes: tuple[str, ...]
    shape: Shape
    notes: tuple[tuple[str, str], ...] = ()
    """Rows for the plan: which files were ignored or skipped."""
    skipped: tuple[str, ...] = ()
    """Names of the images that were skipped because they cannot be used."""


def load_folders(
    path: Path, decoding: Decoding, storage: Storage, cache: Path, on_bad: OnBad | None = None
) -> LoadedFolders:
    """Load the images of a folder or archive as tensors if they are kept in memory, else as streams.

    Either way each file is decoded once before anything is returned, so that a damaged one is found before training;
    later loads read the result from the cache, as long as the content is the same.

    Args:
        path: The folder, or a .tar, .tar.gz, .tgz or .zip archive of it.
        decoding: Size and channels of the decoded images.
        storage: Whether to keep the images in memory; "auto": if they fit.
        cache: Directory for decoded images and unpacked archives.
        on_bad: What to do if images cannot be decoded: raise an error that lists all of them, or skip them. None: as
            "error", without the hint that they can be skipped.

    Raises:
        DataError: The layout is wrong, an archive is damaged or unsafe, an image cannot be decoded, or
            `storage` is "memory" and the images need more than there is.
    """
    loading = _Loading(open_source(path), decoding, storage, cache, on_bad)
    return loading.from_cache() or loading.from_files()


@dataclass(frozen=True)
class _Loading:
    """One call of `load_folders`."""

    source: ImageSource
    decoding: Decoding
    storage: Storage
    cache: Path
    on_bad: OnBad | None

    @cached_property
    def fingerprint(self) -> str:
        return self.source.fingerprint()

    @property
    def unpacked(self) -> Path:
        return self.cache / "unpacked" / self.fingerprint

    def cached_file(self, suffix: str = "") -> Path:
        key = cache_key(CACHE_FORMAT, self.fingerprint, self.decoding)
        return self.cache / "decoded" / f"{key}{suffix}.safetensors"

    def use_memory(self, num_bytes: int) -> bool:
        return self.storage == "memory" or (self.storage == "auto" and fits_in_memory(num_bytes))

    def most_copies(self, shape: Sequence[int]) -> int:
        """Return how many decoded images of a shape there is room for on the disk."""
        return room_on_disk(self.cache) // prod(shape)

    def from_cache(self) -> LoadedFolders | None:
        """Read what an earlier load has left; None if there is nothing for this storage."""
        decoded, index = self.cached_file(), self.cached_file(INDEX)
        if decoded.exists() and self.use_memory(decoded.stat().st_size) and (cached := read_cache(decoded)):
            BadImages.of_cache(cached[1], self.source.path).raise_unless_skipped(self.on_bad)
            return _as_tensors(*cached)
        if (cached := read_cache(index)) and not self.use_memory(cached[1]["num_bytes"]):
            BadImages.of_cache(cached[1], self.source.path).raise_unless_skipped(self.on_bad)
            copies = _copies(*cached, self.cached_file(ROWS))
            num_images = sum(map(len, cached[1]["names"].values()))
            num_copies = sum(int((copy.rows >= 0).sum()) for copy in copies.values())
            if num_copies >= min(num_images, self.most_copies(cached[1]["shape"])):
                source = _on_disk(self.source, cached[1]["names"], self.unpacked)
                return _as_streams(*cached, source, self.decoding, copies)
        return None

    def from_files(self) -> LoadedFolders:
        """Decode every image once and write the cache: the images, which a stream reads from there."""
        source = self.source
        folders = arrange(source.entries(), source.path)
        shape = _first_shape(source, folders, self.decoding, self.on_bad)
        num_bytes = len(folders.all_names) * prod(shape)
        in_memory = self.use_memory(num_bytes)
        if in_memory:
            check_memory(num_bytes, source.path)
        reader = source if in_memory else _on_disk(source, folders.names, self.unpacked)
        bad = BadImages(source.path, len(folders.all_names))
        tensors, rows = {}, []
        if in_memory:
            tensors = _decode(reader, folders, self.decoding, shape, bad)
        else:
            rows = self.write_rows(reader, folders, shape, bad)
        bad.raise_unless_skipped(self.on_bad)
        kept = folders.without(bad.skipped.keys(), source.path)
        metadata = {
            "source": str(source.path),
            "classes": kept.classes,
            "shape": shape,
            "num_bytes": num_bytes,
            "num_images": bad.num_images,
            "ignored": kept.ignored,
            "skipped": bad.skipped,
        }
        tensors |= {f"{split}.targets": torch.tensor(classes) for split, classes in kept.targets.items()}
        if in_memory:
            write_cache(self.cached_file(), tensors, metadata)
            return _as_tensors(tensors, metadata)
        metadata["names"] = dict(kept.names)
        if rows:
            tensors |= _row_tensors(kept, rows)
        write_cache(self.cached_file(INDEX), tensors, metadata)
        copies = _copies(tensors, metadata, self.cached_file(ROWS))
        return _as_streams(tensors, metadata, Folder(reader.path), self.decoding, copies)

    def write_rows(self, source: ImageSource, folders: ClassFolders, shape: Shape, bad: BadImages) -> list[Row]:
        """Decode every image as a check, and keep as many decoded copies as the disk has room for; returns their rows.

        Those of the first images are kept: epochs are shuffled, so each batch has about the same share of them.
        """
        names = folders.all_names
        most = min(len(names), self.most_copies(shape))
        written: list[str] = []
        with ExitStack() as stack:
            path, origin = self.cached_file(ROWS), str(self.source.path)
            writer = stack.enter_context(RowWriter(path, shape, most, origin)) if most else None
            for name, pixels in decode_all(source.read(names), self.decoding, source.path, shape):
                if isinstance(pixels, DataError):
                    bad.add(name, pixels)
                elif writer is not None and len(written) < most:
                    writer.add(pixels)
                    written.append(name)
            bad.raise_unless_skipped(self.on_bad)
        return list(zip(written, writer.checksums, strict=False)) if writer is not None else []


def check_memory(num_bytes: int, path: Path) -> None:
    """Raise a `DataError` if decoded images are to be kept in memory, but take more than there is."""
    if num_bytes > (limit := memory_limit()):
        needed, available = (f"{value / 2**30:.1f} GiB" for value in (num_bytes, limit))
        what = f"the decoded images take {needed}, but only {available} of memory may be used"
        raise DataError(what, str(path), 'set data.size, or set data.storage = "stream"')


def _first_shape(source: ImageSource, folders: ClassFolders, decoding: Decoding, on_bad: OnBad | None) -> Shape:
    """Return the shape of the first image that can be decoded, which all others must have."""
    bad = BadImages(source.path, len(folders.all_names))
    for name, content in source.read(folders.all_names):
        try:
            if isinstance(content, DataError):
                raise content
            encoded = decoding.open(content, f"{source.path}/{name}")
            encoded.decode()
            return encoded.shape
        except DataError as error:
            bad.add(name, error)
    raise bad.error(on_bad)


def _decode(
    source: ImageSource, folders: ClassFolders, decoding: Decoding, shape: Shape, bad: BadImages
) -> dict[str, Tensor]:
    """Decode every image into tensors; those that cannot be used are added to `bad`.

    Without the images that are bad, the tensors are in the order of the names.
    """
    names = folders.names
    tensors = {split: torch.empty((len(names[split]), *shape), dtype=torch.uint8) for split in names}
    rows = {name: tensors[split].numpy()[i] for split in names for i, name in enumerate(names[split])}
    for name, pixels in decode_all(source.read(folders.all_names), decoding, source.path, shape):
        if isinstance(pixels, DataError):
            bad.add(name, pixels)
        else:
            rows[name][...] = pixels
    if bad:
        is_good = {split: torch.tensor([name not in bad.skipped for name in names[split]]) for split in names}
        tensors = {split: images[is_good[split]] for split, images in tensors.items()}
    return {f"{split}.images": images for split, images in tensors.items()}


def _as_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> LoadedFolders:
    images = {name.removesuffix(".images"): value for name, value in tensors.items() if name.endswith(".images")}
    return _loaded({split: (inputs, tensors[f"{split}.targets"]) for split, inputs in images.items()}, metadata)


def _row_tensors(kept: ClassFolders, rows: Sequence[Row]) -> dict[str, Tensor]:
    """Return the row and the checksum of each image of each split; the row -1 if it has no copy."""
    numbers = {name: (row, checksum) for row, (name, checksum) in enumerate(rows)}
    found = {
        split: torch.tensor([numbers.get(name, (-1, 0)) for name in names]).T for split, names in kept.names.items()
    }
    return {
        f"{split}.{part}": values.contiguous()
        for split, pair in found.items()
        for part, values in zip(("rows", "checksums"), pair, strict=True)
    }


def _copies(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], file: Path) -> dict[str, DecodedRows]:
    """Open the decoded copies of the images of each split; none if there is no such file."""
    copies = {}
    for split in metadata["names"]:
        if f"{split}.rows" not in tensors:
            return {}
        rows, checksums = tensors[f"{split}.rows"], tensors[f"{split}.checksums"]
        if (opened := DecodedRows.open(file, tuple(metadata["shape"]), rows, checksums)) is None:
            return {}
        copies[split] = opened
    return copies


def _as_streams(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
    source: Folder,
    decoding: Decoding,
    copies: Mapping[str, DecodedRows],
) -> LoadedFolders:
    streams = {
        split: StreamedImages(source.path, names, tensors[f"{split}.targets"], decoding, copies.get(split))
        for split, names in metadata["names"].items()
    }
    return _loaded(streams, metadata)


def _loaded(splits: Mapping[str, Images], metadata: Mapping[str, Any]) -> LoadedFolders:
    skipped = tuple(metadata["skipped"])
    notes = (*_ignored_note(metadata["ignored"]), *_skipped_note(skipped, metadata["num_images"]))
    return LoadedFolders(splits, tuple(metadata["classes"]), tuple(metadata["shape"]), notes, skipped)


def _ignored_note(ignored: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    if ignored:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in ignored.items())
        yield "ignored files", f"{sum(ignored.values()):,}: {reasons}"


def _skipped_note(skipped: Sequence[str], num_images: int) -> Iterator[tuple[str, str]]:
    if skipped:
        rest = ", … (ensemblekit cache --json lists all)" if len(skipped) > 3 else ""
        names = ", ".join(skipped[:3])
        yield "skipped images", f"{len(skipped):,} of {num_images:,} cannot be decoded: {names}{rest}"


def _on_disk(source: ImageSource, names: Mapping[str, Sequence[str]], unpacked: Path) -> Folder:
    """Return the folder of the files: the source itself, or `unpacked`, which appears complete or not at all.

    Only the images that `arrange` selected are written, under names that the archive's checks have accepted.
    """
    if isinstance(source, Folder):
        return source
    if not unpacked.exists():
        try:
            with atomic_write(unpacked) as staged:
                staged.mkdir()
                (staged / UNPACKED_NOTE).write_text(json.dumps({"source": str(source.path)}))
                for name, content in source.read([name for split in names.values() for name in split]):
                    _write(staged / name, content)
        except OSError as error:
            # Another process may have unpacked the same archive in the meantime: what it left is complete.
            if not unpacked.is_dir():
                fix = (
                    "shorten long file names, or set ENSEMBLEKIT_DATA to a folder with free space that you may write to"
                )
                raise DataError(f"cannot unpack {source.path}: {error.strerror}", str(unpacked), fix) from error
    mark_used(unpacked)
    return Folder(unpacked)


def _write(file: Path, content: bytes | DataError) -> None:
    if isinstance(content, DataError):
        raise content
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
