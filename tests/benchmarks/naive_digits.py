"""The training of specs/digits.toml as a hand-written script: no engine, no checkpoints, nothing of this project.

``python tests/benchmarks/naive_digits.py --members 8`` prints the accuracy of the ensemble after the last epoch.
"""

from __future__ import annotations

import argparse

import torch
from adabelief_pytorch import AdaBelief
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

NUM_TRAIN, NUM_VALIDATION = 1298, 144
LAMBDA = 0.5


def mlp() -> nn.Module:
    """64-64-64-10 with batch norm."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()),
        *(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)),
    )


def main() -> None:
    """Train, evaluate after every epoch, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    source = load_digits()
    images = torch.from_numpy(source.images).float().unsqueeze(1) / 16
    order = torch.randperm(len(images))
    images, classes = images[order], torch.from_numpy(source.target).long()[order]
    train, validation, test = (
        TensorDataset(images[part], classes[part])
        for part in (
            slice(NUM_TRAIN),
            slice(NUM_TRAIN, NUM_TRAIN + NUM_VALIDATION),
            slice(NUM_TRAIN + NUM_VALIDATION, None),
        )
    )
    networks = [mlp() for _ in range(options.members)]
    parameters = [parameter for network in networks for parameter in network.parameters()]
    optimizer = AdaBelief(parameters, lr=1e-2, eps=1e-12, print_change_log=False)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    loader = DataLoader(train, batch_size=64, shuffle=True)
    for epoch in range(options.epochs):
        for network in networks:
            network.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = [network(inputs) for network in networks]
            members = sum(cross_entropy(output, targets) for output in outputs) / len(networks)
            joint = cross_entropy(sum(outputs) / len(networks), targets)
            (LAMBDA * joint + (1 - LAMBDA) * members).backward()
            optimizer.step()
        schedule.step()
        accuracies = [accuracy(networks, part) for part in (validation, test)]
        print(f"epoch {epoch + 1}: validation {accuracies[0]:.4f}, test {accuracies[1]:.4f}")


def accuracy(networks: list[nn.Module], samples: TensorDataset) -> float:
    """Accuracy of the mean output."""
    correct = 0
    with torch.no_grad():
        for network in networks:
            network.eval()
        for inputs, targets in DataLoader(samples, batch_size=64):
            mean = sum(network(inputs) for network in networks) / len(networks)
            correct += int((mean.argmax(dim=1) == targets).sum())
    return correct / len(samples)


if __name__ == "__main__":
    main()
