"""Which images there are and of which class, from the names of folders alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ensemblekit import DataError
from ensemblekit_datasets.image_sources import Entry
from ensemblekit_datasets.parallel_decoding import SUFFIXES

PARTS = {"train": "train", "test": "test", "val": "validation", "validation": "validation"}
"""Folders that mean a part of the data rather than a class."""
LAYOUTS = "expected train/<class>/<image> with test/<class>/<image>, or <class>/<image>"


@dataclass(frozen=True)
class ClassFolders:
    """The images by part and class. Without a folder for tests the only part is "all"."""

    classes: tuple[str, ...]
    names: Mapping[str, tuple[str, ...]]
    targets: Mapping[str, tuple[int, ...]]


def arrange(entries: Sequence[Entry], folder: Path) -> ClassFolders:
    """Sort the entries of a folder into parts and classes; classes are in the order of their sorted names.

    One folder around everything is looked through; hidden files and files that are no images are passed over.
    """
    paths = {tuple(entry.name.split("/")): entry.is_directory for entry in entries if _is_visible(entry.name)}
    # Many archives list only files, so a folder is also what a file lies in.
    folders = {path[:depth] for path, is_dir in paths.items() for depth in range(1, len(path) + is_dir)}
    start = 1 if len({path[0] for path in folders}) == 1 and any(len(path) == 2 for path in folders) else 0
    tops = {path[start] for path in folders if len(path) == start + 1}
    by_part = "train" in tops and any(PARTS.get(top, "train") != "train" for top in tops)
    depth = start + (2 if by_part else 1)

    members: dict[tuple[str, ...], list[str]] = {}
    for path, is_directory in paths.items():
        if by_part and len(path) > start and path[start] not in PARTS:
            continue
        if is_directory and len(path) == depth:
            members.setdefault(path, [])
        elif not is_directory and path[-1].lower().endswith(SUFFIXES):
            if len(path) != depth + 1:
                raise DataError("image is not in a class folder", str(folder.joinpath(*path)), LAYOUTS)
            members.setdefault(path[:-1], []).append("/".join(path))
    if not any(members.values()):
        raise DataError("no images (" + ", ".join(SUFFIXES) + ")", str(folder), LAYOUTS)
    for path, names in members.items():
        if not names:
            raise DataError("class folder has no images", str(folder.joinpath(*path)), "fill it or remove it")
    return _by_class(members, start if by_part else None, folder)


def _by_class(members: Mapping[tuple[str, ...], list[str]], part_at: int | None, folder: Path) -> ClassFolders:
    parts: dict[str, dict[str, list[str]]] = {}
    for path, names in members.items():
        part = "all" if part_at is None else PARTS[path[part_at]]
        if path[-1] in parts.setdefault(part, {}):
            raise DataError(f"both val and validation have a class {path[-1]!r}", str(folder), "keep one of them")
        parts[part][path[-1]] = names
    if part_at is not None and "test" not in parts:
        parts["test"] = parts.pop("validation")
    classes = tuple(sorted(next(iter(parts.values())) if part_at is None else parts["train"]))
    for part, by_class in parts.items():
        if different := set(classes) ^ set(by_class):
            what = f"train and {part} have different classes: {_some(different)} in only one of them"
            raise DataError(what, str(folder), "give each class a folder in every part")
    if len(classes) < 2:
        raise DataError(f"only one class: {classes[0]!r}", str(folder), LAYOUTS)
    return ClassFolders(
        classes,
        {part: tuple(name for label in classes for name in sorted(found[label])) for part, found in parts.items()},
        {part: tuple(i for i, label in enumerate(classes) for _ in found[label]) for part, found in parts.items()},
    )


def _is_visible(name: str) -> bool:
    """Not hidden, and not one of the shadow files that macOS adds to archives."""
    return not any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first!r} and {len(others)} more" if others else repr(first)
