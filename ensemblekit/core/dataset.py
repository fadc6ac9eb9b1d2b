"""What a data set is, and what it loads: authors derive from `Dataset`."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from ensemblekit.core.errors import DataError, PluginError, Problem
from ensemblekit.core.plugin import PREDICTED, Categories, Plugin, Task

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Dataset as TorchDataset

    from ensemblekit.core.input_network import InputNetwork


@dataclass(frozen=True)
class DataInfo:
    """Task and shapes of a data set, known before it is loaded."""

    task: Task
    input_shape: tuple[int, ...]
    """Shape of one sample's input, for images (channels, height, width)."""
    num_outputs: int
    """Number of classes, of labels, or of real values to predict."""
    categories: Categories = field(default=(), compare=False)
    """Of a table, the inputs that are one-hot categories of one column: (first input, number of categories) of each
    such column. Models whose `build` names `categories` get them. Not compared: data of one form may differ in it."""

    @property
    def form(self) -> str:
        """A description in words: ``1×8×8 inputs and 10 classes``."""
        return f"{'×'.join(map(str, self.input_shape))} inputs and {self.num_outputs} {PREDICTED[self.task]}"


@dataclass(frozen=True)
class Splits:
    """A loaded data set: pairs of tensors (inputs, targets), or map-style data sets of (input, target).

    Inputs are uint8, which are scaled to [0, 1], or floating. Targets are class indices (N,), labels of 0 and 1
    (N, num_outputs), or real values (N,) or (N, num_outputs).
    """

    train: TorchDataset[Any] | tuple[Tensor, Tensor]
    test: TorchDataset[Any] | tuple[Tensor, Tensor]
    info: DataInfo
    validation: TorchDataset[Any] | tuple[Tensor, Tensor] | None = None
    """None: `validation_fraction` of the training samples is held out by the run's seed."""
    classes: tuple[str, ...] | None = None
    """Names of the classes in the order of their indices, or of the labels in the order of their columns."""
    mean: tuple[float, ...] | None = None
    """Channel means of inputs scaled to [0, 1]; None: computed from the training split if needed."""
    std: tuple[float, ...] | None = None
    """Channel standard deviations of inputs scaled to [0, 1]; None: as for `mean`."""
    notes: tuple[tuple[str, str], ...] = ()
    """Rows (label, text) that the plan shows: what was done with the data, for example files that were skipped."""
    standardise_targets: bool = False
    """Whether networks learn real targets minus their mean, divided by their standard deviation over the training
    samples; predictions are in the original units. For real targets that are not standardised already."""
    preparation: Mapping[str, Any] | None = None
    """What `Dataset.prepare` needs to prepare a new file as these samples were: values that JSON has a form for. It is
    saved with the model, so that predictions do not depend on the training files."""
    indices: Mapping[str, Tensor] = field(default_factory=dict)
    """By the name of a split, the indices of its samples in the table or array that their owner knows, int64 (N,), if
    splits were taken from a common one. Default: 0, 1, 2 …"""
    weights: Tensor | None = None
    """How much each training sample counts in the objective, at least 0, floating (N,); only ratios matter, since they
    are divided by their mean. None: all count the same."""
    groups: Tensor | None = None
    """Group number of each training sample, int64 (N,), in the order of `train`: samples of a group are never divided
    between splits or folds. None: samples have no groups."""


@dataclass(frozen=True)
class Prepared:
    """The samples of a new file, prepared as those of a run were."""

    inputs: Tensor
    """(N, *input_shape)."""
    targets: Tensor | None = None
    """Class indices (N,), or real values (N, num_outputs) in their original units; None if the file has none."""
    no_targets: DataError | None = None
    """Why there are no targets, for a caller that needs them."""


