"""The contract of a mixture of training samples: a function of what was sampled, with shares that add up."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ensemblekit.core.augmentation import BatchAugmentation
from ensemblekit.core.seeds import generator
from ensemblekit.spec.sections import Spec
from ensemblekit.testing.checks import check
from ensemblekit.testing.common import PluginContract
from ensemblekit.testing.reviews import call_unmodified, describe, mismatch, spec_problems, works_on_meta
from ensemblekit.testing.toy_run import toy_registry, toy_spec, train_toy_run

BATCH = 8
SHAPES = ((6,), (3, 8, 10))
"""Rows of a table and images."""


class MixContract(PluginContract[BatchAugmentation]):
    """The checks of a mixture."""

    kind = "mix"

    @cached_property
    def spec(self) -> Spec:
        """A toy spec with data that the plugin accepts: rows of a table, or else images."""
        registry = toy_registry(self.plugin)
        specs = [toy_spec(registry, {"data.shape": list(shape)}) for shape in SHAPES]
        return next((spec for spec in specs if not spec_problems(self.plugin, spec)), specs[-1])

    @cached_property
    def inputs(self) -> Tensor:
        """Inputs of a batch."""
        assert self.spec.data.info is not None
        return torch.rand(BATCH, *self.spec.data.info.input_shape, generator=generator(0, "contract", "inputs"))

    def sample(self, num_samples: int = BATCH, epoch: int = 1) -> Tensor:
        """The numbers of an epoch."""
        return self.plugin.sample(num_samples, generator(0, "contract", "mix", epoch))

    def apply(self, inputs: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mix a batch."""
        arguments = {"inputs": inputs, "sampled": sampled}
        mixed: tuple[Tensor, Tensor, Tensor] = call_unmodified(self.plugin_class, "apply", self.plugin.apply, arguments)
        return mixed

    @check("it samples one row of numbers for each sample, from the generator alone")
    def seeded(self) -> None:
        """A resumed run samples the same numbers again."""
        first = self.sample()
        torch.rand(1)  # whoever uses the global generator gets other numbers now
        if not isinstance(first, Tensor) or first.ndim < 1 or len(first) != BATCH or first.device.type != "cpu":
            raise self.violation(f"a tensor ({BATCH}, …) on the CPU", describe(first), "sample")
        if wrong := mismatch(self.sample(), first, 0.0):
            fix = "pass generator=generator to every function that samples"
            raise self.violation("the same numbers from the same generator", wrong, "sample", fix)
        if torch.equal(self.sample(epoch=2), first):
            raise self.violation("other numbers from another generator", "the same", "sample")

    @check("it returns inputs, partners and shares of the batch", needs=[seeded])
    def shapes(self) -> None:
        """Inputs of the same shape and dtype, int64 (B,) and float32 (B,); on the meta device too."""
        for device in ("cpu", "meta"):
            inputs, sampled = self.inputs.to(device), self.sample().to(device)
            with works_on_meta(device, self.plugin_class, "apply"):
                result = self.apply(inputs, sampled)
            expected = (inputs, inputs.new_empty(BATCH, dtype=torch.int64), inputs.new_empty(BATCH))
            got = [describe(value) for value in result] if isinstance(result, tuple) else [describe(result)]
            if got != [describe(value) for value in expected]:
                wanted = ", ".join(describe(value) for value in expected)
                raise self.violation(wanted, ", ".join(got), "apply", "return inputs, partner, share")
        _, partner, share = self.apply(self.inputs, self.sample())
        if not bool(((partner >= 0) & (partner < BATCH)).all()):
            raise self.violation(f"partners from 0 to {BATCH - 1}", str(partner.tolist()), "apply")
        if not bool(((share >= 0) & (share <= 1)).all()):
            raise self.violation("shares from 0 to 1", str(share.tolist()), "apply")

    @check("it mixes samples with their partners by their shares", needs=[shapes])
    def shares(self) -> None:
        """If a sample is 1 everywhere and all others are 0, the mean of its mixture is its share."""
        sampled = self.sample()
        for number in range(BATCH):
            inputs = torch.zeros_like(self.inputs)
            inputs[number] = 1
            mixed, partner, share = self.apply(inputs, sampled)
            expected = share * (torch.arange(BATCH) == number) + (1 - share) * (partner == number)
            if wrong := mismatch(mixed.flatten(1).mean(dim=1), expected, 1e-5):
                fix = "return the part of the inputs that comes from the sample itself as its share"
                raise self.violation("a share equal to the part of the sample in its mixture", wrong, "apply", fix)

    @check("a run with it finishes", needs=[shares])
    def run_finishes(self) -> None:
        """One epoch on data that it accepts."""
        train_toy_run(replace(self.spec, mix=self.plugin), toy_registry(self.plugin))
