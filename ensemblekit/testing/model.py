"""The contract of a model: networks of the right shape, reproducible from a seed, that run in every declared mode."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ensemblekit.core.errors import EnsemblekitError, Problem
from ensemblekit.core.losses import NLL
from ensemblekit.core.plugin import Model
from ensemblekit.core.seeds import generator
from ensemblekit.members.build import build_member
from ensemblekit.testing.checks import check, requirement
from ensemblekit.testing.common import PluginContract
from ensemblekit.testing.execution_modes import EXECUTION_MODES, ROUGH
from ensemblekit.testing.reviews import (
    ContractError,
    accepts,
    describe,
    first_line,
    last_plugin_line,
    location,
    mismatch,
    spec_problems,
)
from ensemblekit.testing.toy_run import toy_registry, toy_spec, train_with_every_engine

Shape = tuple[int, ...]
BATCH = 6
"""Samples per batch: with fewer, the batch norms of tiny images see hardly more than rounding."""
SHAPES: tuple[Shape, ...] = ((1, 8, 8), (7,), (3, 16, 16))
LARGE_SHAPES: tuple[Shape, ...] = ((3, 32, 32), (3, 224, 224))
"""Tried in turn if a model accepts none of the small shapes."""
OUTPUTS = (1, 5)
VALUES = {"data.regression": True, "training.loss": "mse"}
TASKS: tuple[dict[str, Any], ...] = ({}, VALUES, {"data.num_classes": 2}, {**VALUES, "data.num_values": 1})
"""Changes of a toy run, tried in turn: a model may be for one task, or for one number of classes or values."""


class ModelContract(PluginContract[Model]):
    """The checks of a model."""

    kind = "model"
    builder: ClassVar[str] = "build"
    """The method that builds networks."""
    builder_arguments: ClassVar[tuple[str, ...]] = ("input_shape", "num_outputs")

    def __init__(self, plugin: Model) -> None:
        super().__init__(plugin)
        self._built: dict[tuple[int, Shape, int], nn.Module] = {}
        self._problems: dict[Shape, list[Problem]] = {}

    def problems(self, shape: Shape) -> list[Problem]:
        """The problems that the model reports for inputs of a shape."""
        if shape not in self._problems:
            self._problems[shape] = self._problems_with(shape, self.task)
        return self._problems[shape]

    def _problems_with(self, shape: Shape, task: Mapping[str, Any]) -> list[Problem]:
        spec = toy_spec(toy_registry(), {"data.shape": list(shape), **task})
        return spec_problems(self.plugin, replace(spec, model=self.plugin))

    @cached_property
    def task(self) -> Mapping[str, Any]:
        """Changes of the toy run to a task that the model accepts."""
        shapes = (*SHAPES, *LARGE_SHAPES)
        accepted = (task for task in TASKS if not all(self._problems_with(shape, task) for shape in shapes))
        return next(accepted, TASKS[0])

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of outputs that the model builds networks for: any, unless it is bound to that of its data."""
        info = toy_spec(toy_registry(), self.task).data.info
        assert info is not None
        return OUTPUTS if self.task in TASKS[:2] else (info.num_outputs,)

    @cached_property
    def shapes(self) -> list[Shape]:
        """The input shapes that the model accepts and builds networks for; at least one."""
        shapes = [shape for shape in SHAPES if self.works(shape)]
        shapes = shapes or [shape for shape in LARGE_SHAPES if self.works(shape)][:1]
        if not shapes:
            problems = "; ".join(str(problem) for problem in self.problems(LARGE_SHAPES[0]))
            raise self.violation(
                f"a model for one of the input shapes {', '.join(map(str, (*SHAPES, *LARGE_SHAPES)))}",
                problems or "networks that cannot be built or run",
                "check_spec" if problems else "build",
            )
        return shapes

    def works(self, shape: Shape) -> bool:
        """Whether the model accepts inputs of this shape and builds a network for them."""
        try:
            return not self.problems(shape) and self.build(shape=shape) is not None
        except Exception:  # reported by the check of the accepted shapes
            return False

    def build(self, member: int = 0, shape: Shape | None = None, num_outputs: int | None = None) -> nn.Module:
        """A copy of a freshly built member, in training mode."""
        key = (member, shape or self.shapes[0], num_outputs or self.sizes[-1])
        if key not in self._built:
            self._built[key] = self._build_anew(*key)
        return copy.deepcopy(self._built[key])

    def _build_anew(self, member: int, shape: Shape, num_outputs: int) -> nn.Module:
        return build_member(self.plugin, shape, num_outputs, seed=0, member=member).train()

    def output_shape(self, batch: int, num_outputs: int, shape: Shape) -> Shape:
        """The shape of a network's outputs for a batch of inputs of a shape."""
        return (batch, num_outputs + sum(self.plugin.extra_outputs(shape).values()))

    def construction(self, shape: Shape) -> partial[nn.Module]:
        """The plain call that builds a network."""
        return partial(self.plugin.build, shape, self.sizes[-1])

    def inputs(self, batch: int = BATCH, shape: Shape | None = None) -> Tensor:
        """Random inputs (B, *shape) in [0, 1), float32."""
        return torch.rand(batch, *(shape or self.shapes[0]), generator=generator(0, "contract", "inputs"))

    @check("it declares only known execution modes")
    def known_modes(self) -> None:
        """A misspelt mode would go unnoticed, and users read the reason."""
        declared = self.plugin.unsupported()
        if not isinstance(declared, Mapping):
            expected = "a mapping of execution modes to reasons from unsupported()"
            raise self.violation(expected, describe(declared), "unsupported", "return {} if every mode is supported")
        for mode, reason in declared.items():
            if mode not in EXECUTION_MODES:
                raise self.violation(f"keys among {', '.join(EXECUTION_MODES)}", f'"{mode}"', "unsupported")
            if not reason.strip():
                raise self.violation(f'the reason why "{mode}" is not supported', "an empty text", "unsupported")

    @check("it builds a network for every input shape that it accepts", needs=[known_modes])
    def accepted_shapes(self) -> None:
        """`check_spec` rejects inputs that the model cannot take, before any data is loaded."""
        for shape in SHAPES:
            if self.problems(shape):
                continue
            try:
                self.build(shape=shape)
            except Exception as error:  # any error of build() or of the network
                raise self._review(shape, error) from error
        self.some_shape()

    @requirement(of=accepted_shapes)
    def some_shape(self) -> None:
        """One network is enough for the other checks."""
        assert self.shapes

    def _review(self, shape: Shape, error: Exception) -> ContractError:
        """Find out why the network for an accepted shape could not be built or run."""
        construct, name = self.construction(shape), self.builder
        if not accepts(construct.func, *construct.args):
            got = f"{name}{inspect.signature(construct.func)}"
            number = {2: "two", 3: "three"}[len(construct.args)]
            fix = f"take these {number} arguments, and no others without a default"
            return self.violation(f"{name}({', '.join(self.builder_arguments)})", got, name, fix)
        try:
            network: object = construct()
            if not isinstance(network, nn.Module):
                got = describe(network)
                return self.violation(f"a torch.nn.Module from {name}()", got, name, f"end {name}() with return …")
            outputs = network(self.inputs(shape=shape))
        except Exception:  # the same error on the CPU: the meta device is not the cause
            return self._failure(shape, error)
        if not isinstance(outputs, Tensor):
            dimensions = ", ".join(("num_members", "B", "num_outputs")[-len(self.output_shape(1, 1, shape)) :])
            expected, fix = (
                f"a single tensor ({dimensions}) from forward()",
                "end forward() with return … of one tensor",
            )
            return self.violation(expected, describe(outputs), name, fix)
        if tuple(outputs.shape) != self.output_shape(BATCH, self.sizes[-1], shape):
            return self._failure(shape, error)
        return ContractError(
            "a network that also runs on the meta device, where tensors have a shape but no values; every new network "
            "is tried there",
            _cause(error),
            last_plugin_line(error, self.plugin_class) or location(self.plugin_class, name),
            "keep constant tensors with register_buffer(), create tensors on the device of the inputs, and read no "
            'value back, as .item() does; or declare it: unsupported() returns {"meta": "the reason"}',
        )

    def _failure(self, shape: Shape, error: Exception) -> ContractError:
        """The review of an error that explains itself; `check_spec` should have prevented it if other shapes work."""
        expected = f"a network for inputs of shape {shape}"
        fix = error.fix if isinstance(error, EnsemblekitError) else ""
        if any(self.works(other) for other in (*SHAPES, *LARGE_SHAPES)):
            expected = f"{expected}, or a Problem from check_spec() that says why not"
            fix = f"yield Problem(…) in check_spec(spec) if spec.data.info.input_shape is like {shape}"
        where = last_plugin_line(error, self.plugin_class) or location(self.plugin_class, self.builder)
        return ContractError(expected, _cause(error), where, fix)

    @check("outputs have the right shape and are finite", needs=[known_modes, some_shape])
    def output_shapes(self) -> None:
        """The shape for a batch in training and evaluation mode, in the latter also for one sample."""
        smallest, *larger = self.shapes
        for shape, size in [*((smallest, size) for size in self.sizes), *((shape, self.sizes[-1]) for shape in larger)]:
            network = self.build(shape=shape, num_outputs=size)
            for training, batch in ((True, BATCH), (False, BATCH), (False, 1)):
                with torch.no_grad():
                    outputs = network.train(training)(self.inputs(batch, shape))
                right = describe(torch.empty(self.output_shape(batch, size, shape)))
                if describe(outputs) != right:
                    mode = "training" if training else "evaluation"
                    expected = f"{right} for {batch} inputs of shape {shape} in {mode} mode"
                    raise self.violation(expected, describe(outputs), "build")
                if not bool(outputs.isfinite().all()):
                    got = f"{int((~outputs.isfinite()).sum())} outputs that are not finite"
                    raise self.violation(f"finite outputs for inputs of shape {shape} in [0, 1)", got, "build")

    @check("declared probabilities sum to one", needs=[known_modes, some_shape])
    def probabilities(self) -> None:
        """A loss that takes probabilities trusts the model's declaration."""
        with torch.no_grad():
            outputs = self.build().eval()(self.inputs())
        if self.plugin.gives_probabilities() and (problem := NLL().output_problem(outputs)):
            fix = "end with a softmax, or let gives_probabilities() return False"
            raise self.violation("outputs of at least 0 that sum to 1", problem, "gives_probabilities", fix)

    @check("weights are reproducible and differ between members", needs=[known_modes, some_shape])
    def seeds(self) -> None:
        """The seed and the member's index determine a network; another member has other initial weights."""
        first, other = self.build(), self.build(member=1)
        again = self._build_anew(0, self.shapes[0], self.sizes[-1])
        for name, value in first.state_dict().items():
            if not torch.equal(value, again.state_dict()[name]):
                fix = "initialise from torch's default generator only, which is seeded before build()"
                raise self.violation("the same weights for the same seed", f"another {name}", "build", fix)
        if all(torch.equal(value, other.state_dict()[name]) for name, value in first.state_dict().items()):
            fix = "sample the weights from torch's default generator, and seed nothing in build()"
            raise self.violation("different weights for different members", "equal weights", "build", fix)
        outputs = []
        for network in (first, again):
            torch.default_generator.manual_seed(0)
            with torch.no_grad():
                outputs.append(network(self.inputs()))
        if wrong := mismatch(outputs[1], outputs[0], 0.0):
            fix = "sample noise with nn.Dropout, ensemblekit.Noise or torch's default generator"
            raise self.violation("the same outputs in training mode for the same seed", wrong, "build", fix)

    @check("every parameter receives a gradient", needs=[known_modes, some_shape])
    def parameter_gradients(self) -> None:
        """A parameter that requires a gradient gets a finite one."""
        network = self.build()
        network(self.inputs()).square().sum().backward()
        for name, parameter in network.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                fix = "use it in forward(), remove it, or set requires_grad = False"
                raise self.violation(f"a gradient for parameter {name}", "none: outputs do not use it", "build", fix)
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                raise self.violation(f"a finite gradient for parameter {name}", "nan or infinity", "build")

    @check("inputs are not modified", needs=[known_modes, some_shape])
    def unmodified_inputs(self) -> None:
        """Members share a batch: the next member would see what one of them changes."""
        for training in (True, False):
            inputs = self.inputs()
            with torch.no_grad():
                self.build().train(training)(inputs)
            if wrong := mismatch(inputs, self.inputs(), 0.0):
                mode = "training" if training else "evaluation"
                fix = "let the first layer work on a copy: inplace=False, x - mean instead of x.sub_(mean)"
                raise self.violation(f"an unmodified batch after a pass in {mode} mode", wrong, "build", fix)

    @check("evaluation is deterministic and has no side effects", needs=[known_modes, some_shape])
    def evaluation(self) -> None:
        """Two passes in evaluation mode give the same outputs and leave every buffer unchanged."""
        network = self.build().eval()
        before = {name: value.clone() for name, value in [*network.named_parameters(), *network.named_buffers()]}
        with torch.no_grad():
            first, second = network(self.inputs()), network(self.inputs())
        if wrong := mismatch(second, first, 0.0):
            fix = "sample noise only if self.training"
            raise self.violation("the same outputs in a second pass in evaluation mode", wrong, "build", fix)
        for name, value in [*network.named_parameters(), *network.named_buffers()]:
            if not torch.equal(value, before[name]):
                fix = "update statistics only if self.training"
                raise self.violation(f"an unchanged {name} in evaluation mode", "another value", "build", fix)

    @check("outputs do not depend on the other samples of a batch", needs=[known_modes, some_shape])
    def batch_independence(self) -> None:
        """In evaluation mode a sample has the same output in every batch."""
        network = self.build()
        with torch.no_grad():
            network(self.inputs())  # so that running statistics differ from their initial values
            network.eval()
            together = network(self.inputs())
            single = torch.cat([network(sample) for sample in self.inputs().split(1)], dim=-2)
        if wrong := mismatch(single, together, ROUGH):
            fix = "normalise over the batch only if self.training, as nn.BatchNorm does"
            raise self.violation("the same outputs for single samples as for the whole batch", wrong, "build", fix)

    @check("the state dict restores the network", needs=[known_modes, some_shape])
    def state_round_trip(self) -> None:
        """A checkpoint contains the state dict and nothing else of a network."""
        trained, fresh = self.build(), self.build(member=1)
        with torch.no_grad():
            trained(self.inputs())
        state = trained.state_dict()
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise self.violation("only tensors in the state dict", f"{name} is {describe(value)}", "build")
        fresh.load_state_dict(state)
        with torch.no_grad():
            expected, actual = trained.eval()(self.inputs()), fresh.eval()(self.inputs())
        if wrong := mismatch(actual, expected, 0.0):
            fix = "keep everything that outputs depend on in parameters or persistent buffers"
            raise self.violation("the outputs of the network whose state dict was loaded", wrong, "build", fix)

    @check("{} works as declared", for_each=tuple(EXECUTION_MODES), needs=[known_modes, some_shape])
    def declared_mode(self, mode: str) -> None:
        """A mode works unless it is declared as unsupported; a needless declaration costs speed."""
        declared = self.plugin.unsupported().get(mode)
        failure: Exception | None = None
        try:
            EXECUTION_MODES[mode]([self.build(0), self.build(1)], self.inputs())
        except Exception as error:  # any error of a network that is run in an unusual way
            failure = error
        if failure is not None and declared is None:
            raise self.violation(
                f'a network that runs under "{mode}", which unsupported() does not exclude',
                first_line(failure),
                "build",
                f'fix the network, or declare it: unsupported() returns {{"{mode}": "the reason"}}',
            ) from failure
        if failure is None and declared is not None:
            raise self.violation(
                f'"{mode}" to fail, as unsupported() declares: {declared}',
                "the correct numbers",
                "unsupported",
                f'remove "{mode}" from unsupported(): engines avoid the modes that it declares',
            )

    @check(
        "it trains with every supported engine",
        needs=[known_modes, some_shape, output_shapes, seeds, parameter_gradients, unmodified_inputs, declared_mode],
    )
    def training(self) -> None:
        """One epoch through the ordinary training path, with this model and its parameters."""
        registry = toy_registry(self.plugin)
        spec = toy_spec(registry, {"data.shape": list(self.shapes[0]), **self.task})
        loss = NLL() if self.plugin.gives_probabilities() else spec.loss
        train_with_every_engine(replace(spec, model=self.plugin, loss=loss), registry)


def _cause(error: Exception) -> str:
    """The original error, without the message that the core has put around it."""
    if isinstance(error, EnsemblekitError) and error.__cause__ is None:
        return error.problem
    return first_line(error.__cause__ or error)
