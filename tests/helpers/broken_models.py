"""Models with one fault each, and the checks that must find it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ensemblekit import DataInfo, Model, Problem, Spec

ACCEPTED = "it builds a network for every input shape that it accepts"
SHAPES = "outputs have the right shape and are finite"
PROBABLE = "declared probabilities sum to one"
SEEDS = "weights are reproducible and differ between members"
GRADIENTS = "every parameter receives a gradient"
UNMODIFIED = "inputs are not modified"
EVALUATION = "evaluation is deterministic and has no side effects"
INDEPENDENT = "outputs do not depend on the other samples of a batch"
RESTORED = "the state dict restores the network"
KNOWN_MODES = "it declares only known execution modes"
TRAINS = "it trains with every supported engine"


def works(mode: str) -> str:
    return f"{mode} works as declared"


class _Net(nn.Module):
    """One linear layer, which faulty networks derive from."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(torch.Size(input_shape).numel(), num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs.flatten(1))


class GoodModel(Model):
    """One linear layer for any input."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        return _Net(input_shape, num_outputs)


class ForRegression(GoodModel):
    """Can be used for real values only."""

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        if info.task != "regression":
            yield Problem("", "not a regression", "use another model")


class ForTwoClasses(GoodModel):
    """Can be used for two classes only."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        assert num_outputs == 2
        return _Net(input_shape, num_outputs)

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        if (info.task, info.num_outputs) != ("classification", 2):
            yield Problem("", "not two classes", "use another model")


GOOD = (GoodModel, ForRegression, ForTwoClasses)


class ImagesOnly(Model):
    """Takes images only, and check_spec does not say so."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        channels, _, _ = input_shape
        return nn.Sequential(nn.Conv2d(channels, num_outputs, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class TakesNothing(GoodModel):
    """Rejects every input."""

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        yield Problem("", "no input is good enough", "")


class Infinite(GoodModel):
    """Divides by zero."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        class Network(_Net):
            def forward(self, inputs: Tensor) -> Tensor:
                outputs = super().forward(inputs)
                return torch.where(torch.arange(outputs.shape[1], device=outputs.device) == 0, torch.inf, outputs)

        return Network(input_shape, num_outputs)


class SeedsItself(GoodModel):
    """Seeds torch in build(), so that all members are equal."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        torch.default_generator.manual_seed(0)
        return _Net(input_shape, num_outputs)


class Counting(GoodModel):
    """Builds another network in every call."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        network = _Net(input_shape, num_outputs)
        with torch.no_grad():
            network.linear.bias.copy_(torch.rand(num_outputs, generator=torch.Generator().manual_seed(id(network))))
        return network


class Unused(GoodModel):
    """Has a layer that forward() does not use."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        network = _Net(input_shape, num_outputs)
        network.forgotten = nn.Linear(2, 2)
        return network


class WorksInPlace(GoodModel):
    """Centres the batch in place, which the other members get too."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        class Network(_Net):
            def forward(self, inputs: Tensor) -> Tensor:
                return super().forward(inputs.sub_(0.5))

        return Network(input_shape, num_outputs)


class CountsInEvaluation(GoodModel):
    """Updates a statistic in evaluation mode."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        class Network(_Net):
            def __init__(self) -> None:
                super().__init__(input_shape, num_outputs)
                self.register_buffer("passes", torch.zeros(()))

            def forward(self, inputs: Tensor) -> Tensor:
                if not self.training and not torch.compiler.is_exporting():
                    self.passes.add_(1)
                return super().forward(inputs)

        return Network()


class CentresTheBatch(GoodModel):
    """Subtracts the mean of the batch, in evaluation mode too."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        class Network(_Net):
            def forward(self, inputs: Tensor) -> Tensor:
                return super().forward(inputs - inputs.mean(dim=0))

        return Network(input_shape, num_outputs)


class KeepsAScaleAside(GoodModel):
    """Has a random scale that is not in the state dict."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        class Network(_Net):
            def __init__(self) -> None:
                super().__init__(input_shape, num_outputs)
                self.scale = float(torch.rand(()))

            def forward(self, inputs: Tensor) -> Tensor:
                return self.scale * super().forward(inputs)

        return Network()


class OddDeclaration(GoodModel):
    """Declares an unknown execution mode."""

    def unsupported(self) -> dict[str, str]:
        return {"vmaps": "misspelt"}


class NeedlessDeclaration(GoodModel):
    """Declares modes as unsupported that work."""

    def unsupported(self) -> dict[str, str]:
        return {"vmap": "nobody ever tried", "export": "nor this", "meta": "nor that"}


class Branches(GoodModel):
    """Reads a value back, which vmap does not allow."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        class Network(_Net):
            def forward(self, inputs: Tensor) -> Tensor:
                outputs = super().forward(inputs)
                return outputs if float(outputs.detach().sum()) > -1e9 else -outputs

        return Network(input_shape, num_outputs)

    def unsupported(self) -> dict[str, str]:
        return {"meta": "it reads a value"}


class FixedDtype(GoodModel):
    """Mixes its outputs with a tensor of the dtype of the inputs, which fails under autocast."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        class Network(_Net):
            def forward(self, inputs: Tensor) -> Tensor:
                outputs = super().forward(inputs)
                return torch.lerp(inputs.new_zeros(outputs.shape), outputs, 0.5)

        return Network(input_shape, num_outputs)


class Layout(GoodModel):
    """Assumes that images are contiguous in memory."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        class Network(_Net):
            def forward(self, inputs: Tensor) -> Tensor:
                return super().forward(inputs.as_strided((len(inputs), inputs[0].numel()), (inputs[0].numel(), 1)))

        return Network(input_shape, num_outputs)

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if spec.data.info is not None and spec.data.info.input_shape[0] != 3:
            yield Problem("", "three channels only", "")


