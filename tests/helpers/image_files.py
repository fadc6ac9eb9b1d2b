"""Image files as a folder or as an archive, and PNG files that Pillow does not write."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

Files = dict[str, bytes]


def pixels(seed: int, *shape: int) -> np.ndarray:
    """Random uint8 pixels, (6, 5, 3) unless a shape is given."""
    return np.random.default_rng(seed).integers(0, 256, shape or (6, 5, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray, file_format: str = "PNG", mode: str | None = None) -> bytes:
    """The bytes of an image file of uint8 (H, W) or (H, W, C) pixels."""
    image, buffer = Image.fromarray(pixels), io.BytesIO()
    image = image.convert(mode) if mode else image
    image.save(buffer, file_format, **({"lossless": True} if file_format == "WEBP" else {}))
    return buffer.getvalue()


def two_classes(content: bytes, count: int = 1) -> Files:
    """The same file several times in each class of a training and a test part."""
    names = [f"{part}/{label}/{i}.png" for part in ("train", "test") for label in "ab" for i in range(count)]
    return dict.fromkeys(names, content)


def as_folder(path: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def as_tar(path: Path, files: Mapping[str, bytes]) -> Path:
    mode = "w" if path.suffix == ".tar" else "w:gz"
    with tarfile.open(path, mode) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def as_zip(path: Path, files: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


WRITERS: dict[str, Callable[[Path, Mapping[str, bytes]], Path]] = {
    "images": as_folder,
    "images.tar": as_tar,
    "images.tar.gz": as_tar,
    "images.TGZ": as_tar,
    "images.zip": as_zip,
}


def png(values: np.ndarray, width: int | None = None, height: int | None = None) -> bytes:
    """A PNG of uint8 or uint16 values (H, W) or (H, W, C), byte by byte; it may claim another size than it has."""
    colour_type = {1: 0, 2: 4, 3: 2, 4: 6}[1 if values.ndim == 2 else values.shape[2]]
    depth = 8 * values.itemsize
    rows = b"".join(b"\0" + row.astype(f">u{values.itemsize}").tobytes() for row in values)
    size = (width or values.shape[1], height or values.shape[0])
    header = struct.pack(">IIBBBBB", *size, depth, colour_type, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    written = (struct.pack(">I", len(d)) + kind + d + struct.pack(">I", zlib.crc32(kind + d)) for kind, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)
