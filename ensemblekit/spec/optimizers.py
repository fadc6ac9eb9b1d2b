"""Optimizers by name: AdaBelief, every optimizer of `torch.optim` that needs no closure, and those of plugins.

A section's parameters come from the optimizer's own signature, so that a spec can set all of them and no others.
"""

from __future__ import annotations

import inspect
import re
from abc import abstractmethod
from collections.abc import Iterable
from functools import cache
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, create_model, model_validator

from ensemblekit.core.plugin import Plugin, Section
from ensemblekit.spec.adabelief import AdaBelief

ELEMENTWISE: dict[str, frozenset[str]] = {
    "adabelief": frozenset({"step"}),
    "adadelta": frozenset({"step"}),
    "adagrad": frozenset({"step"}),
    "adam": frozenset({"step"}),
    "adamax": frozenset({"step"}),
    "adamw": frozenset({"step"}),
    "asgd": frozenset({"step", "eta", "mu"}),
    "nadam": frozenset({"step", "mu_product"}),
    "radam": frozenset({"step"}),
    "rmsprop": frozenset({"step"}),
    "rprop": frozenset({"step"}),
    "sgd": frozenset(),
}
"""Optimizers known to update every element of a parameter independently, each with the state that it keeps once per
tensor instead of once per element. The parameters of these can be joined in one flat tensor and stacked over members.
Any other optimizer gets every parameter by itself."""

# Arguments that decide how a step is computed, not what: the engine's choice.
_NOT_IN_SPECS = {"params", "foreach", "fused", "capturable", "differentiable", "maximize"}
# LBFGS needs a closure, SparseAdam sparse gradients, and Muon takes matrices only.
_UNSUPPORTED = {"LBFGS", "SparseAdam", "Muon"}


class Optimizer(Section):
    """The optimizer of a spec: its name and its arguments."""

    name: str

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        self.build([torch.zeros(1, requires_grad=True)])  # the optimizer's own checks raise ValueError
        return self

    def to_table(self) -> dict[str, Any]:
        """As for every section, without defaults such as (None, 0.001), which TOML cannot express."""
        table = super().to_table()
        return {key: value for key, value in table.items() if not (isinstance(value, list) and None in value)}

    def __reduce__(self) -> tuple[Any, ...]:
        # its class is made when it is first used, so pickle cannot find it by name
        table = {key: value for key, value in self.to_table().items() if key in self.model_fields_set}
        return _from_table, (self.name, table)

    @property
    def learning_rate(self) -> float:
        """The base learning rate, which every optimizer has."""
        rate: float = self.model_dump(include={"lr"})["lr"]
        return rate

    @property
    def elementwise(self) -> bool:
        """Whether it is known to update every element of a parameter independently."""
        return self.name in ELEMENTWISE

    @property
    def per_tensor_state(self) -> frozenset[str]:
        """The keys of its state that it keeps once per tensor, such as its count of steps."""
        return ELEMENTWISE.get(self.name, frozenset({"step"}))

    def build(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Build the optimizer of these parameters, with torch's fused implementation where there is one."""
        arguments = self.model_dump(exclude={"name"})
        parameters, optimizer_class = list(parameters), optimizer_classes()[self.name]
        if "fused" in inspect.signature(optimizer_class).parameters:
            # on a GPU a fused optimizer needs its step counters there, and checkpoints keep them on the CPU
            arguments["fused"] = all(parameter.device.type == "cpu" for parameter in parameters) or None
        optimizer: torch.optim.Optimizer = optimizer_class(parameters, **arguments)
        return optimizer


class OptimizerPlugin(Plugin):
    """An optimizer from a plugin: builds a `torch.optim.Optimizer` whose `step` needs no closure."""

    kind = "optimizer"
    elementwise: ClassVar[bool] = False
    """Whether it updates every element of a parameter independently of all others. If so, all parameters of a network
    are joined in one flat tensor, and those of several members are stacked: faster, with the same result."""
    per_tensor_state: ClassVar[frozenset[str]] = frozenset({"step"})
    """Keys of its state with tensors that it keeps once per tensor and not once per element, such as its count of
    steps. Plain numbers need not be listed."""

    lr: float = Field(1e-3, gt=0, description="learning rate")

    @property
    def learning_rate(self) -> float:
        """The base learning rate; a run sets `lr` of all parameter groups before every step."""
        return self.lr

    @abstractmethod
    def build(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Build the optimizer of these parameters."""


AnyOptimizer = Optimizer | OptimizerPlugin
"""The optimizer of a spec."""


@cache
def optimizer_classes() -> dict[str, type]:
    """Return every optimizer that a spec can name, by that name."""
    classes = {
        name.lower(): value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
        and name not in _UNSUPPORTED
    }
    return {"adabelief": AdaBelief, **classes}


@cache
def optimizer_section(name: str) -> type[Optimizer]:
    """Return the section of one optimizer, with a field for each argument of its constructor."""
    optimizer_class = optimizer_classes()[name]
    fields: dict[str, Any] = {}
    for argument in inspect.signature(optimizer_class).parameters.values():
        if argument.name not in _NOT_IN_SPECS:
            fields[argument.name] = (_type_of(argument.default), _field(optimizer_class, argument))
    about = (inspect.getdoc(optimizer_class) or "").partition("\n")[0]
    return create_model(f"{name.title()}Section", __base__=Optimizer, __doc__=about, **fields)


def _from_table(name: str, table: dict[str, Any]) -> Optimizer:
    return optimizer_section(name).from_table(table)


def _type_of(default: Any) -> Any:
    if isinstance(default, bool):
        return bool
    if isinstance(default, tuple):
        return tuple[tuple(_type_of(part) for part in default)]  # type: ignore[misc]
    return float if isinstance(default, int | float) else float | None


def _field(optimizer_class: type, argument: inspect.Parameter) -> Any:
    if argument.name == "lr":
        return Field(float(argument.default), gt=0, description="learning rate")
    description = f"see torch.optim.{optimizer_class.__name__}"
    if optimizer_class is AdaBelief and (
        documented := re.search(rf"^ +{argument.name}: (.+)\.$", AdaBelief.__doc__ or "", re.M)
    ):
        description = documented[1]
    return Field(argument.default, description=description)
