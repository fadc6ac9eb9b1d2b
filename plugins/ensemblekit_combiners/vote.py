"""A vote of the members."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ensemblekit import Combination, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss

TIE_BREAK = 1e-6
"""Added to the share of the winner: enough to be seen in float32, too little to be seen in a probability."""


class Vote(Combination):
    """The share of the members that predict a class; of classes with as many votes the more probable one wins.

    The more probable one has the higher mean probability over the members.
    """

    formula = "p_c = (1/M) sum_i 1{argmax h_i = c}"
    tasks = ("classification",)
    averages = "votes"

    @hookimpl
    def combine(self, outputs: Tensor, loss: Loss) -> Tensor:
        probabilities = loss.probabilities(outputs)
        classes = torch.arange(probabilities.shape[-1], device=outputs.device)
        votes = (probabilities.argmax(dim=-1, keepdim=True) == classes).sum(dim=0)
        tied = votes == votes.amax(dim=-1, keepdim=True)
        winner = probabilities.mean(dim=0).where(tied, -1).argmax(dim=-1, keepdim=True)
        shares = (votes.to(outputs.dtype) / len(outputs) + TIE_BREAK * (winner == classes)) / (1 + TIE_BREAK)
        return loss.from_probabilities(shares)
