"""The baseline: an ensemble as most people write it, with networks in a list, one loss and one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

NaiveLoss = Callable[[Sequence[Tensor], Tensor, Tensor | None], Tensor]
"""(outputs (B, C) of each member, class indices (B,), weights (B, M) or None) → scalar."""


def coupled(outputs: Sequence[Tensor], targets: Tensor, weights: Tensor | None) -> Tensor:
    """Half the loss of the mean output and half the mean of the members' losses."""
    combined = sum(outputs, torch.zeros_like(outputs[0])) / len(outputs)
    return 0.5 * cross_entropy(combined, targets) + 0.5 * separate(outputs, targets, weights)


def separate(outputs: Sequence[Tensor], targets: Tensor, weights: Tensor | None) -> Tensor:
    """The mean of the members' losses."""
    return torch.stack([cross_entropy(output, targets) for output in outputs]).mean()


def weighted(outputs: Sequence[Tensor], targets: Tensor, weights: Tensor | None) -> Tensor:
    """The mean of the members' losses, with a weight for each sample and member."""
    assert weights is not None
    losses = [
        (weights[:, member] * cross_entropy(output, targets, reduction="none")).mean()
        for member, output in enumerate(outputs)
    ]
    return torch.stack(losses).mean()


def newest(outputs: Sequence[Tensor], targets: Tensor, weights: Tensor | None) -> Tensor:
    """The loss of the last network; the outputs of its earlier copies are not used."""
    return cross_entropy(outputs[-1], targets)


def stages(outputs: Sequence[Tensor], targets: Tensor, weights: Tensor | None) -> Tensor:
    """The sum over the members of the loss of each partial sum of outputs; earlier outputs are constants."""
    total = torch.zeros_like(outputs[0])
    losses = []
    for output in outputs:
        total = total.detach() + output
        losses.append(cross_entropy(total, targets))
    return torch.stack(losses).sum()


NAIVE_LOSSES: dict[str, NaiveLoss] = {loss.__name__: loss for loss in (coupled, separate, weighted, newest, stages)}


class NaiveLoop:
    """Networks that run one after the other, with the default memory layout and number of threads."""

    def __init__(
        self,
        networks: Sequence[nn.Module],
        loss: NaiveLoss,
        build_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.networks = list(networks)
        self.loss = loss
        parameters = [parameter for network in networks for parameter in network.parameters()]
        self.optimizer = build_optimizer([parameter for parameter in parameters if parameter.requires_grad])

    def step(self, inputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Run one training step and return the loss."""
        self.optimizer.zero_grad()
        outputs = [network(inputs) for network in self.networks]
        loss = self.loss(outputs, targets, weights)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def naive_outputs(networks: Sequence[nn.Module], inputs: Tensor) -> Tensor:
    """The mean of the networks' outputs (B, C)."""
    return torch.stack([network(inputs) for network in networks]).mean(dim=0)
