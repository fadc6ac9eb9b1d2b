"""Divergences between pairs of members, summed over all other members in time and memory linear in M.

Every function maps logits (M, B, C) to (M, B): for member i, the sum over all j ≠ i, without a loop over pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy_to_others(outputs: Tensor) -> Tensor:
    """Σ_j≠i CE(h_i, softmax(h_j)): the cross-entropy is linear in its target, so the targets are summed first."""
    log_p = outputs.log_softmax(dim=-1)
    p = log_p.exp()
    return -((p.sum(dim=0) - p) * log_p).sum(dim=-1)


def symmetric_kl_to_others(outputs: Tensor) -> Tensor:
    """Σ_j≠i ½ [KL(p_i, p_j) + KL(p_j, p_i)] = ½ Σ_j (p_i - p_j)·(log p_i - log p_j); the term j = i is zero."""
    log_p = outputs.log_softmax(dim=-1)
    p = log_p.exp()
    # Centred first: the products below cancel and would lose digits if all members shared a large offset.
    log_p = log_p - log_p.mean(dim=0)
    negative_entropy = (p * log_p).sum(dim=-1)
    cross_terms = negative_entropy.sum(dim=0) - (p.sum(dim=0) * log_p).sum(dim=-1)
    return 0.5 * (len(outputs) * negative_entropy + cross_terms)


def cosine_to_others(outputs: Tensor, target: Tensor) -> Tensor:
    """Σ_j≠i cos(p̂_i, p̂_j), p̂ the probabilities without the true class; `target` holds class indices (B,)."""
    true_class = torch.arange(outputs.shape[-1], device=outputs.device) == target.unsqueeze(-1)
    # The cosine ignores scale, so the probabilities may be renormalised over the wrong classes; then their norm cannot
    # vanish when a member is certain of the true class.
    wrong = outputs.masked_fill(true_class, -torch.inf).softmax(dim=-1)
    unit = wrong / wrong.norm(dim=-1, keepdim=True)
    return (unit * (unit.sum(dim=0) - unit)).sum(dim=-1)
