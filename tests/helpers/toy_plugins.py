"""Small plugins of every kind, given to commands and tests as a local plugin file."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from pydantic import Field
from torch import Tensor, nn

from ensemblekit import DataInfo, Dataset, Loss, Method, Model, Problem, Spec, Splits, hookimpl


class Linear(Model):
    """One linear layer."""

    bias: bool = Field(True, description="whether to add a constant")

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        return nn.Linear(input_shape[0], num_outputs, bias=self.bias)

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if spec.data.info and len(spec.data.info.input_shape) != 1:
            yield Problem("name", "takes flat inputs only", "choose another model")


class Blobs(Dataset):
    """Gaussian blobs."""

    spread: float = Field(1.0, gt=0, description="standard deviation of a blob")
    image: bool = Field(False, description="arrange the features as an image")
    regression: bool = Field(False, description="predict the first feature")
    num_classes: int = Field(2, ge=2, description="number of blobs")

    @property
    def info(self) -> DataInfo:
        shape = (1, 2, 2) if self.image else (4,)
        return (
            DataInfo("regression", shape, 1) if self.regression else DataInfo("classification", shape, self.num_classes)
        )

    def load(self, seed: int) -> Splits:
        inputs = self.spread * torch.randn(20, 4, generator=torch.Generator().manual_seed(seed))
        part = (inputs, (inputs[:, 0] > 0).long())
        return Splits(part, part, self.info)


class Hinge(Loss):
    """The hinge loss, which has a kink."""

    takes = "margins"
    twice_differentiable = False

    def prepare(self, outputs: Tensor, target: Tensor) -> Tensor:
        return 2 * target - 1

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (1 - outputs.squeeze(-1) * target).clamp_min(0)


class Huber(Loss):
    """Quadratic near zero and linear far away."""

    takes = "values"
    delta: float = Field(1.0, gt=0, description="where it turns linear")

    def prepare(self, outputs: Tensor, target: Tensor) -> Tensor:
        return target.reshape(outputs.shape[-2:]).to(outputs.dtype)

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        return nn.functional.huber_loss(outputs, target.expand_as(outputs), reduction="none", delta=self.delta).sum(-1)


class SoftMin(Method):
    """Members of little loss on a sample learn most from it."""

    formula = "sum_i softmax(-l(h_i, y) / temperature)_i l(h_i, y)"
    temperature: float = Field(1.0, gt=0, description="large: everyone learns; small: only the best")

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        losses = loss(outputs, target)
        return (-losses.detach() / self.temperature).softmax(dim=0) * losses


class FitsBias(Method):
    """Adds to the mean what it is off by on held-out data."""

    formula = "f = mean_i h_i + b,  b = held-out mean of y - mean_i h_i"

    @hookimpl
    def fit_combiner(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (nn.functional.one_hot(target, outputs.shape[-1]) - outputs.mean(dim=0)).mean(dim=0)

    @hookimpl
    def combine(self, outputs: Tensor, fitted: Tensor | None) -> Tensor | None:
        return None if fitted is None else outputs.mean(dim=0) + fitted


class Noisy(Model):
    """A network that draws from torch's global generator in training."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        size = torch.Size(input_shape).numel()
        return nn.Sequential(nn.Flatten(), nn.AlphaDropout(0.3), nn.Linear(size, num_outputs))
