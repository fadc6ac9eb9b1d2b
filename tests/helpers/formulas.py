"""The objectives of every method, written a second time: loops over members, samples and pairs, one number at a time.

Nothing here uses ensemblekit. `h` is a list of M lists of B output vectors, `y` a list of B targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


def softmax(z: Tensor) -> Tensor:
    powers = torch.exp(z - z.detach().max())
    return powers / powers.sum()


def one_hot(y: Tensor, size: int) -> Tensor:
    return torch.tensor([float(c == int(y)) for c in range(size)], dtype=torch.float64)


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    return -torch.log(softmax(z)[int(y)])


def nll(z: Tensor, y: Tensor) -> Tensor:
    return -torch.log(z[int(y)])


def mse(z: Tensor, y: Tensor) -> Tensor:
    target = one_hot(y, len(z)) if not y.is_floating_point() else y.reshape(z.shape)
    return sum((z[c] - target[c]) ** 2 for c in range(len(z))) / 2


def exponential(z: Tensor, y: Tensor) -> Tensor:
    return torch.exp(-z[0] * (1 if y > 0 else -1))


def gaussian_hinge(z: Tensor, y: Tensor) -> Tensor:
    sign = 1 if y > 0 else -1
    return torch.exp(-(z[0] ** 2)) / math.sqrt(math.pi) - sign * z[0] * (1 + torch.erf(-sign * z[0]))


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "nll": nll,
    "mse": mse,
    "exponential": exponential,
    "gaussian_hinge": gaussian_hinge,
}


def soft_cross_entropy(z: Tensor, q: Tensor) -> Tensor:
    return -(q * torch.log(softmax(z))).sum()


def hessian(loss: Loss, z: Tensor, y: Tensor) -> Tensor:
    """The full C×C matrix of second derivatives, row by row, kept differentiable."""
    if not z.requires_grad:
        z = z.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(z, y), z, create_graph=True)
    rows = [torch.autograd.grad(part, z, create_graph=True, allow_unused=True)[0] for part in slope]
    return torch.stack([torch.zeros_like(z) if row is None else row for row in rows])


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * torch.log(p / q)).sum()


def psi(penalty: str, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    if penalty == "cross_entropy":
        return -soft_cross_entropy(a, softmax(b))
    if penalty == "kl":
        return (kl(softmax(a), softmax(b)) + kl(softmax(b), softmax(a))) / 2
    keep = [c for c in range(len(a)) if c != int(y)]
    p, q = softmax(a)[keep], softmax(b)[keep]
    return (p @ q) / torch.sqrt((p @ p) * (q @ q))


def mean_over_batch(per_sample: Callable[[list[Tensor], Tensor, int], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def objective(outputs: Tensor, target: Tensor) -> Tensor:
        values = [per_sample([h[n] for h in outputs], target[n], n) for n in range(len(target))]
        return sum(values) / len(values)  # type: ignore[return-value]

    return objective


def independent(loss: Loss, weights: Tensor | None = None):
    def per_sample(h, y, n):
        return sum((1.0 if weights is None else weights[n, i]) * loss(h[i], y) for i in range(len(h))) / len(h)

    return mean_over_batch(per_sample)


def gncl_upper(loss: Loss, lam: float):
    def per_sample(h, y, n):
        return lam * loss(sum(h) / len(h), y) + (1 - lam) / len(h) * sum(loss(z, y) for z in h)

    return mean_over_batch(per_sample)


def gncl_exact(loss: Loss, lam: float):
    def per_sample(h, y, n):
        f = sum(h) / len(h)
        matrix = hessian(loss, f, y)
        diversity = sum((z - f) @ matrix @ (z - f) for z in h)
        return sum(loss(z, y) for z in h) / len(h) - lam / (2 * len(h)) * diversity

    return mean_over_batch(per_sample)


def gncl_bounded(loss: Loss, lam: float):
    """Each member's term is the larger of the exact one and of the lower bound."""

    def per_sample(h, y, n):
        f = sum(h) / len(h)
        matrix = hessian(loss, f, y)
        exact = [loss(z, y) - lam / 2 * ((z - f) @ matrix @ (z - f)) for z in h]
        least = [(1 - lam) * loss(z, y) + lam / 2 * loss(f, y) for z in h]
        return sum(torch.maximum(a, b) for a, b in zip(exact, least, strict=True)) / len(h)

    return mean_over_batch(per_sample)


def end_to_end(loss: Loss):
    return mean_over_batch(lambda h, y, n: loss(sum(h) / len(h), y))


def ncl(lam: float):
    def per_sample(h, y, n):
        f = sum(h) / len(h)
        return sum(mse(z, y) - lam / 2 * (z - f) @ (z - f) for z in h) / len(h)

    return mean_over_batch(per_sample)


def divloss(loss: Loss, lambda1: float, lambda2: float):
    def per_sample(h, y, n):
        size = len(h)
        pairs = [(i, j) for i in range(size) for j in range(size) if i != j]
        between = sum(soft_cross_entropy(h[i], softmax(h[j])) for i, j in pairs)
        own = lambda1 / size * sum(loss(z, y) for z in h)
        return loss(sum(h) / size, y) + own - (lambda2 / (size * (size - 1)) * between if pairs else 0)

    return mean_over_batch(per_sample)


def diversity_cooperation(loss: Loss, lam: float, penalty: str):
    def per_sample(h, y, n):
        size = len(h)
        pairs = [(i, j) for i in range(size) for j in range(size) if i != j]
        between = sum(psi(penalty, h[i], h[j], y) for i, j in pairs)
        return sum(loss(z, y) for z in h) + (lam / (size - 1) * between if pairs else 0)

    return mean_over_batch(per_sample)


def smcl(loss: Loss, k: int):
    return mean_over_batch(lambda h, y, n: sum(sorted((loss(z, y) for z in h), key=Tensor.item)[:k]))


def boosting(loss: Loss, shrinkage: float):
    def per_sample(h, y, n):
        total, value = torch.zeros_like(h[0]), torch.zeros((), dtype=h[0].dtype)
        for z in h:
            total = total.detach() + shrinkage * z
            value = value + loss(total, y)
        return value

    return mean_over_batch(per_sample)


def soft_boosting(loss: Loss, shrinkage: float):
    def per_sample(h, y, n):
        total, value = torch.zeros_like(h[0]), torch.zeros((), dtype=h[0].dtype)
        for z in h:
            at = total if total.requires_grad else total.requires_grad_()
            (slope,) = torch.autograd.grad(loss(at, y), at, create_graph=True)
            value = value + (z + slope) @ (z + slope) / 2
            total = total + shrinkage * z
        return value

    return mean_over_batch(per_sample)


def last_stage(loss: Loss, shrinkage: float):
    return mean_over_batch(lambda h, y, n: loss(shrinkage * (sum(h[:-1]).detach() + h[-1] if len(h) > 1 else h[0]), y))


def snapshot(loss: Loss):
    return mean_over_batch(lambda h, y, n: loss(h[-1], y))