class HasNoOpinion(GoodModel):
    """Returns None for no problems."""

    def check_spec(self, spec: Spec) -> None:
        pass


class ReturnsNothing(Model):
    """Does not return its network."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        _Net(input_shape, num_outputs)


class OneArgument(Model):
    """Does not take the number of outputs."""

    def build(self, input_shape: tuple[int, ...]) -> nn.Module:
        return _Net(input_shape, 5)


class OtherSize(Model):
    """Always has ten outputs."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        return _Net(input_shape, 10)


class Misnamed(Model):
    """Has a slip in build."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        return _Net(inputs_shape, num_outputs)  # noqa: F821 - the fault


class Silent(Model):
    """Builds a network that returns nothing."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        class Network(_Net):
            def forward(self, inputs: Tensor) -> Tensor:
                super().forward(inputs)

        return Network(input_shape, num_outputs)


class TwoOutputs(Model):
    """Builds a network that returns its features as well."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        class Network(_Net):
            def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
                return super().forward(inputs), inputs

        return Network(input_shape, num_outputs)


class ReadsAValue(Model):
    """Builds a network that reads a value back."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        class Network(_Net):
            def forward(self, inputs: Tensor) -> Tensor:
                return super().forward(inputs) * inputs.mean().item()

        return Network(input_shape, num_outputs)


class OnTheCPU(Model):
    """Builds a network that makes a tensor on the CPU."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        class Network(_Net):
            def forward(self, inputs: Tensor) -> Tensor:
                return super().forward(inputs) + torch.linspace(0, 1, num_outputs)

        return Network(input_shape, num_outputs)


class SplitsTheBatch(GoodModel):
    """Splits every batch in two halves, which only an even one has."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        class Network(_Net):
            def forward(self, inputs: Tensor) -> Tensor:
                halves = inputs.unflatten(0, (2, len(inputs) // 2)) if self.training else [inputs]
                return torch.cat([super(Network, self).forward(half) for half in halves])

        return Network(input_shape, num_outputs)


class DeclaresNothingAtAll(GoodModel):
    """Does not return a mapping."""

    def unsupported(self) -> dict[str, str]:
        pass


class NotProbable(GoodModel):
    """Declares that its raw outputs are probabilities."""

    def gives_probabilities(self) -> bool:
        return True


NOT_BUILT = {
    HasNoOpinion: ("an iterable of Problem from check_spec()", "got: None", "HasNoOpinion.check_spec"),
    ReturnsNothing: ("a torch.nn.Module", "got: None", "end build() with return", "ReturnsNothing.build"),
    OneArgument: ("build(input_shape, num_outputs)", "take these two arguments", "OneArgument.build"),
    OtherSize: ("output is (2, 10); expected (2, 5)", "num_outputs outputs", "OtherSize.build"),
    Misnamed: ("NameError: name 'inputs_shape'", "build(), ", "_Net(inputs_shape, num_outputs)"),
    Silent: ("forward()", "got: None", "Silent.build"),
    TwoOutputs: ("a single tensor", "got: a tuple", "TwoOutputs.build"),
    ReadsAValue: ("meta device", "item()", "unsupported()", "inputs.mean().item()"),
    OnTheCPU: ("meta device", "register_buffer", "torch.linspace(0, 1, num_outputs)"),
}
"""Models without a network to check: one failure, and all checks that need a network are skipped."""
FAULTS: list[tuple[type[Model], set[str], tuple[str, ...]]] = [
    *((broken, {ACCEPTED}, parts) for broken, parts in NOT_BUILT.items()),
    (DeclaresNothingAtAll, {KNOWN_MODES}, ("got: None", "return {}", "DeclaresNothingAtAll.unsupported")),
    (ImagesOnly, {ACCEPTED}, ("inputs of shape (7,)", "check_spec", "channels, _, _ = input_shape")),
    (TakesNothing, {ACCEPTED}, ("no input is good enough", "TakesNothing.check_spec")),
    (Infinite, {SHAPES}, ("finite outputs", "Infinite.build")),
    (NotProbable, {PROBABLE, TRAINS}, ("not probabilities", "softmax", "NotProbable.gives_probabilities")),
    (SeedsItself, {SEEDS}, ("different weights for different members", "SeedsItself.build")),
    (Counting, {SEEDS}, ("the same weights for the same seed", "linear.bias")),
    (Unused, {GRADIENTS}, ("forgotten.weight", "requires_grad = False")),
    (
        WorksInPlace,
        {UNMODIFIED, works("vmap"), works("export")},
        ("an unmodified batch", "inplace=False", "WorksInPlace.build"),
    ),
    (CountsInEvaluation, {EVALUATION}, ("passes", "only if self.training")),
    (CentresTheBatch, {INDEPENDENT}, ("single samples", "nn.BatchNorm")),
    (KeepsAScaleAside, {RESTORED, works("vmap")}, ("state dict", "persistent buffers")),
    (OddDeclaration, {KNOWN_MODES}, ('"vmaps"', "OddDeclaration.unsupported")),
    (
        NeedlessDeclaration,
        {works("vmap"), works("export"), works("meta")},
        ("nobody ever tried", "NeedlessDeclaration.unsupported"),
    ),
    (Branches, {works("vmap"), works("export")}, ("unsupported() does not exclude", "Branches.build")),
    (FixedDtype, {works("autocast")}, ("RuntimeError", "FixedDtype.build")),
    (SplitsTheBatch, {TRAINS}, ("RuntimeError: unflatten", "inputs.unflatten(0, (2, len(inputs) // 2))")),
    (Layout, {works("channels_last")}, ("WrongNumbers", "Layout.build")),
]
