"""What a plugin is: a pydantic model whose fields are its parameters. Authors derive from the classes below."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import get_annotations
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from pydantic_core import to_json

from ensemblekit.core.errors import PluginError, Problem

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import Dataset as TorchDataset

    from ensemblekit.spec.sections import Spec

Task = Literal["classification", "regression"]


def snake_case(class_name: str) -> str:
    """`SoftMinLoss` → `soft_min_loss`, `GNCL` → `gncl`: the name of a plugin class that has no entry point."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name)
    return words.lower()


class Section(BaseModel):
    """A table of a spec: strict, immutable, no unknown keys, no nan."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_by_alias=True, validate_by_name=True
    )

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        """Validate a table as strictly as TOML's own types allow.

        JSON mode is what makes "strict" usable: a list is taken for a tuple and a string for a path,
        but neither "0.1" nor true for a float.
        """
        text = to_json(table, inf_nan_mode="constants")
        return cls.model_validate_json(text, strict=True, by_alias=True, by_name=False)

    def to_table(self) -> dict[str, Any]:
        """The table that `from_table` reads back to an equal section; what is None is left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Plugin(Section):
    """Base of all plugins. Fields are parameters; the docstring's first line is what `list` and `inspect` print."""

    kind: ClassVar[str]
    paper: ClassVar[str] = ""
    """Where the plugin's idea was published."""
    formula: ClassVar[str] = ""
    """What it computes, in plain text."""

    _name: str | None = PrivateAttr(None)

    def __init_subclass__(cls, **options: Any) -> None:
        for taken in {"name", "kind"} & set(get_annotations(cls)):
            raise PluginError(
                f'a plugin cannot have a parameter called "{taken}"', f"class {cls.__name__}", "rename it"
            )
        super().__init_subclass__(**options)

    @property
    def name(self) -> str:
        """The name it is registered and used in specs under."""
        return self._name or snake_case(type(self).__name__)

    def formula_here(self) -> str:
        """The formula for these very parameters, if it depends on them."""
        return self.formula

    def named(self, name: str) -> Self:
        """The same plugin under the name of its entry point."""
        plugin = self.model_copy()
        plugin._name = name
        return plugin

    def to_table(self) -> dict[str, Any]:
        """The table of a spec that means this plugin: its name and its parameters."""
        return {"name": self.name, **super().to_table()}

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        """What is wrong with using this plugin in this spec; paths are relative to the plugin's own section.

        Called before any data is loaded. Start a path with "/" to speak of another section.
        """
        return ()


class Method(Plugin):
    """An ensembling method: implements hooks of `ensemblekit.core.hookspecs` with ``@hookimpl``."""

    kind = "method"

    needs_frozen_members: ClassVar[bool] = True
    """Whether the objective uses the outputs of members that no longer learn; if not, training never runs them."""

    def separable(self) -> bool | None:
        """Whether a member's part of the objective depends on its own outputs alone.

        If so, training hands the hooks one member's outputs at a time, (1, B, C), with `num_members` still M, and
        needs no more memory for many members than for one. None: true if it answers no hook of the objective but
        `sample_weights` and `combine`.
        """
        return None

    def required_members(self) -> int | None:
        """The number of members that the method's own parameters imply; None if any number will do."""
        return None


class Extension(Plugin):
    """Something that watches a run through the life-cycle hooks: a logger, a callback."""

    kind = "extension"


class Model(Plugin):
    """A base model: knows how to build one member."""

    kind = "model"

    def unsupported(self) -> Mapping[str, str]:
        """Ways of running that this model cannot take, each with the reason; engines respect it.

        Keys are of "vmap", "channels_last", "autocast" (bf16), "meta" and "export" (torch.export of the network in
        evaluation, which no engine does). Default: it can take all of them.
        """
        return {}

    @abstractmethod
    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        """A new network that maps (B, *input_shape) to (B, num_outputs)."""


@dataclass(frozen=True)
class DataInfo:
    """What is known of a data set before it is loaded."""

    task: Task
    input_shape: tuple[int, ...]
    num_outputs: int
    """The number of classes, or of real values to predict."""

    @property
    def form(self) -> str:
        """All of it in words."""
        what = "classes" if self.task == "classification" else "values"
        return f"{'×'.join(map(str, self.input_shape))} inputs and {self.num_outputs} {what}"


@dataclass(frozen=True)
class Splits:
    """A loaded data set: pairs of tensors (inputs, targets), or map-style data sets of (input, target)."""

    train: TorchDataset[Any] | tuple[Tensor, Tensor]
    test: TorchDataset[Any] | tuple[Tensor, Tensor]
    info: DataInfo
    validation: TorchDataset[Any] | tuple[Tensor, Tensor] | None = None
    """None: cut from the training part by the run's seed."""
    classes: tuple[str, ...] | None = None
    """The classes' names in the order of their indices."""
    mean: tuple[float, ...] | None = None
    """Channel means and deviations of inputs scaled to [0, 1]; None: taken from the training part if needed."""
    std: tuple[float, ...] | None = None


class Dataset(Plugin):
    """A data set: knows how to load its splits. The parameters here are every data set's."""

    kind = "dataset"
    source: ClassVar[str] = ""
    """Where the data comes from."""
    licence: ClassVar[str] = ""
    """What its owners allow."""
    samples: ClassVar[str] = ""
    """How many samples it has, in words."""

    validation_fraction: float = Field(
        0.1, ge=0, lt=1, description="share of the training data held out for model selection, unless it comes with one"
    )
    limit_train: int | None = Field(
        None, ge=1, description="use that many training samples, classes in proportion; held-out ones are all used"
    )
    limit_test: int | None = Field(None, ge=1, description="use that many test samples, classes in proportion")
    storage: Literal["auto", "memory", "stream"] = Field(
        "auto",
        description="tensors in memory, or a stream from disk; auto takes memory if the data fits in a quarter of it",
    )

    @property
    def info(self) -> DataInfo | None:
        """What is known without loading anything, so that a spec can be checked early; None if nothing is."""
        return None

    def places(self) -> Sequence[Path]:
        """Where its files are looked for, first match wins; empty if it needs none."""
        return ()

    def found_at(self) -> Path | None:
        """The place where it is present now; None if it is absent or needs no files."""
        return next((place for place in self.places() if place.exists()), None)

    @abstractmethod
    def load(self, seed: int) -> Splits:
        """Load the splits; everything random is derived from `seed`."""

    def read_features(self, path: Path, seed: int) -> Tensor | None:
        """The rows of a new file, (N, *input_shape), prepared as those of a run with this seed were.

        Default: None, the file's columns are numbers that need no preparation. Not asked of images.
        """
        return None


class ImageDataset(Dataset):
    """A data set of images: uint8 (N, channels, height, width), scaled to [0, 1] batch by batch."""

    size: int | None = Field(None, ge=1, description="side that images are resized and centre-cropped to when read")
    crop_size: int | None = Field(
        None, ge=1, description="side of what the network sees: random crops in training, centres else"
    )
    augment: tuple[Literal["crop", "flip", "rotate"], ...] = Field(
        (), description="random changes of training images, each image its own"
    )
    padding: int = Field(4, ge=0, description="zeros around an image before a random crop of its own size")
    degrees: float = Field(15.0, ge=0, le=180, description="largest angle of a random rotation")
    normalise: bool = Field(False, description="subtract the channels' means and divide by their deviations")
