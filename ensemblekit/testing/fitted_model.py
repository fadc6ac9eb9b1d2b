"""The contracts of models that do not learn by gradients: those that are fitted once, and those that know outputs."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from ensemblekit.core.errors import Problem
from ensemblekit.core.losses import MSE, NLL, CrossEntropy, Exponential, Loss
from ensemblekit.core.plugin import Model
from ensemblekit.core.seeds import derive_seed, generator
from ensemblekit.members.build import build_member
from ensemblekit.spec.groups import Group
from ensemblekit.spec.sections import Spec
from ensemblekit.testing.checks import Check, Reference, check
from ensemblekit.testing.common import PluginContract
from ensemblekit.testing.model import OUTPUTS, SHAPES, ModelContract, Shape
from ensemblekit.testing.reviews import describe, mismatch, spec_problems
from ensemblekit.testing.toy_run import ToyNetwork, toy_registry, toy_spec, train_with_every_engine

NUM_SAMPLES = 40
KNOWN = torch.tensor([1, 0])
"""Indices of samples whose outputs are asked for."""
LEFT_OUT = {
    "weights are reproducible and differ between members",
    "every parameter receives a gradient",
    "the state dict restores the network",
    "it trains with every supported engine",
}
"""Checks of models that learn by gradients; the contract of fitted models has its own instead."""


class FittedModelContract(ModelContract):
    """The checks of a model with `fit`: those of every network, on members that were fitted to random samples."""

    def select(self, *references: Reference) -> list[Check]:
        """Leave out what is about learning by gradients; whether members can be stacked may depend on the samples."""
        left_out = LEFT_OUT | ({"vmap works as declared"} if "vmap" in self.plugin.unsupported() else set())
        return [check for check in super().select(*references) if check.name not in left_out]

    @cached_property
    def is_regression(self) -> bool:
        """Whether the model refuses classes, so that it is checked on real values."""
        refuses = [bool(spec_problems(self.plugin, self._spec(shape, False))) for shape in SHAPES]
        return all(refuses) and any(not spec_problems(self.plugin, self._spec(shape, True)) for shape in SHAPES)

    def _spec(self, shape: Shape, is_regression: bool) -> Spec:
        """A toy run of this model beside a small network."""
        spec = toy_spec(toy_registry(self.plugin), {"data.shape": list(shape), "data.regression": is_regression})
        gives_probabilities = self.plugin.gives_probabilities()
        network = ToyNetwork(probabilities=gives_probabilities)
        loss = NLL() if gives_probabilities else spec.loss
        return replace(spec, model=network, loss=loss, groups=(Group(1, self.plugin), Group(1, network)))

    @cached_property
    def takes_margins(self) -> bool:
        """Whether the model accepts a loss of two classes and one output."""
        changes = {"data.shape": list(self.shapes[0]), "data.num_classes": 2}
        spec = replace(toy_spec(toy_registry(self.plugin), changes), model=self.plugin, loss=Exponential())
        return not spec_problems(self.plugin, spec)

    def problems(self, shape: Shape) -> list[Problem]:
        """The problems that the model reports for inputs of a shape, for classes if it takes these."""
        return spec_problems(self.plugin, self._spec(shape, self.is_regression))

    def samples(self, shape: Shape, num_outputs: int) -> tuple[Tensor, Tensor, Loss]:
        """Random training samples, and the loss that says what the outputs mean."""
        random = generator(0, "contract", "samples")
        inputs = torch.rand(NUM_SAMPLES, *shape, generator=random)
        if self.is_regression:
            return inputs, torch.randn(NUM_SAMPLES, num_outputs, generator=random), MSE()
        targets = torch.randint(max(num_outputs, 2), (NUM_SAMPLES,), generator=random)
        if num_outputs == 1:
            return inputs, targets, Exponential()
        return inputs, targets, NLL() if self.plugin.gives_probabilities() else CrossEntropy()

    def unfitted(self, shape: Shape | None = None, num_outputs: int = OUTPUTS[-1], member: int = 0) -> nn.Module:
        """A network as `build` returns it."""
        return build_member(self.plugin, shape or self.shapes[0], num_outputs, seed=0, member=member)

    def fit(self, network: nn.Module, shape: Shape, num_outputs: int, member: int, weights: Tensor | None) -> None:
        """Fit a network to the random samples."""
        inputs, targets, loss = self.samples(shape, num_outputs)
        self.plugin.fit(network, inputs, targets, weights, loss, derive_seed(0, "fit", member))

    def _build_anew(self, member: int, shape: Shape, num_outputs: int) -> nn.Module:
        network = self.unfitted(shape, num_outputs, member)
        if num_outputs > 1 or self.is_regression or self.takes_margins:
            self.fit(network, shape, num_outputs, member, None)
        return network.train()

    @check("fitting changes its outputs", needs=[ModelContract.known_modes, ModelContract.some_shape])
    def effect(self) -> None:
        """A member predicts what it has been fitted to."""
        before, after = (_outputs(network, self.inputs()) for network in (self.unfitted(), self.build()))
        if torch.equal(before, after):
            fix = "assign what was learnt to the network's buffers in fit()"
            raise self.violation("other outputs after fit() than before it", "the same outputs", "fit", fix)

    @check("fitting is reproducible and has no side effects", needs=[effect])
    def reproducibility(self) -> None:
        """The seed and the samples determine what is fitted; members share the samples."""
        again = self._build_anew(0, self.shapes[0], OUTPUTS[-1])
        if wrong := mismatch(_outputs(again, self.inputs()), _outputs(self.build(), self.inputs()), 0.0):
            fix = "derive all randomness in fit() from its argument seed"
            raise self.violation("the same outputs after a second fit() with the same seed", wrong, "fit", fix)
        inputs, targets, loss = self.samples(self.shapes[0], OUTPUTS[-1])
        weights = _uneven_weights()
        self.plugin.fit(self.unfitted(), inputs, targets, weights, loss, 0)
        originals = (*self.samples(self.shapes[0], OUTPUTS[-1])[:2], _uneven_weights())
        for name, value, original in zip(
            ("inputs", "targets", "weights"), (inputs, targets, weights), originals, strict=True
        ):
            if not torch.equal(value, original):
                raise self.violation(f"unmodified {name} after fit()", "other values", "fit", "work on a copy")

    @check("sample weights change what is fitted", needs=[effect])
    def weights(self) -> None:
        """Methods such as bagging give each member weights of its own, of which some are 0."""
        network = self.unfitted()
        self.fit(network, self.shapes[0], OUTPUTS[-1], 0, _uneven_weights())
        outputs = _outputs(network, self.inputs())
        if not bool(outputs.isfinite().all()):
            fix = "leave out samples of weight 0"
            raise self.violation("finite outputs with weights of which some are 0", describe(outputs), "fit", fix)
        if torch.equal(outputs, _outputs(self.build(), self.inputs())):
            fix = "use the argument weights in fit()"
            raise self.violation("other outputs for other sample weights", "the same outputs", "fit", fix)

    @check("a fitted member is restored from its buffers", needs=[effect])
    def restoration(self) -> None:
        """A run keeps the tensors of the state dict and nothing else; their shapes may have changed in `fit`."""
        trained, fresh = self.build().eval(), self.unfitted(member=1).eval()
        saved, built = dict(trained.named_buffers()), dict(fresh.named_buffers())
        if trained.state_dict().keys() != fresh.state_dict().keys():
            names = ", ".join(sorted(trained.state_dict().keys() ^ fresh.state_dict().keys()))
            fix = "register every buffer, perhaps an empty one, in build()"
            raise self.violation("buffers of the same names before and after fit()", names, "fit", fix)
        if any(parameter.requires_grad for parameter in trained.parameters()):
            fix = "keep what is learnt with register_buffer()"
            raise self.violation("no parameters that learn by gradients", "some", "build", fix)
        for name in built:
            owner, _, attribute = name.rpartition(".")
            setattr(fresh.get_submodule(owner), attribute, saved[name].clone())
        if wrong := mismatch(_outputs(fresh, self.inputs()), _outputs(trained, self.inputs()), 0.0):
            fix = "keep everything that outputs depend on in persistent buffers"
            raise self.violation("the outputs of the member whose buffers were loaded", wrong, "fit", fix)

    @check("it is part of runs with every supported engine", needs=[effect, restoration])
    def runs(self) -> None:
        """One epoch through the ordinary training path, beside a network that learns."""
        train_with_every_engine(self._spec(self.shapes[0], self.is_regression), toy_registry(self.plugin))


class KnownOutputsContract(PluginContract[Model]):
    """The checks of a model that knows outputs of samples and has no network."""

    kind = "model"

    @check("known outputs are those of the samples asked for")
    def known_outputs(self) -> None:
        """Outputs (N, C) by the indices of the samples, in their order, finite and on the CPU."""
        for split in ("train", "test"):
            outputs = self.plugin.known_outputs(split, KNOWN, CrossEntropy())
            if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(KNOWN):
                expected = f"a tensor ({len(KNOWN)}, num_outputs) for {len(KNOWN)} {split} samples"
                raise self.violation(expected, describe(outputs), "known_outputs")
            if outputs.dtype != torch.float32 or outputs.device.type != "cpu" or not bool(outputs.isfinite().all()):
                raise self.violation("finite float32 outputs on the CPU", describe(outputs), "known_outputs")
            if wrong := mismatch(self._of_flipped(split), outputs, 0.0):
                raise self.violation("the same outputs of a sample in any order", wrong, "known_outputs")

    def _of_flipped(self, split: str) -> Tensor:
        outputs = self.plugin.known_outputs(split, KNOWN.flip(0), CrossEntropy())
        assert outputs is not None
        return outputs.flip(0)

    @check("its placeholder has the right shape on the meta device")
    def placeholder(self) -> None:
        """Every network is tried there when it is built."""
        for shape in SHAPES:
            build_member(self.plugin, shape, OUTPUTS[-1], seed=0, member=0)


def _uneven_weights() -> Tensor:
    """Sample weights of which half are 0 and the others differ."""
    return (torch.arange(NUM_SAMPLES) % 4 - 1).clamp_min(0).float()


def _outputs(network: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        outputs: Tensor = network.eval()(inputs)
    return outputs
