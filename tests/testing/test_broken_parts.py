"""The contracts of combiners, augmentations, mixes and metrics find faults, each by the check that is made for it."""

from __future__ import annotations

import inspect
import sys
from typing import ClassVar

import pytest
import torch

from ensemblekit import Augmentation, BatchAugmentation, Combination, Metric, hookimpl
from ensemblekit.core.plugin import Plugin
from ensemblekit.testing import run_contract


class CentresTheBatch(Combination):
    """Subtracts the mean of the batch."""

    fault: ClassVar[str] = "a sample's output does not depend on the other samples"

    @hookimpl
    def combine(self, outputs):
        return outputs.mean(dim=0) - outputs.mean(dim=(0, 1))


class KeepsTheMembers(Combination):
    """Forgets to combine."""

    fault: ClassVar[str] = "it combines outputs of every dtype and device"

    @hookimpl
    def combine(self, outputs):
        return outputs


class CombinesNothing(Combination):
    """Has no combine."""

    fault: ClassVar[str] = "it implements combine"


class FitsAtRandom(Combination):
    """Fits random weights."""

    fault: ClassVar[str] = "fitting it is deterministic"

    @hookimpl
    def combine(self, outputs):
        return outputs.mean(dim=0)

    @hookimpl
    def fit_combiner(self, outputs):
        return torch.rand(len(outputs))


class ChangesOutputs(Combination):
    """Sorts in place."""

    fault: ClassVar[str] = "it combines outputs of every dtype and device"

    @hookimpl
    def combine(self, outputs):
        outputs.copy_(outputs.sort(dim=0).values)
        return outputs[0]


class GlobalNoise(Augmentation):
    """Uses torch's global generator."""

    fault: ClassVar[str] = "it samples parameters for each image, from the generator alone"

    def sample(self, num_images, generator):
        return torch.rand(num_images)

    def apply(self, images, sampled):
        return images


class MakesFloats(Augmentation):
    """Returns floats for uint8 images."""

    fault: ClassVar[str] = "it keeps the number, the channels and the dtype of the images"

    def sample(self, num_images, generator):
        return torch.rand(num_images, generator=generator)

    def apply(self, images, sampled):
        return images * sampled.view(-1, 1, 1, 1)


class Normalises(Augmentation):
    """Subtracts the mean of the batch."""

    fault: ClassVar[str] = "an image's augmentation does not depend on the others"

    def sample(self, num_images, generator):
        return torch.rand(num_images, generator=generator)

    def apply(self, images, sampled):
        return images - images.float().mean(dim=0).to(images.dtype)


class WrongShare(BatchAugmentation):
    """Returns the share of the partner."""

    fault: ClassVar[str] = "it mixes samples with their partners by their shares"

    def sample(self, num_samples, generator):
        return torch.rand(num_samples, 2, generator=generator)

    def apply(self, inputs, sampled):
        partner, share = sampled[:, 0].argsort(), sampled[:, 1]
        own = share.view(-1, *[1] * (inputs.ndim - 1))
        return own * inputs + (1 - own) * inputs[partner], partner, 1 - share


class OneShare(WrongShare):
    """Returns one share for the whole batch."""

    fault: ClassVar[str] = "it returns inputs, partners and shares of the batch"

    def apply(self, inputs, sampled):
        mixed, partner, share = super().apply(inputs, sampled)
        return mixed, partner, share.mean()


class GlobalMix(WrongShare):
    """Uses torch's global generator."""

    fault: ClassVar[str] = "it samples one row of numbers for each sample, from the generator alone"

    def sample(self, num_samples, generator):
        return torch.rand(num_samples, 2)

    def apply(self, inputs, sampled):
        mixed, partner, rest = super().apply(inputs, sampled)
        return mixed, partner, 1 - rest


class FirstSample(Metric):
    """Looks at the first sample only."""

    fault: ClassVar[str] = "it does not depend on the order of the samples"

    def compute(self, outputs, combined, target, loss):
        return loss(combined, target)[0]


class PerSample(Metric):
    """Forgets the mean."""

    fault: ClassVar[str] = "it is one finite number in both precisions"

    def compute(self, outputs, combined, target, loss):
        return loss(combined, target)


class Accuracy(Metric):
    """Has the name of a built-in metric."""

    fault: ClassVar[str] = "its name is not that of a built-in metric"
    tasks = ("classification",)

    def compute(self, outputs, combined, target, loss):
        return (combined.argmax(dim=-1) == target).double().mean()


BROKEN = [
    value
    for _, value in inspect.getmembers(sys.modules[__name__], inspect.isclass)
    if issubclass(value, Plugin) and hasattr(value, "fault")
]


@pytest.mark.parametrize("plugin", BROKEN, ids=lambda plugin: plugin.__name__)
def test_the_check_that_is_made_for_a_fault_finds_it_and_no_other_does(plugin):
    results = run_contract(plugin)
    assert [result.name for result in results if result.passed is False] == [plugin.fault]
    review = next(result.message for result in results if result.passed is False)
    assert "expected:" in review
    assert plugin.__name__ in review
