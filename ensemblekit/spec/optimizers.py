"""Optimizers by name: AdaBelief, and every optimizer of `torch.optim` that needs no closure.

A section's parameters come from the optimizer's own signature, so a spec can set all of them and no others.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from functools import cache
from typing import Any, Self

import torch
from pydantic import Field, create_model, model_validator

from ensemblekit.core.plugin import Section

# How a step is computed and not what it computes: the engine's to decide.
_NOT_FOR_SPECS = {"params", "foreach", "fused", "capturable", "differentiable", "maximize", "print_change_log"}
# They need a closure, sparse gradients, and matrices only.
_UNSUPPORTED = {"LBFGS", "SparseAdam", "Muon"}
# They look at a parameter as a whole.
_NOT_ELEMENTWISE = {"adafactor"}


class Optimizer(Section):
    """The optimizer of a spec: its name, and arguments of its own."""

    name: str

    @model_validator(mode="after")
    def _accepted_by_the_optimizer(self) -> Self:
        self.build([torch.zeros(1, requires_grad=True)])  # its own checks raise ValueError
        return self

    def to_table(self) -> dict[str, Any]:
        """As every section's, without defaults such as (None, 0.001), which TOML cannot say."""
        table = super().to_table()
        return {key: value for key, value in table.items() if not (isinstance(value, list) and None in value)}

    @property
    def elementwise(self) -> bool:
        """Whether every element of a parameter is treated alike, so that parameters can be joined or stacked."""
        return self.name not in _NOT_ELEMENTWISE

    def build(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """The optimizer for these parameters, in one fused operation for each of them where torch has one."""
        arguments = self.model_dump(exclude={"name"})
        parameters, optimizer_class = list(parameters), optimizer_classes()[self.name]
        if "fused" in inspect.signature(optimizer_class).parameters:
            # not on a GPU, where it wants its counters, which runs keep on the CPU
            arguments["fused"] = all(parameter.device.type == "cpu" for parameter in parameters) or None
        with contextlib.redirect_stdout(None):  # AdaBelief prints its settings
            optimizer: torch.optim.Optimizer = optimizer_class(parameters, **arguments)
        return optimizer


@cache
def optimizer_classes() -> dict[str, type]:
    """Every optimizer a spec can name, by that name."""
    from ensemblekit.spec.adabelief import LeanAdaBelief

    classes = {
        name.lower(): value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
        and name not in _UNSUPPORTED
    }
    return {"adabelief": LeanAdaBelief, **classes}


@cache
def optimizer_section(name: str) -> type[Optimizer]:
    """The section of one optimizer, with a field for each argument of its constructor."""
    defaults: dict[str, Any] = {"eps": 1e-12} if name == "adabelief" else {}  # what the paper's code used
    fields: dict[str, Any] = {}
    for argument in inspect.signature(optimizer_classes()[name]).parameters.values():
        if argument.name in _NOT_FOR_SPECS:
            continue
        default = defaults.get(argument.name, argument.default)
        fields[argument.name] = (_type_of(default), _field(argument.name, default))
    return create_model(f"{name.title()}Section", __base__=Optimizer, **fields)


def _type_of(default: Any) -> Any:
    if isinstance(default, bool):
        return bool
    if isinstance(default, tuple):
        return tuple[tuple(_type_of(part) for part in default)]  # type: ignore[misc]
    return float if isinstance(default, int | float) else float | None


def _field(name: str, default: Any) -> Any:
    if name == "lr":
        return Field(float(default), gt=0, description="learning rate")
    return Field(default, description="see the optimizer's own documentation")