class Dataset(Plugin):
    """A data set: knows how to load its splits. Its fields are parameters of every data set."""

    kind = "dataset"
    source: ClassVar[str] = ""
    """Where the data comes from."""
    licence: ClassVar[str] = ""
    """Licence of the data."""
    samples: ClassVar[str] = ""
    """Number of samples, in words."""

    validation_fraction: float = Field(
        0.1, ge=0, lt=1, description="share of the training samples held out for validation, if there is no such split"
    )
    folds: int | None = Field(
        None,
        ge=2,
        description="divide the training samples into so many folds: member i is trained without fold i mod folds, and "
        "predictions of members for samples that they have not seen are kept",
    )
    limit_train: int | None = Field(
        None, ge=1, description="number of training samples to use, stratified; validation samples are not limited"
    )
    limit_test: int | None = Field(None, ge=1, description="number of test samples to use, stratified")
    split_seed: int | None = Field(
        None, ge=0, lt=2**63, description="seed of the splits and limits, if it is not the seed of the run"
    )
    storage: Literal["auto", "memory", "stream"] = Field(
        "auto",
        description="keep samples in memory, or stream them from disk; auto: memory if they fit in a quarter of it",
    )

    @property
    def info(self) -> DataInfo | None:
        """Task and shapes, so that a spec can be checked without loading data; None if they are not known."""
        return None

    @property
    def known_task(self) -> Task | None:
        """The task, if it is known before loading: it decides the default loss. Default: that of `info`."""
        return self.info.task if self.info is not None else None

    def in_format(self, version: int) -> Self:
        """Return this data set as runs of an older format used it; override it if a new parameter changes results.

        Args:
            version: Format of the run directory; runs of version 0.1.0 have format 1.
        """
        return self

    def check_source(self) -> Iterable[Problem]:
        """Yield what is missing to load the data, such as a path; not asked if data is passed in Python.

        Paths are relative to the data set's section. Default: nothing is missing.
        """
        return ()

    def with_frames(self, frames: Sequence[Any]) -> Self | None:
        """Return this data set with frames in place of its files.

        Args:
            frames: Frames of pandas, polars or the like that were passed in Python: one; train and test; or train,
                validation and test. Nothing is known about their columns.

        Returns:
            A copy that loads the frames; None, the default, if the data set takes none.
        """
        return None

    def places(self) -> Sequence[Path]:
        """Paths where its files are looked for, in this order; empty if it needs none."""
        return ()

    def found_at(self) -> Path | None:
        """The first of `places` that exists; None if there is none or if it needs no files."""
        # not Path.exists, which raises if a name is too long
        return next((path for path in self.places() if os.path.exists(path)), None)

    @abstractmethod
    def load(self, seed: int) -> Splits:
        """Load the splits.

        Args:
            seed: The run's seed; all randomness, for example of a test split, must be derived from it.

        Returns:
            The splits; `ensemblekit.load_data` checks and transforms them.

        Raises:
            DataError: The data is missing or damaged.
        """

    def prepare(self, path: Path, preparation: Mapping[str, Any]) -> Prepared:
        """Read a new file and prepare it as the samples of a run; must not depend on the training files.

        Not called for image data sets, nor if `load` returns no preparation.

        Args:
            path: The file.
            preparation: `Splits.preparation` of the run, read back from JSON.

        Returns:
            The inputs, and the targets if the file has them.

        Raises:
            DataError: The file cannot be read or does not have the columns of the training data.
        """
        where, fix = f'data set "{self.name}"', "implement prepare(path, preparation)"
        raise PluginError("load() returns a preparation that no prepare() uses", where, fix, plugin=self.name)

    def prepare_frame(self, frame: Any, preparation: Mapping[str, Any]) -> Prepared | None:
        """Prepare the rows of a frame of pandas, polars or the like; as `prepare` does with those of a file.

        Args:
            frame: The frame.
            preparation: `Splits.preparation` of the run, read back from JSON.

        Returns:
            The inputs, and the targets if the frame has them; None, the default, if the data set takes no frames.

        Raises:
            DataError: The frame does not have the columns of the training data.
        """
        return None

    def input_columns(self, preparation: Mapping[str, Any]) -> Mapping[str, float | tuple[str, ...]] | None:
        """Name the columns that `prepare_columns` takes, in the order of the training data.

        Args:
            preparation: `Splits.preparation` of the run, read back from JSON.

        Returns:
            By the name of a column, a typical value if it holds numbers, or its categories; None, the default, if only
            files can be prepared.
        """
        return None

    def prepare_columns(self, columns: Mapping[str, Sequence[Any]], preparation: Mapping[str, Any]) -> Prepared:
        """Prepare rows that are in memory, as `prepare` does for a file.

        Called only if `input_columns` names columns.

        Args:
            columns: For each of these columns a number or a text per row, None where it is missing.
            preparation: `Splits.preparation` of the run, read back from JSON.

        Raises:
            DataError: A value cannot be used; the error names row and column.
        """
        where, fix = f'data set "{self.name}"', "implement prepare_columns(columns, preparation)"
        raise PluginError("input_columns() names columns that no prepare_columns() takes", where, fix, plugin=self.name)

    def describe_inputs(self, inputs: Tensor, preparation: Mapping[str, Any] | None) -> list[dict[str, str]] | None:
        """Describe prepared inputs (N, *input_shape) in the terms of their owner, for people who look at a sample.

        Args:
            inputs: Inputs as `load` returns them.
            preparation: `Splits.preparation` of the run, read back from JSON.

        Returns:
            For each input, texts by the name of their column; None, the default, if inputs are shown as they are.
        """
        return None

    def input_network(self, preparation: Mapping[str, Any]) -> InputNetwork | None:
        """Return the network that prepares inputs inside an exported graph, as `prepare` does for a file.

        Args:
            preparation: `Splits.preparation` of the run, read back from JSON.

        Returns:
            The network; None, the default, if an exported graph takes inputs as `load` returns them.
        """
        return None

    def read_features(self, path: Path, seed: int) -> Tensor | None:
        """Read and preprocess the rows of a new file for prediction, if `load` returned no preparation.

        Args:
            path: The file.
            seed: Seed of the run whose preprocessing is applied.

        Returns:
            The features (N, *input_shape); None, the default, if the file's columns are numbers used as they are.

        Raises:
            DataError: The file cannot be read or does not have the columns of the training data.
        """
        return None
