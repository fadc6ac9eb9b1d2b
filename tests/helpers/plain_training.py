"""A member's training in plain torch, with the batches, the initial weights and the learning rate of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import ensemblekit as ek
from ensemblekit.members.build import build_member


def train_plainly(
    run: ek.Run,
    member: int,
    epochs: Iterable[int],
    weights: Tensor | None = None,
    factor: float = 1.0,
    after_epoch: Callable[[int, nn.Module], None] = lambda epoch, network: None,
) -> nn.Module:
    """Train one member of a run anew by stochastic gradient descent with cross-entropy.

    Args:
        run: a run with the optimizer "sgd" and a constant learning rate.
        member: its index.
        epochs: the epochs of the run, counted from 1.
        weights: of the training samples (N,).
        factor: of the loss.
        after_epoch: called with each epoch and the network.

    Returns:
        The network.
    """
    data, settings = ek.load_data(run.spec.data, run.spec.seed), run.spec.training
    network = build_member(run.spec.model, data.info.input_shape, data.info.num_outputs, run.spec.seed, member).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=run.spec.optimizer.learning_rate)
    for epoch in epochs:
        for batch in data.train.training_batches(settings.batch_size, run.spec.seed, epoch):
            losses = nn.functional.cross_entropy(network(batch.inputs), batch.targets, reduction="none")
            if weights is not None:
                losses = losses * weights[batch.index]
            optimizer.zero_grad()
            (factor * losses.mean()).backward()
            optimizer.step()
        after_epoch(epoch, network)
        network.train()
    return network
