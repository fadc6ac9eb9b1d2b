"""The contract of a model: its networks have the right form, come from their seed, and run in every declared way."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from ensemblekit.core.errors import EnsemblekitError, Problem
from ensemblekit.core.plugin import Model
from ensemblekit.core.seeds import generator
from ensemblekit.members.build import build_member
from ensemblekit.testing.checks import Check, ContractError, difference, form, innermost, look_at, problems_of, takes
from ensemblekit.testing.execution_modes import ROUGH, WAYS
from ensemblekit.testing.toy_run import registry_with, tiny_spec

BATCH = 6
"""Enough that batch norms of tiny images are not all rounding."""
SHAPES: tuple[tuple[int, ...], ...] = ((1, 8, 8), (7,), (3, 16, 16))
LARGE: tuple[tuple[int, ...], ...] = ((3, 32, 32), (3, 224, 224))
"""Tried in turn if a model takes none of the small ones."""
OUTPUTS = (1, 5)


class ModelBench:
    """A model and the inputs that it takes."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.model_class = type(model)
        self.built: dict[tuple[int, tuple[int, ...], int], nn.Module] = {}

    def problems(self, shape: tuple[int, ...]) -> list[Problem]:
        """What the model has against inputs of this shape."""
        spec = tiny_spec(registry_with(), {"data.shape": list(shape)})
        return problems_of(self.model, replace(spec, model=self.model))

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The input shapes that the model accepts and builds networks for."""
        found = [shape for shape in SHAPES if self.works(shape)]
        found = found or [shape for shape in LARGE if self.works(shape)][:1]
        if not found:
            problems = "; ".join(str(problem) for problem in self.problems(LARGE[0]))
            raise ContractError(
                f"a model for inputs of one of the shapes {', '.join(map(str, (*SHAPES, *LARGE)))}",
                problems or "networks that cannot be built or run",
                look_at(self.model_class, "check_spec" if problems else "build"),
            )
        return found

    def works(self, shape: tuple[int, ...]) -> bool:
        """Whether the model accepts inputs of this shape and its network takes them."""
        try:
            return not self.problems(shape) and self.build(shape=shape) is not None
        except Exception:  # what it is, the check of the shapes says
            return False

    def build(self, member: int = 0, shape: tuple[int, ...] | None = None, num_outputs: int = OUTPUTS[-1]) -> nn.Module:
        """A copy of a member as it is built, in training mode."""
        key = (member, shape or self.shapes[0], num_outputs)
        if key not in self.built:
            self.built[key] = self.build_anew(*key)
        return copy.deepcopy(self.built[key])

    def build_anew(self, member: int, shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        return build_member(self.model, shape, num_outputs, seed=0, member=member).train()

    def inputs(self, batch: int = BATCH, shape: tuple[int, ...] | None = None) -> Tensor:
        """float32 (B, *shape) in [0, 1)."""
        return torch.rand(batch, *(shape or self.shapes[0]), generator=generator(0, "contract", "inputs"))


def model_checks(model: Model) -> list[Check]:
    """The checks of a model besides those of any plugin."""
    bench = ModelBench(model)
    claims: dict[str, Callable[[ModelBench], None]] = {
        "outputs have the right shape and are finite": output_shapes,
        "weights come from the seed and differ between members": seeds,
        "every parameter learns": learning_parameters,
        "inputs stay as they are": untouched_inputs,
        "evaluation is repeatable and changes nothing": evaluation,
        "a sample's output does not depend on the others": batch_independence,
        "saved weights give the same network": state_round_trip,
        **{f"{way} works as declared": partial(declared_way, way=way) for way in WAYS},
    }
    known = Check("it declares only known ways of running", model, partial(known_ways, bench))
    accepted = Check(
        "it builds networks for the inputs that it accepts", model, partial(accepted_shapes, bench), (known,)
    )
    some = replace(accepted, examine=partial(some_shape, bench))  # enough for the others
    others = [Check(name, model, partial(function, bench), (known, some)) for name, function in claims.items()]
    return [accepted, known, *others]


def accepted_shapes(bench: ModelBench) -> None:
    """An input that a model cannot take is refused by `check_spec`, before any data is loaded."""
    for shape in SHAPES:
        if bench.problems(shape):
            continue
        try:
            bench.build(shape=shape)
        except Exception as error:  # whatever build() or the network raises
            raise _review(bench, shape, error) from error
    some_shape(bench)


def some_shape(bench: ModelBench) -> None:
    """Without a single network there is nothing to check."""
    assert bench.shapes


def _review(bench: ModelBench, shape: tuple[int, ...], error: Exception) -> ContractError:
    """What is wrong with a model whose network for a shape that it accepts could not be built or tried."""
    where = look_at(bench.model_class, "build")
    if not takes(bench.model.build, shape, OUTPUTS[-1]):
        got = f"build{inspect.signature(bench.model.build)}"
        fix = "take both arguments, and no others without a default"
        return ContractError("build(input_shape, num_outputs)", got, where, fix)
    line = innermost(error, bench.model_class) or where
    try:
        network: object = bench.model.build(shape, OUTPUTS[-1])
        if not isinstance(network, nn.Module):
            return ContractError("a torch.nn.Module from build()", form(network), where, "end it with return …")
        outputs = network(bench.inputs(shape=shape))
    except Exception:  # the same as before, and no fault of the device
        return _failure(bench, shape, error, line)
    if not isinstance(outputs, Tensor):
        expected = "a single tensor (B, num_outputs) from the network's forward()"
        return ContractError(expected, form(outputs), where, "end forward() with return … of that tensor alone")
    if tuple(outputs.shape) != (BATCH, OUTPUTS[-1]):
        return _failure(bench, shape, error, line)
    return ContractError(
        "a network that also runs on the meta device, where tensors have a shape and no values: it is tried out there",
        _cause(error),
        line,
        "keep constant tensors with register_buffer(), make new ones on the inputs' device, read no value back as "
        '.item() does; or declare it: unsupported() returns {"meta": "the reason"}',
    )


def _failure(bench: ModelBench, shape: tuple[int, ...], error: Exception, where: str) -> ContractError:
    """The review of an error that is its own explanation; `check_spec` is to blame if other shapes work."""
    expected, fix = f"a network for inputs of shape {shape}", error.fix if isinstance(error, EnsemblekitError) else ""
    if any(bench.works(other) for other in (*SHAPES, *LARGE)):
        expected = f"{expected}, or a Problem from check_spec() that says why not"
        fix = f"yield Problem(…) in check_spec(spec) if spec.data.info.input_shape is like {shape}"
    return ContractError(expected, _cause(error), where, fix)


def _cause(error: Exception) -> str:
    """What went wrong, without the core's own words around it."""
    if isinstance(error, EnsemblekitError) and error.__cause__ is None:
        return "; ".join(part for part in (error.what, error.where) if part)
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"


