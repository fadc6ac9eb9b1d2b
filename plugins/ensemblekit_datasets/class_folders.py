"""Class folders: the images of each split and class, by the names of folders alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from ensemblekit import DataError
from ensemblekit_datasets.image_sources import Entry

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
SPLIT_NAMES = {"train": "train", "test": "test", "val": "validation", "validation": "validation"}
"""Names of folders that hold a split rather than a class."""
LAYOUTS = "expected train/<class>/<image> with test/<class>/<image>, or <class>/<image>"
WHOLE = "all"
"""Name of the only split if the folders do not distinguish training from test images."""

PathParts = tuple[str, ...]


@dataclass(frozen=True)
class ClassFolders:
    """The images by split and class. Without a folder for the test split, the only split is `WHOLE`."""

    classes: tuple[str, ...]
    names: Mapping[str, tuple[str, ...]]
    """Paths of the images of each split, relative to the folder."""
    targets: Mapping[str, tuple[int, ...]]
    """Class indices of the images of each split."""
    ignored: Mapping[str, int] = field(default_factory=dict)
    """Number of files that are not used, by the reason."""

    @property
    def all_names(self) -> list[str]:
        """The paths of all images."""
        return [name for names in self.names.values() for name in names]

    def without(self, skipped: Set[str], folder: Path) -> ClassFolders:
        """Leave out some images; a `DataError` if a class has none left in a split."""
        kept = {split: [name not in skipped for name in names] for split, names in self.names.items()}
        names = {split: _where(kept[split], values) for split, values in self.names.items()}
        targets = {split: _where(kept[split], values) for split, values in self.targets.items()}
        for split, values in targets.items():
            for index in sorted(set(self.targets[split]) - set(values)):
                what = f"class {self.classes[index]!r} has no image left" + (f" in {split}" if split != WHOLE else "")
                raise DataError(f"{what}: all of them were skipped", str(folder), "replace the images of this class")
        return replace(self, names=names, targets=targets)


@dataclass(frozen=True)
class _Layout:
    """Depths, counted in parts of a path, at which splits and classes are found."""

    split_depth: int | None
    """Index of the part that names the split; None if the classes are not divided into splits."""
    class_depth: int
    """Index of the part that names the class."""

    @classmethod
    def of(cls, folders: set[PathParts]) -> _Layout:
        # A single folder around everything is skipped.
        has_wrapper = len({path[0] for path in folders}) == 1 and any(len(path) == 2 for path in folders)
        start = 1 if has_wrapper else 0
        top_names = {path[start] for path in folders if len(path) == start + 1}
        has_splits = "train" in top_names and any(SPLIT_NAMES.get(name, "train") != "train" for name in top_names)
        return cls(start, start + 1) if has_splits else cls(None, start)

    def ignores(self, path: PathParts) -> bool:
        """Tell whether a path is next to the splits, but in none of them."""
        depth = self.split_depth
        return depth is not None and len(path) > depth and path[depth] not in SPLIT_NAMES


def arrange(entries: Sequence[Entry], folder: Path) -> ClassFolders:
    """Sort the entries of a folder into splits and classes; classes are in the order of their sorted names.

    A single folder around everything is skipped; hidden files and files that are not images are ignored.

    Raises:
        DataError: There are no images, an image is not in a class folder, a class folder is empty, there is only one
            class, or the splits have different classes.
    """
    paths = {tuple(entry.name.split("/")): entry.is_directory for entry in entries if _is_visible(entry.name)}
    # Many archives list only files, so every parent of a file is a folder, too.
    folders = {path[:depth] for path, is_directory in paths.items() for depth in range(1, len(path) + is_directory)}
    layout = _Layout.of(folders)
    relevant = {path: is_directory for path, is_directory in paths.items() if not layout.ignores(path)}
    images: dict[PathParts, list[str]] = {
        path: [] for path, is_directory in relevant.items() if is_directory and len(path) == layout.class_depth + 1
    }
    for path, is_directory in relevant.items():
        if is_directory or not path[-1].lower().endswith(SUFFIXES):
            continue
        if len(path) != layout.class_depth + 2:
            raise DataError("image is not in a class folder", str(folder.joinpath(*path)), LAYOUTS)
        images.setdefault(path[:-1], []).append("/".join(path))
    if not any(images.values()):
        raise DataError("no images (" + ", ".join(SUFFIXES) + ")", str(folder), LAYOUTS)
    for path, names in images.items():
        if not names:
            raise DataError(
                "class folder has no images", str(folder.joinpath(*path)), "add images or remove the folder"
            )
    ignored = _ignored(entries, paths, relevant)
    return replace(_by_class(images, layout.split_depth, folder), ignored=ignored)


def _ignored(
    entries: Sequence[Entry], visible: Mapping[PathParts, bool], relevant: Mapping[PathParts, bool]
) -> dict[str, int]:
    """Count the files that are not used, by the reason."""
    reasons: Counter[str] = Counter()
    for entry in entries:
        path = tuple(entry.name.split("/"))
        if entry.is_directory:
            continue
        if path not in visible:
            reasons["hidden"] += 1
        elif path not in relevant:
            reasons["in no split"] += 1
        elif not path[-1].lower().endswith(SUFFIXES):
            reasons[PurePosixPath(path[-1]).suffix.lower() or "without suffix"] += 1
    return dict(reasons.most_common())


def _by_class(images: Mapping[PathParts, list[str]], split_depth: int | None, folder: Path) -> ClassFolders:
    splits: dict[str, dict[str, list[str]]] = {}
    for path, names in images.items():
        split = WHOLE if split_depth is None else SPLIT_NAMES[path[split_depth]]
        if path[-1] in splits.setdefault(split, {}):
            raise DataError(f"both val and validation have a class {path[-1]!r}", str(folder), "keep one of them")
        splits[split][path[-1]] = names
    if split_depth is not None and "test" not in splits:
        splits["test"] = splits.pop("validation")
    classes = tuple(sorted(splits[WHOLE if split_depth is None else "train"]))
    for split, by_class in splits.items():
        if different := set(classes) ^ set(by_class):
            what = f"train and {split} have different classes: {_first_of(different)} in only one of them"
            raise DataError(what, str(folder), "create a folder for every class in each of them")
    if len(classes) < 2:
        raise DataError(f"only one class: {classes[0]!r}", str(folder), LAYOUTS)
    return ClassFolders(
        tuple(_as_text(name) for name in classes),
        {
            split: tuple(name for label in classes for name in sorted(by_class[label]))
            for split, by_class in splits.items()
        },
        {
            split: tuple(i for i, label in enumerate(classes) for _ in by_class[label])
            for split, by_class in splits.items()
        },
    )


def _as_text(name: str) -> str:
    """Escape the bytes of a file name that are not UTF-8: class names are written to files and shown."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _where(mask: Sequence[bool], values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(value for keep, value in zip(mask, values, strict=True) if keep)


def _is_visible(name: str) -> bool:
    """Tell whether an entry is neither hidden nor one of the metadata files that macOS adds to archives."""
    return not any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _first_of(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first!r} and {len(others)} more" if others else repr(first)
