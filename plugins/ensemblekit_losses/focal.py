"""The focal loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field

from ensemblekit import Loss

if TYPE_CHECKING:
    from torch import Tensor


class Focal(Loss):
    """Cross-entropy in which samples that are classified well already count less; for imbalanced classes.

    Its class probabilities are those of the softmax, which this loss makes less confident than cross-entropy does.
    """

    paper = "Lin et al. 2017, Focal Loss for Dense Object Detection, eq. 4"
    formula = "l(z, y) = - (1 - p_y)^gamma log p_y,  p = softmax(z)"

    gamma: float = Field(2.0, ge=0, description="how much less they count; 0 is cross-entropy")

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        logs = outputs.log_softmax(dim=-1)
        is_true = target.unsqueeze(-1) == torch.arange(outputs.shape[-1], device=outputs.device)
        log_true = torch.where(is_true, logs, 0).sum(dim=-1)
        # from the other classes' logits: 1 - p loses its digits, and (1 - p)^gamma its derivatives, where p is near 1
        log_rest = logs.masked_fill(is_true, -torch.inf).logsumexp(dim=-1)
        return -(self.gamma * log_rest).exp() * log_true
