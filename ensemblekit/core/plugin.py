"""What a plugin is: a pydantic model whose fields are its parameters. Authors derive from the classes below."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import get_annotations, signature
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, PrivateAttr, ValidationError
from pydantic_core import CoreSchema, to_json

from ensemblekit.core.errors import PluginError, Problem
from ensemblekit.core.nesting import field_schema, found, numbered

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ensemblekit.core.dataset import DataInfo
    from ensemblekit.core.losses import Loss
    from ensemblekit.spec.sections import Spec

Task = Literal["classification", "multilabel", "regression"]
PREDICTED: dict[Task, str] = {"classification": "classes", "multilabel": "labels", "regression": "values"}
"""What each task predicts, in a word."""
Categories = tuple[tuple[int, int], ...]
"""(first input, number of inputs) of each block of inputs that are one-hot categories of one column."""
Averages = Literal["outputs", "probabilities", "votes"]
"""What a combination is the plain mean of, over the members."""


def snake_case(class_name: str) -> str:
    """Convert `SoftMinLoss` to `soft_min_loss` and `GNCL` to `gncl`: the name of a plugin without an entry point."""
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

        JSON mode is what makes "strict" usable: a list is accepted as a tuple and a string as a path,
        but neither "0.1" nor true as a float. Where a field is a plugin, the table has the plugin itself.
        """
        plain, plugins = numbered(Plugin, table)
        text = to_json(plain, inf_nan_mode="constants")
        return cls.model_validate_json(text, strict=True, by_alias=True, by_name=False, context=plugins)

    def to_table(self) -> dict[str, Any]:
        """Return the table that `from_table` reads back to an equal section; None values are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Plugin(Section):
    """Base of all plugins. Fields are parameters; `list` and `inspect` print the first line of the docstring.

    A field may be a plugin itself: ``model: Model`` is any registered model, by its name or its table in the spec.
    """

    kind: ClassVar[str]
    paper: ClassVar[str] = ""
    """Reference of the publication."""
    formula: ClassVar[str] = ""
    """The formula that it computes, in plain text."""

    _name: str | None = PrivateAttr(None)

    def __init_subclass__(cls, **options: Any) -> None:
        for taken in {"name", "kind"} & set(get_annotations(cls)):
            raise PluginError(
                f'a plugin cannot have a parameter called "{taken}"', f"class {cls.__name__}", "rename it"
            )
        super().__init_subclass__(**options)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # pydantic asks for a class's own schema while it creates the class, and later wherever it is a field's type
        return field_schema(cls, handler) if cls.__pydantic_complete__ else handler(source)

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError:
            fix = (
                "compute the value from `progress` or `epoch`, which hooks may name, or keep it in a private attribute "
                f"with state() and load_state(): _{name} = PrivateAttr(…)"
            )
            what = f"self.{name} cannot be set: parameters do not change during a run"
            raise PluginError(what, f'{self.kind} "{self.name}"', fix, plugin=self.name) from None

    @property
    def name(self) -> str:
        """The name under which it is registered and used in specs."""
        return self._name or snake_case(type(self).__name__)

    @property
    def key(self) -> str:
        """A text that is equal for plugins with equal names and parameters; parameters need not be hashable."""
        return json.dumps(self.to_table(), sort_keys=True)

    def formula_for_parameters(self) -> str:
        """Return the formula for the parameters of this instance; override it if the formula depends on them."""
        return self.formula

    def named(self, name: str) -> Self:
        """Return a copy under the name of its entry point."""
        plugin = self.model_copy()
        plugin._name = name
        return plugin

    def to_table(self) -> dict[str, Any]:
        """Return the table of a spec that stands for this plugin: its name and its parameters."""
        return {"name": self.name, **super().to_table()}

    def inner_plugins(self) -> Iterator[tuple[str, Plugin]]:
        """Yield the plugins that are parameters of this one, each with its dotted path: `model`, `models.0`."""
        for name, parameter in type(self).model_fields.items():
            yield from found(Plugin, getattr(self, name), parameter.alias or name)

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        """Yield the reasons why this plugin cannot be used in this spec. Default: those of the plugins in it.

        Called before any data is loaded. Paths are relative to the plugin's own section; start one with "/" to name
        a key of another section. An override asks the plugins in it by ``yield from super().check_spec(spec)``.
        """
        return _below((path, plugin.check_spec(spec)) for path, plugin in self.inner_plugins())

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        """Yield the reasons why this plugin cannot be used with data of this form. Default: those of the plugins in it.

        Called as soon as task and shapes are known: with `check_spec` if the data set knows them beforehand, and always
        once the data is loaded, before anything is trained. Paths and overrides are as for `check_spec`.
        """
        return _below((path, plugin.check_data(spec, info)) for path, plugin in self.inner_plugins())

    def notes(self, spec: Spec) -> Iterable[str]:
        """Yield what a user of this spec should know although it is no error; `validate` and the plan show it.

        Default: what the plugins in it yield.
        """
        return [note for _, plugin in self.inner_plugins() for note in plugin.notes(spec)]


def _below(found_by: Iterable[tuple[str, Iterable[Problem]]]) -> Iterator[Problem]:
    """Yield the problems of inner plugins with paths that are relative to the outer plugin."""
    for path, problems in found_by:
        for problem in problems:
            yield problem if problem.path.startswith("/") else problem.under(path)


class Method(Plugin):
    """An ensembling method: implements hooks of `ensemblekit.core.hookspecs` with ``@hookimpl``."""

    kind = "method"

    needs_frozen_members: ClassVar[bool] = True
    """Whether the objective uses the outputs of frozen members; if not, training does not compute them."""

    combines_in_training: ClassVar[bool] = True
    """Whether `combine`, if it is implemented, may return something in training; if not, it is only for predictions."""

    def separable(self) -> bool | None:
        """Return whether each member's term of the objective depends on its own outputs alone.

        If so, training calls the hooks with one member's outputs at a time, (1, B, C), with `num_members` still M,
        and needs no more memory for many members than for one. None: it is separable if it implements no hook of the
        objective except `sample_weights` and `combine`.
        """
        return None

    def linear_terms(self, num_members: int) -> tuple[float, float] | None:
        """Return (a, b) if the objective of a sample is a Σ_i w_i l(h_i, y) + b l(f, y); None if it is not.

        The w_i are sample weights, f is the mean of the outputs, and M is `num_members`. Training then takes the
        gradient of the loss from its formula and does not call the hooks, which is faster for tiny members. The hooks
        must say the same: the contract kit compares them.
        """
        return None

    def required_members(self) -> int | None:
        """Return the number of members that the method's parameters imply; None if any number is possible."""
        return None

    def predictor(self) -> str | None:
        """Return the name of the auxiliary group that predicts alone, such as a student; None: the members predict."""
        return None

    def required_groups(self) -> Mapping[str, Literal["members", "outputs", "ensemble"]]:
        """Return the names of the auxiliary groups that the method needs, each with the size of its outputs.

        "members": an output for each member, as a gate has; "outputs": those of a member, as a student has;
        "ensemble": those of any number of members, as a teacher has. Default: the group that `predictor` names.
        """
        predictor = self.predictor()
        return {} if predictor is None else {predictor: "outputs"}

    def required_outputs(self) -> Sequence[str]:
        """Return the names that the method needs in `named`, such as the features that some models give."""
        return ()

    def state(self) -> Mapping[str, Tensor | float | int | str | bool | None]:
        """Return what the method has to remember: it is part of every checkpoint and of the trained model.

        Keep it in private attributes, which a plugin may change: ``_strength: float = PrivateAttr(1.0)``. A run works
        on its own copy of the method.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; tensors are on the CPU."""


