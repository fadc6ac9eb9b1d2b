"""Networks that compute fitted estimators of scikit-learn: all that was learnt is in buffers, nothing is pickled.

Buffers change their shapes when an estimator is fitted or loaded; a forward pass works for whatever shapes they have.
Numbers that need more than float32 are stored as pairs (2, …) of float32, the rounded value and the rest: every device
can keep them, and those that have float64 compute in it, as scikit-learn does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

LIMITS = torch.finfo(torch.float32)
NEVER = -1e30
"""Score of a class that no training sample has: its probability is 0."""


def pair(values: Tensor) -> Tensor:
    """Split float64 values (…) into float32 (2, …): the rounded values, and what is left of them."""
    rounded = values.float()
    return torch.stack([rounded, (values - rounded.double()).float()])


def precise(stored: Tensor) -> Tensor:
    """Return the values (…) of a pair (2, …), in float64 if the device has it."""
    dtype = torch.float32 if stored.device.type == "mps" else torch.float64
    return stored[0].to(dtype) + stored[1].to(dtype)


def _inner(probabilities: Tensor) -> Tensor:
    """Move probabilities of 0 and 1 a little inside, as losses do: their outputs are finite."""
    return probabilities.clamp(LIMITS.tiny, 1 - LIMITS.eps)


LINKS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda probabilities: probabilities,
    lambda probabilities: _inner(probabilities).log(),
    lambda probabilities: _inner(probabilities).logit(),
    lambda probabilities: torch.special.ndtri(_inner(probabilities)),
)
"""Functions of which a loss's `from_probabilities` is a multiple: p, log p, logit p, probit p."""


class FittedNetwork(nn.Module):
    """A fitted estimator, (B, …) → (B, num_outputs); before it is fitted, all outputs are equal."""

    softmax: Tensor
    smoothing: Tensor
    link: Tensor

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.num_outputs = num_outputs
        self.register_buffer("softmax", torch.tensor(False))
        self.register_buffer("smoothing", torch.tensor(0.0))
        # its length is the number of the function in LINKS, its values are the factor
        self.register_buffer("link", torch.ones(1))

    def store(self, learnt: Mapping[str, Tensor]) -> None:
        """Replace buffers, whatever the shapes of the new ones."""
        for name, value in learnt.items():
            old = self.get_buffer(name)
            setattr(self, name, value.detach().to(old.device, old.dtype))

    @abstractmethod
    def scores(self, inputs: Tensor) -> Tensor:
        """Compute what the estimator predicts for inputs (B, D): values, probabilities or, with `softmax`, logits."""

    def predictions(self, inputs: Tensor) -> Tensor:
        """Compute the estimator's class probabilities (B, K) or values (B, C) for inputs (B, …)."""
        scores = self.scores(inputs.flatten(1))
        return torch.where(self.softmax, scores.softmax(dim=-1), scores)

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.predictions(inputs)
        values = (1 - self.smoothing) * values + self.smoothing / values.shape[-1]
        # a loss with one output learns from it the probability of the second class
        values = values[:, values.shape[-1] - self.num_outputs :]
        return (self.link[0] * LINKS[len(self.link) - 1](values)).to(inputs.dtype)


class FittedLinear(FittedNetwork):
    """A linear function of the inputs."""

    weight: Tensor
    bias: Tensor

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_outputs)
        self.register_buffer("weight", torch.zeros(2, num_outputs, num_inputs))
        self.register_buffer("bias", torch.zeros(2, num_outputs))

    def scores(self, inputs: Tensor) -> Tensor:
        weight = precise(self.weight)
        return inputs.to(weight.dtype) @ weight.mT + precise(self.bias)


class FittedTrees(FittedNetwork):
    """A sum of decision trees: the nodes of all trees in one list, in which a leaf is its own child."""

    feature: Tensor
    threshold: Tensor
    child: Tensor
    value: Tensor
    roots: Tensor
    levels: Tensor
    offset: Tensor

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_outputs)
        self.register_buffer("feature", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("threshold", torch.zeros(1))
        self.register_buffer("child", torch.zeros(1, 2, dtype=torch.int64))
        self.register_buffer("value", torch.zeros(2, 1, num_outputs))
        self.register_buffer("roots", torch.zeros(1, dtype=torch.int64))
        # its length is the depth of the deepest tree: a value would have to be read back from the device
        self.register_buffer("levels", torch.zeros(1, dtype=torch.uint8))
        self.register_buffer("offset", torch.zeros(2, num_outputs))

    def scores(self, inputs: Tensor) -> Tensor:
        inputs = inputs.float()  # as scikit-learn does: its thresholds are compared with float32
        node = self.roots.expand(inputs.shape[0], -1)  # not len(), which an exported graph would take for a constant
        for _ in range(len(self.levels)):
            is_right = inputs.gather(1, self.feature[node]) > self.threshold[node]
            node = self.child[node, is_right.long()]
        return precise(self.value)[node].sum(dim=1) + precise(self.offset)


class FittedGaussians(FittedNetwork):
    """A normal distribution of the inputs of each class, with independent features."""

    mean: Tensor
    variance: Tensor
    prior: Tensor

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_outputs)
        self.register_buffer("mean", torch.zeros(2, num_outputs, num_inputs))
        self.register_buffer("variance", pair(torch.ones(num_outputs, num_inputs, dtype=torch.float64)))
        self.register_buffer("prior", torch.zeros(2, num_outputs))

    def scores(self, inputs: Tensor) -> Tensor:
        means, variances = precise(self.mean), precise(self.variance)
        inputs = inputs.to(means.dtype)
        # class by class: all at once would take K times the memory
        distances = [
            ((inputs - mean).square() / variance).sum(dim=1)
            for mean, variance in zip(means.unbind(), variances.unbind(), strict=True)
        ]
        determinants = (2 * torch.pi * variances).log().sum(dim=1)
        joint = precise(self.prior) - (determinants + torch.stack(distances, dim=1)) / 2
        return torch.where(self.softmax, joint, 0)


class FittedNeighbors(FittedNetwork):
    """The mean of the targets of the nearest training samples, all of those that are equally near included."""

    samples: Tensor
    values: Tensor
    weights: Tensor

    def __init__(self, num_inputs: int, num_outputs: int, n_neighbors: int, weights: str, p: float) -> None:
        super().__init__(num_outputs)
        self.neighbors, self.by_distance, self.power = n_neighbors, weights == "distance", float(p)
        self.register_buffer("samples", torch.zeros(1, num_inputs))
        self.register_buffer("values", torch.zeros(1, num_outputs))
        self.register_buffer("weights", torch.ones(1))

    def scores(self, inputs: Tensor) -> Tensor:
        dtype = torch.float32 if inputs.device.type == "mps" else torch.float64
        exact = "donot_use_mm_for_euclid_dist"  # the product of matrices loses small distances
        distances = torch.cdist(inputs.to(dtype), self.samples.to(dtype), p=self.power, compute_mode=exact)
        farthest = distances.topk(min(self.neighbors, distances.shape[1]), largest=False).values[:, -1:]
        votes = (distances <= farthest) * self.weights.to(dtype)
        if self.by_distance:
            is_same = distances == 0
            votes = votes * torch.where(is_same.any(dim=1, keepdim=True), is_same.to(dtype), 1 / distances)
        return votes @ self.values.to(dtype) / votes.sum(dim=1, keepdim=True)