def output_shapes(bench: ModelBench) -> None:
    """(B, *input_shape) → (B, num_outputs), in training and in evaluation, there also for a single sample."""
    smallest, *larger = bench.shapes
    for shape, num_outputs in [*((smallest, size) for size in OUTPUTS), *((shape, OUTPUTS[-1]) for shape in larger)]:
        network = bench.build(shape=shape, num_outputs=num_outputs)
        for training, batch in ((True, BATCH), (False, BATCH), (False, 1)):
            with torch.no_grad():
                outputs = network.train(training)(bench.inputs(batch, shape))
            expected = torch.empty(batch, num_outputs)
            if form(outputs) != form(expected):
                when = "training" if training else "evaluation"
                what = f"{form(expected)} for {batch} inputs of shape {shape} in {when}"
                raise ContractError(what, form(outputs), look_at(bench.model_class, "build"))
            if not bool(outputs.isfinite().all()):
                what = f"finite outputs for inputs of shape {shape} in [0, 1)"
                got = f"{int((~outputs.isfinite()).sum())} that are not"
                raise ContractError(what, got, look_at(bench.model_class, "build"))


def seeds(bench: ModelBench) -> None:
    """One seed and member give one network, in all its numbers; another member starts elsewhere."""
    first, other = bench.build(), bench.build(member=1)
    again = bench.build_anew(0, bench.shapes[0], OUTPUTS[-1])
    where = look_at(bench.model_class, "build")
    for name, value in first.state_dict().items():
        if not torch.equal(value, again.state_dict()[name]):
            fix = "initialise from torch's own generator only, which is seeded before build()"
            raise ContractError("the same weights for the same seed", f"another {name} at the second call", where, fix)
    if all(torch.equal(value, other.state_dict()[name]) for name, value in first.state_dict().items()):
        fix = "draw the weights from torch's own generator, and seed nothing in build()"
        raise ContractError("other weights for another member", "the same ones", where, fix)
    outputs = []
    for network in (first, again):
        torch.default_generator.manual_seed(0)
        with torch.no_grad():
            outputs.append(network(bench.inputs()))
    if not torch.equal(*outputs):
        got = difference(outputs[1], outputs[0], 0.0)
        fix = "draw random numbers with nn.Dropout, ensemblekit.Noise or torch's own generator"
        raise ContractError("the same outputs in training for the same seed", got, where, fix)


