"""A model passed in Python: a network class, or a function that builds a network, in place of a plugin."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr
from torch import nn

from ensemblekit.core.errors import UsageError
from ensemblekit.core.nesting import replaced
from ensemblekit.core.plugin import Model, Plugin
from ensemblekit.core.registry import Registry, class_info

ModelLike = Model | str | Mapping[str, Any]
"""A model, its name or its table."""
NetworkLike = ModelLike | type[Model] | Callable[..., nn.Module]
"""A model or its class, or a network class or function that builds networks."""
NAME = "python"
"""The name of such a model in a spec."""
_EXAMPLE = "model=lambda input_shape, num_outputs: MyNet(…)"
_UNKNOWN = "what the network does in forward() is not known; derive a plugin from ensemblekit.Model to allow it"


class PythonModel(Model):
    """A network class or function passed in Python with model=…; a run only keeps its name."""

    factory: str = Field("", description="name of the class or function, for information only")

    build_network: ClassVar[Callable[..., nn.Module]]
    _name: str | None = PrivateAttr(NAME)

    def unsupported(self) -> Mapping[str, str]:
        return {"vmap": _UNKNOWN, "meta": _UNKNOWN}

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        sizes = {"input_shape": input_shape, "num_outputs": num_outputs}
        factory = type(self).build_network
        return factory(**{name: sizes[name] for name in _taken(factory, sizes)})

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self).build_network, self.factory)


def python_model(factory: Callable[..., Any]) -> type[PythonModel]:
    """Return a model plugin that builds its networks with a class or a function.

    Args:
        factory: a subclass of `nn.Module`, or a callable that returns a new network. It gets `input_shape` and
            `num_outputs` if it has parameters of these names.

    Raises:
        UsageError: it is a network, or not callable, or has other parameters without a default.
    """
    if isinstance(factory, nn.Module):
        fix = "pass the class, or a function that builds a new network for each member: model=lambda: MyNet(…)"
        raise UsageError("the model is a single network, but every member needs one of its own", "model", fix)
    if not callable(factory):
        fix = f"pass a subclass of torch.nn.Module or a function that builds a network: {_EXAMPLE}"
        raise UsageError(f"a model cannot be of type {type(factory).__name__}", "model", fix)
    _taken(factory, {"input_shape": (), "num_outputs": 0})
    return type("PythonModel", (PythonModel,), {"build_network": staticmethod(factory), "__doc__": PythonModel.__doc__})


def factory_name(factory: Any) -> str:
    """Return the name of a class or function as its source has it; of a `functools.partial`, that of what it calls."""
    while isinstance(factory, partial):
        factory = factory.func
    name = getattr(factory, "__qualname__", type(factory).__qualname__)
    return str(name).rpartition("<locals>.")[2]


def _taken(factory: Callable[..., Any], sizes: Mapping[str, Any]) -> list[str]:
    """The names of the sizes that a factory has parameters for."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return []
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and (parameter.name not in sizes or parameter.kind is parameter.POSITIONAL_ONLY)
    ]
    if needed:
        what = f"{factory_name(factory)} needs values for {', '.join(needed)}"
        raise UsageError(what, "model", f"give them in a function: {_EXAMPLE}")
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return [name for name in sizes if name in named or (takes_all and not isinstance(factory, type))]


def _restored(factory: Callable[..., Any], name: str) -> PythonModel:
    return python_model(factory)(factory=name)


def is_network(model: NetworkLike) -> bool:
    """Return whether this is a network class or a function that builds networks, and not a model plugin."""
    return not isinstance(model, str | Mapping) and _plugin_class(model) is None


def with_model(registry: Registry, model: NetworkLike) -> Registry:
    """Return a registry that also has a model passed in Python."""
    if isinstance(model, str | Mapping):
        return registry
    if (plugin_class := _plugin_class(model)) is not None:
        return registry.with_classes([plugin_class, *_inner_classes(model)])
    assert not isinstance(model, Model)
    return registry.with_plugins([class_info(python_model(model), NAME, f"model={factory_name(model)}")])


def model_table(model: NetworkLike, registry: Registry) -> str | Mapping[str, Any]:
    """Return the table, or the name, that stands for a model passed in Python in a spec."""
    if isinstance(model, str | Mapping):
        return model
    plugin_class = _plugin_class(model)
    if plugin_class is None:
        return {"name": NAME, "factory": factory_name(model)}
    return _named(model, registry).to_table() if isinstance(model, Model) else {"name": registry.name_of(plugin_class)}


def _inner_classes(plugin: Any) -> Iterator[type[Plugin]]:
    """Yield the classes of all plugins that are parameters of a plugin; none if it is a class."""
    for _, inner in plugin.inner_plugins() if isinstance(plugin, Plugin) else ():
        yield type(inner)
        yield from _inner_classes(inner)


def _named(plugin: Plugin, registry: Registry) -> Plugin:
    """Return a copy of a plugin in which it and all plugins in it have their registered names."""
    fields = {name: getattr(plugin, name) for name in type(plugin).model_fields}
    inner = replaced(Plugin, fields, lambda inner: _named(inner, registry))
    return plugin.model_copy(update=inner).named(registry.name_of(type(plugin)) or plugin.name)


def _plugin_class(model: Any) -> type[Model] | None:
    """Return the class of a model plugin; None if this is not one."""
    plugin_class = model if isinstance(model, type) else type(model)
    return plugin_class if issubclass(plugin_class, Model) else None
