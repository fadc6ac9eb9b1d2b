"""The contract of a loss: one number per sample, of that sample alone, with the derivatives that it claims."""

from __future__ import annotations

from functools import cached_property, partial

import torch
from torch import Tensor

from ensemblekit.core.losses import Loss
from ensemblekit.core.seeds import generator
from ensemblekit.testing.checks import Check, ContractError, difference, form, look_at, on_meta_too
from ensemblekit.testing.numeric_gradients import derivatives

MEMBERS, BATCH, CLASSES = 2, 4, 3
STEP = 1e-3


class LossBench:
    """A loss, outputs of what it takes, and targets for them."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.loss_class = type(loss)

    @cached_property
    def outputs(self) -> Tensor:
        """(M, B, C), float64."""
        size = 1 if self.loss.takes == "margins" else CLASSES
        outputs = torch.randn(MEMBERS, BATCH, size, generator=generator(0, "contract", "outputs"), dtype=torch.float64)
        return outputs.softmax(dim=-1) if self.loss.takes == "probabilities" else outputs

    @cached_property
    def target(self) -> Tensor:
        random = generator(0, "contract", "target")
        if self.loss.takes == "values":
            return torch.randn(BATCH, CLASSES, generator=random, dtype=torch.float64)
        return torch.randint(2 if self.loss.takes == "margins" else CLASSES, (BATCH,), generator=random)


def loss_checks(loss: Loss) -> list[Check]:
    """The checks of a loss besides those of any plugin."""
    bench = LossBench(loss)
    first = Check("it is per sample, of any dtype and device", loss, partial(per_sample, bench))
    claims = {
        "a sample's loss does not depend on the others": independent_samples,
        "its gradients are right and finite": gradients,
        "its second derivative is what it declares": second_derivative,
        "its probabilities sum to one": probabilities,
    }
    return [first, *(Check(name, loss, partial(function, bench), (first,)) for name, function in claims.items())]


def per_sample(bench: LossBench) -> None:
    """(B, C) → (B,) and (M, B, C) → (M, B), never reduced."""
    for device in ("cpu", "meta"):
        for dtype in (torch.float32, torch.float64):
            target = bench.target.to(device)
            target = target.to(dtype) if target.is_floating_point() else target
            for outputs in (bench.outputs.to(device, dtype), bench.outputs[0].to(device, dtype)):
                expected = torch.empty(outputs.shape[:-1], dtype=dtype, device=device)
                with on_meta_too(device, bench.loss_class, "per_sample"):
                    found = bench.loss(outputs, target)
                if form(found) != form(expected):
                    raise ContractError(
                        f"{form(expected)} for outputs of {form(outputs)}",
                        form(found),
                        look_at(bench.loss_class, "per_sample"),
                        "reduce over the last dimension only, with the outputs' dtype and device",
                    )


def independent_samples(bench: LossBench) -> None:
    """The diversity term differentiates the sum of all losses and takes it apart again."""
    together = bench.loss(bench.outputs, bench.target)
    alone = [bench.loss(bench.outputs[:, [place]], bench.target[[place]]) for place in range(BATCH)]
    if wrong := difference(torch.cat(alone, dim=-1), together, 1e-9):
        where = look_at(bench.loss_class, "per_sample")
        raise ContractError("the losses of a batch when its samples come one by one", wrong, where)


def gradients(bench: LossBench) -> None:
    """Autograd against central differences."""
    where = look_at(bench.loss_class, "per_sample")
    analytical, numerical = derivatives(lambda outputs: bench.loss(outputs, bench.target).sum(), bench.outputs)
    if not bool(analytical.isfinite().all()):
        raise ContractError("finite gradients", f"{int((~analytical.isfinite()).sum())} that are not", where)
    if wrong := difference(analytical, numerical, 1e-5):
        raise ContractError("the gradient that central differences give, in float64", wrong, where)


def second_derivative(bench: LossBench) -> None:
    """`quadratic_form`, which exact GNCL and the diversity of every report use, against differences."""
    if not bench.loss.twice_differentiable:
        return
    at, target = bench.outputs[0], bench.target
    direction = torch.randn(at.shape, generator=generator(0, "contract", "direction"), dtype=at.dtype)
    if bench.loss.takes == "probabilities":
        direction = (direction - direction.mean(dim=-1, keepdim=True)) / 20  # stays among probabilities
    found = bench.loss.quadratic_form(at, target, direction)
    ahead, here, behind = (bench.loss(at + step * direction, target) for step in (STEP, 0.0, -STEP))
    if wrong := difference(found, (ahead - 2 * here + behind) / STEP**2, 1e-4):
        declared = bench.loss_class.quadratic_form is not Loss.quadratic_form
        raise ContractError(
            "the second derivative along a direction that differences give",
            wrong,
            look_at(bench.loss_class, "quadratic_form" if declared else "per_sample"),
            "mend quadratic_form(), or remove it; twice_differentiable = False if there is none",
        )


def probabilities(bench: LossBench) -> None:
    """For a loss of classes, what a network's outputs say of each class."""
    if bench.loss.takes == "values":
        return
    found = bench.loss.probabilities(bench.outputs)
    classes = 2 if bench.loss.takes == "margins" else CLASSES
    where = look_at(bench.loss_class, "probabilities")
    if form(found) != form(torch.empty(MEMBERS, BATCH, classes, dtype=bench.outputs.dtype)):
        raise ContractError(f"probabilities of shape (..., {classes})", form(found), where)
    if bool((found < 0).any()) or difference(found.sum(dim=-1), torch.ones_like(found[..., 0]), 1e-9):
        got = f"sums from {float(found.sum(-1).min()):.4g} to {float(found.sum(-1).max()):.4g}"
        raise ContractError(
            "probabilities of at least 0 that sum to 1", f"{got}, least {float(found.min()):.4g}", where
        )
