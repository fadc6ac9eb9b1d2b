"""Outputs and targets for each of the built-in losses."""

from __future__ import annotations

import torch
from torch import Tensor

from ensemblekit.core.losses import MSE, NLL, CrossEntropy, Exponential, GaussianHinge, Loss

GENERATOR = torch.Generator().manual_seed(0)
B, C = 6, 4
LOGITS = torch.randn(B, C, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(C, (B,), generator=GENERATOR)
MARGINS = torch.randn(B, 1, generator=GENERATOR, dtype=torch.float64)
SIGNS = torch.tensor([1, -1, 1, 1, -1, -1])


def inputs(loss: Loss) -> tuple[Tensor, Tensor]:
    if loss.takes == "margins":
        return MARGINS, SIGNS
    return (LOGITS.softmax(-1) if loss.takes == "probabilities" else LOGITS), CLASSES


LOSSES = [MSE(), NLL(), CrossEntropy(), Exponential(), GaussianHinge()]


def by_name(loss: Loss) -> str:
    return loss.name