def learning_parameters(bench: ModelBench) -> None:
    """A parameter that requires a gradient gets a finite one."""
    network = bench.build()
    network(bench.inputs()).square().sum().backward()
    where = look_at(bench.model_class, "build")
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            fix = "use it in forward(), remove it, or set requires_grad = False"
            raise ContractError(f"a gradient for parameter {name}", "none: outputs do not depend on it", where, fix)
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            raise ContractError(f"a finite gradient for parameter {name}", "nan or infinity", where)


def untouched_inputs(bench: ModelBench) -> None:
    """Members share a batch: what one of them changes in it, the next one sees."""
    given = bench.inputs()
    for training in (True, False):
        seen = given.clone()
        with torch.no_grad():
            bench.build().train(training)(seen)
        if wrong := difference(seen, given, 0.0):
            when = "training" if training else "evaluation"
            fix = "let its first layer work on a copy: inplace=False, x - mean rather than x.sub_(mean)"
            raise ContractError(
                f"the batch as it was after a pass in {when}", wrong, look_at(bench.model_class, "build"), fix
            )


def evaluation(bench: ModelBench) -> None:
    """No dropout, no statistics: two passes in evaluation give the same and leave every buffer as it was."""
    network = bench.build().eval()
    before = {name: value.clone() for name, value in [*network.named_parameters(), *network.named_buffers()]}
    with torch.no_grad():
        first, second = network(bench.inputs()), network(bench.inputs())
    where = look_at(bench.model_class, "build")
    if wrong := difference(second, first, 0.0):
        fix = "let what is random depend on self.training"
        raise ContractError("the same outputs at a second pass in evaluation", wrong, where, fix)
    for name, value in [*network.named_parameters(), *network.named_buffers()]:
        if not torch.equal(value, before[name]):
            fix = "update statistics only if self.training"
            raise ContractError(f"{name} to stay as it is in evaluation", "another value after a pass", where, fix)


def batch_independence(bench: ModelBench) -> None:
    """In evaluation a sample is predicted alike whatever stands beside it."""
    network = bench.build()
    with torch.no_grad():
        network(bench.inputs())  # statistics that are not those of the start
        network.eval()
        together = network(bench.inputs())
        alone = torch.cat([network(sample) for sample in bench.inputs().split(1)])
    if wrong := difference(alone, together, ROUGH):
        where = look_at(bench.model_class, "build")
        fix = "normalise over the batch only if self.training, as nn.BatchNorm does"
        raise ContractError("the outputs of a batch when its samples come one by one", wrong, where, fix)


def state_round_trip(bench: ModelBench) -> None:
    """What a checkpoint keeps is all that a trained network is."""
    trained, fresh = bench.build(), bench.build(member=1)
    where = look_at(bench.model_class, "build")
    with torch.no_grad():
        trained(bench.inputs())
    state = trained.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ContractError("tensors only in the state dict", f"{name} is {form(value)}", where)
    fresh.load_state_dict(state)
    with torch.no_grad():
        expected, found = trained.eval()(bench.inputs()), fresh.eval()(bench.inputs())
    if wrong := difference(found, expected, 0.0):
        fix = "keep everything that outputs depend on in parameters or persistent buffers"
        raise ContractError("the outputs of the network whose state dict was loaded", wrong, where, fix)


def known_ways(bench: ModelBench) -> None:
    """A misspelt way would go unnoticed, and a reason is what a user is told."""
    declared = bench.model.unsupported()
    where = look_at(bench.model_class, "unsupported")
    if not isinstance(declared, Mapping):
        fix = "return {} if there is nothing that it cannot take"
        raise ContractError("ways of running, each with the reason, from unsupported()", form(declared), where, fix)
    for way, reason in declared.items():
        if way not in WAYS:
            raise ContractError(f"keys of {', '.join(WAYS)}", f'"{way}"', where)
        if not reason.strip():
            raise ContractError(f'the reason why "{way}" is not supported', "an empty text", where)


def declared_way(bench: ModelBench, way: str) -> None:
    """What is not declared as unsupported works, and what is does not: a needless declaration costs speed."""
    declared = bench.model.unsupported().get(way)
    failure: Exception | None = None
    try:
        WAYS[way]([bench.build(0), bench.build(1)], bench.inputs())
    except Exception as error:  # whatever a network raises when it is run in an unusual way
        failure = error
    if failure is not None and declared is None:
        said = str(failure).strip().partition("\n")[0]
        raise ContractError(
            f'a network that runs under "{way}", as unsupported() declares nothing else',
            f"{type(failure).__name__}: {said}",
            look_at(bench.model_class, "build"),
            f'mend the network, or declare it: unsupported() returns {{"{way}": "the reason"}}',
        ) from failure
    if failure is None and declared is not None:
        raise ContractError(
            f'"{way}" to fail, as unsupported() declares: {declared}',
            "the right numbers",
            look_at(bench.model_class, "unsupported"),
            f'remove "{way}" from unsupported(): engines avoid what is declared',
        )
