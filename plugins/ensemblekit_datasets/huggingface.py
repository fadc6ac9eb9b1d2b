"""Hugging Face data sets in a local folder, read without the package `datasets`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ensemblekit import DataError, DataInfo, ImageDataset, Prepared, Splits

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit_datasets.arrow_columns import Array, Targets
    from ensemblekit_datasets.arrow_images import Images
    from ensemblekit_datasets.arrow_splits import StoredSplit

Name = Annotated[str, Field(min_length=1)]
PURPOSES = {"train": "training", "validation": "validation", "test": "testing"}


class HuggingFace(ImageDataset):
    """Your Hugging Face data set in a local folder, with images or numbers to predict classes or values from.

    The folder was written by `save_to_disk` (Arrow), or has Parquet files as hubs store them, such as
    data/train-00000-of-00001.parquet. Nothing is downloaded and no code of a data set is executed. Names of classes
    are those of the data set. Numbers are standardised by the training rows, and a missing number is the mean.
    """

    source = "your files"

    path: Path = Field(description="the folder")
    features: tuple[Name, ...] = Field(
        (),
        description="columns of the inputs: one of images, or some of numbers; default: the only column of images, or "
        "else all columns of numbers",
    )
    target: Name | None = Field(None, description="column to predict; default: the only column of class labels")
    task: Literal["auto", "classification", "regression"] = Field(
        "auto",
        description="whether to predict a class or real values; auto: values if the target is a floating-point number",
    )
    train_split: Name | None = Field(None, description='split for training; default: "train", or the only split')
    validation_split: Name | None = Field(
        None, description='split for validation; default: "validation", which is for testing if there is no test split'
    )
    test_split: Name | None = Field(None, description='split for testing; default: "test"')
    test_fraction: float = Field(
        0.2, gt=0, lt=1, description="share of the rows held out for testing, by the seed, if there is no such split"
    )
    channels: Literal[1, 3] = Field(3, description="3 to read images as RGB, 1 as grey")
    standardise_targets: bool = Field(
        True, description="standardise real targets for training; predictions are in the original units in any case"
    )

    @property
    def known_task(self) -> Literal["classification", "regression"] | None:
        return None if self.task == "auto" else self.task

    def places(self) -> Sequence[Path]:
        return (self._folder,)

    @property
    def _folder(self) -> Path:
        return Path(os.path.expanduser(self.path))

    def load(self, seed: int) -> Splits:
        from ensemblekit_datasets.arrow_columns import Targets, check_column, column_names, find_features, find_target

        splits = self._choose_splits()
        train = splits["train"]
        target = find_target(train, self.target)
        features = find_features(train, self.features, target)
        for split in splits.values():
            check_column(split, target, "target")
            for name in features:
                check_column(split, name, "features")
        if target in features:
            raise DataError(f'the target "{target}" is among the features', str(train.folder), "leave it out")
        described = Targets.of(train, target, self.task)
        targets = {role: described.read(split, target) for role, split in splits.items()}
        chosen = _Chosen(splits, features, target, described, targets)
        images = column_names(train, "image")
        if len(features) == 1 and features[0] in images:
            return self._load_images(chosen, seed)
        for name in features:
            if name in images:
                what = f'column "{name}" of images cannot be combined with others'
                raise DataError(what, str(train.folder), "set data.features to one column of images, or to numbers")
        return self._load_numbers(chosen, seed)

    def _choose_splits(self) -> dict[str, StoredSplit]:
        """Find the splits by their roles; without a test split, that of validation has its role."""
        from ensemblekit_datasets.arrow_splits import NAMES, choose, find_splits

        found = find_splits(self._folder.absolute())
        named = {"train": self.train_split, "validation": self.validation_split, "test": self.test_split}
        chosen = {role: choose(found, role, named[role], self._folder) for role in NAMES}
        if chosen["train"] is None and len(found) == 1:
            chosen["train"] = next(iter(found.values()))
        if chosen["train"] is None:
            fix = f"set data.train_split to one of: {', '.join(found)}"
            raise DataError("no split for training", str(self._folder), fix)
        if chosen["test"] is None and self.validation_split is None:
            chosen["test"], chosen["validation"] = chosen["validation"], None
        return {role: split for role, split in chosen.items() if split is not None}

    def _load_images(self, chosen: _Chosen, seed: int) -> Splits:
        from ensemblekit import Decoding
        from ensemblekit_datasets.arrow_images import StreamedRows, decode_split, first_shape, use_memory

        decoding, column = Decoding(self.size, self.channels), chosen.features[0]
        shape = first_shape(chosen.splits["train"], column, decoding)
        in_memory = use_memory(self.storage, sum(map(len, chosen.targets.values())), shape, self._folder)
        loaded: dict[str, Any] = {}
        for role, split in chosen.splits.items():
            targets = chosen.targets[role]
            if in_memory:
                loaded[role] = (decode_split(split, column, len(targets), decoding, shape), targets)
            else:
                loaded[role] = StreamedRows(split, column, targets, decoding, shape)
        indices: dict[str, Tensor] = {}
        if "test" not in loaded:
            indices = self._hold_out_test(chosen.targets["train"], seed)
            loaded |= {role: _select(loaded["train"], rows) for role, rows in indices.items()}
        side = self.crop_size
        info = DataInfo(chosen.described.task, (shape[0], side or shape[1], side or shape[2]), chosen.num_outputs)
        return self._splits(chosen, loaded, info, indices)

    def _load_numbers(self, chosen: _Chosen, seed: int) -> Splits:
        import numpy as np

        from ensemblekit import generator, hold_out
        from ensemblekit_datasets.arrow_columns import Scaling, input_names, read_numbers

        columns = {role: {name: read_numbers(s, name) for name in chosen.features} for role, s in chosen.splits.items()}
        values: dict[str, Array] = {role: np.hstack(list(named.values())) for role, named in columns.items()}
        targets, indices = dict(chosen.targets), {}
        if "test" not in values:
            indices = self._hold_out_test(targets["train"], seed)
        elif "validation" not in values:
            indices = {"train": _all_rows(targets["train"])}
        if "validation" not in values and self.validation_fraction > 0:
            # here, so that the scaling is fitted without the validation rows
            rows = indices["train"]
            kept, held = hold_out(targets["train"][rows], self.validation_fraction, generator(seed, "huggingface"))
            indices |= {"train": rows[kept], "validation": rows[held]}
        all_values, all_targets = values["train"], targets["train"]
        for role, rows in indices.items():
            values[role], targets[role] = all_values[rows.numpy()], all_targets[rows]
        scaling = Scaling.fit(input_names(columns["train"]), values["train"])
        loaded = {role: (scaling(values[role]), targets[role]) for role in values}
        info = DataInfo(chosen.described.task, (len(scaling.names),), chosen.num_outputs)
        return self._splits(chosen, loaded, info, indices, {"scaling": scaling.to_json()})

    def _hold_out_test(self, targets: Tensor, seed: int) -> dict[str, Tensor]:
        from ensemblekit import generator, hold_out

        kept, held_out = hold_out(targets, self.test_fraction, generator(seed, "huggingface", "test"))
        return {"train": kept, "test": held_out}

    def _splits(
        self,
        chosen: _Chosen,
        loaded: Mapping[str, Any],
        info: DataInfo,
        indices: Mapping[str, Tensor],
        preparation: Mapping[str, Any] | None = None,
    ) -> Splits:
        return Splits(
            loaded["train"],
            loaded["test"],
            info,
            validation=loaded.get("validation"),
            classes=chosen.described.classes,
            notes=chosen.notes,
            standardise_targets=self.standardise_targets and info.task == "regression",
            preparation=preparation,
            indices=indices,
        )

    def prepare(self, path: Path, preparation: Mapping[str, Any]) -> Prepared:
        import numpy as np

        from ensemblekit_datasets.arrow_columns import Scaling
        from ensemblekit_datasets.columns import Kind, NumberFormat, typed_columns
        from ensemblekit_datasets.table_files import read_raw

        try:
            scaling = Scaling.from_json(preparation["scaling"])
        except (KeyError, TypeError) as error:
            what = f"the run's scaling has an unexpected structure ({type(error).__name__}: {error})"
            raise DataError(what, "preparation in model.json", "restore the file") from error
        kinds: dict[str, Kind | None] = dict.fromkeys(scaling.names, "number")
        raw = read_raw(path, ",", of_run=True)
        columns = typed_columns(raw, kinds, NumberFormat(), " of the run's training data")
        inputs = scaling(np.stack([columns.by_name[name] for name in scaling.names], axis=1))
        return Prepared(inputs, no_targets=DataError("targets are not read from files", str(path), "use --data NAME"))


@dataclass(frozen=True)
class _Chosen:
    """What is loaded: splits by their role, columns, and targets."""

    splits: Mapping[str, StoredSplit]
    features: Sequence[str]
    target: str
    described: Targets
    targets: Mapping[str, Tensor]

    @property
    def num_outputs(self) -> int:
        classes = self.described.classes
        return len(classes) if classes is not None else int(self.targets["train"].shape[1])

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """Rows for the plan: what the columns and splits are used for."""
        train = self.splits["train"]
        ignored = [name for name in train.schema.names if name not in (*self.features, self.target)]
        left_out = f"; ignored: {', '.join(ignored)}" if ignored else ""
        splits = ", ".join(f'"{split.name}" for {PURPOSES[role]}' for role, split in self.splits.items())
        return (("columns", f"{', '.join(self.features)} → {self.target}{left_out}"), ("splits", splits))


def _all_rows(targets: Tensor) -> Tensor:
    import torch

    return torch.arange(len(targets))


def _select(images: Any, rows: Tensor) -> Images:
    return (images[0][rows], images[1][rows]) if isinstance(images, tuple) else images.subset(rows)