class Combination(Plugin):
    """Combines the outputs of a trained ensemble: implements `combine`, and `fit_combiner` if it fits parameters.

    Evaluations and predictions use it; the members are trained as without it.
    """

    kind = "combiner"
    tasks: ClassVar[tuple[Task, ...]] = ("classification", "multilabel", "regression")
    """The tasks that it can be used for."""
    mixes_probabilities: ClassVar[bool] = False
    """Whether it averages the members' probabilities; temperature scaling then divides the outputs of each."""
    averages: ClassVar[Averages | None] = None
    """What it averages with equal weights, if it does: then a selection of members can have weights, and predictions
    can stop early."""

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        if info.task not in self.tasks:
            what = f'"{self.name}" combines predictions of {PREDICTED[self.tasks[0]]}, '
            what += f'but the task of "{spec.data.name}" is {info.task}'
            yield Problem("", what, 'use another combiner, for example "mean"')


class Extension(Plugin):
    """A plugin that follows a run through the life-cycle hooks: a logger, a callback."""

    kind = "extension"


def _named(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a function has parameters for."""
    parameters = signature(function).parameters
    return {name: value for name, value in values.items() if name in parameters}


class Model(Plugin):
    """A base model: builds one member."""

    kind = "model"
    fitted: ClassVar[bool] = False
    """Whether members are fitted to the training data once, by `fit`, and do not learn by gradients."""

    def unsupported(self) -> Mapping[str, str]:
        """Return the execution modes that this model does not support, each with the reason; engines respect it.

        Keys are "vmap", "channels_last", "autocast" (bf16), "meta" and "export" (torch.export of the network in
        evaluation mode, for batches of any size). Default: those that the models in it do not support; it supports all
        others.
        """
        return {mode: reason for model in self._inner_models() for mode, reason in model.unsupported().items()}

    def gives_probabilities(self) -> bool:
        """Return whether the outputs are class probabilities, which losses such as "nll" take, and not raw values.

        Default: whether all models in it do; False if there is none.
        """
        models = self._inner_models()
        return bool(models) and all(model.gives_probabilities() for model in models)

    def _inner_models(self) -> list[Model]:
        return [plugin for _, plugin in self.inner_plugins() if isinstance(plugin, Model)]

    def extra_outputs(self, input_shape: tuple[int, ...]) -> Mapping[str, int]:
        """Return what networks give beside their prediction, such as features: names and sizes.

        The networks then map (B, *input_shape) to (B, num_outputs + sizes): the prediction first, then these in their
        order. Hooks find them in `named`.
        """
        return {}

    def fit(
        self,
        network: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        loss: Loss,
        seed: int,
    ) -> None:
        """Fit a member that `build` has built, before training starts; only called if `fitted`.

        Args:
            network: The member. What it learns must be in its buffers, whose shapes may change here.
            inputs: Inputs of all training samples (N, *input_shape), on the CPU, not augmented.
            targets: Class indices (N,), or real values (N, C) as networks learn them.
            weights: Sample weights of this member (N,), or None for 1.
            loss: What the outputs mean; ``loss.from_probabilities`` gives the outputs for class probabilities.
            seed: Of this member; all randomness must be derived from it.
        """

    @property
    def knows_outputs(self) -> bool:
        """Whether members know their outputs for the samples of a run, and cannot compute any."""
        return type(self).known_outputs is not Model.known_outputs

    def known_outputs(self, split: str, indices: Tensor, loss: Loss) -> Tensor | None:
        """Return the outputs (N, num_outputs) of a member that knows them for the samples of a split.

        Args:
            split: "train", "validation" or "test".
            indices: The samples' indices in their data set (N,), as in `Split.indices`.
            loss: What the outputs mean.

        Returns:
            The outputs on the CPU; None, the default, if the network computes them from the inputs.
        """
        return None

    def build_for(
        self, input_shape: tuple[int, ...], num_outputs: int, member: int = 0, categories: Categories = ()
    ) -> nn.Module:
        """Build the network of a member: `build`, with `member` and `categories` if it names them; for wrappers."""
        named = _named(self.build, {"member": member, "categories": categories})
        return self.build(input_shape, num_outputs, **named)

    @property
    def depends_on_member(self) -> bool:
        """Whether the networks of two members may differ in more than their weights."""
        names_member = "member" in signature(self.build).parameters
        return names_member or type(self).build_for is not Model.build_for

    @abstractmethod
    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        """Build a new network that maps (B, *input_shape) to (B, num_outputs).

        It may also name `member`, the member's index, and `categories`, the inputs that are one-hot categories of a
        table, as in `DataInfo.categories`: ``build(self, input_shape, num_outputs, member, categories=())``.
        """


class Family(Model):
    """A model that computes several members in one network, which share some of its weights.

    All members of a spec, or all members of one group, are one family: one network (B, *input_shape) → (K, B, C).
    """

    @abstractmethod
    def build_family(self, input_shape: tuple[int, ...], num_outputs: int, num_members: int) -> nn.Module:
        """Build a network that maps (B, *input_shape) to (num_members, B, num_outputs).

        It may also name `categories`, as `Model.build`.
        """

    def build_family_for(
        self, input_shape: tuple[int, ...], num_outputs: int, num_members: int, categories: Categories = ()
    ) -> nn.Module:
        """Build a family: `build_family`, with `categories` if it names them; for wrappers."""
        named = _named(self.build_family, {"categories": categories})
        return self.build_family(input_shape, num_outputs, num_members, **named)

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        """Build a family of one member."""
        return self.build_family(input_shape, num_outputs, 1)
