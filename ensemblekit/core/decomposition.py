"""The generalised bias-variance decomposition of the ensemble's loss (Buschjäger et al. 2020, eq. 3)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ensemblekit.core.html_tables import html_table
from ensemblekit.core.losses import Loss


@dataclass(frozen=True)
class Decomposition:
    """ensemble_loss = mean_member_loss - diversity + remainder, each the mean over the samples (0-dim tensors)."""

    ensemble_loss: Tensor
    mean_member_loss: Tensor
    diversity: Tensor
    remainder: Tensor
    remainder_bound: Tensor | None
    """An upper bound of \\|remainder\\|; None if the loss has no bound on its third derivative."""

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        terms = {"ensemble loss": self.ensemble_loss, "= mean member loss": self.mean_member_loss}
        terms |= {"− diversity": self.diversity, "+ remainder": self.remainder}
        if self.remainder_bound is not None:
            terms["bound on |remainder|"] = self.remainder_bound
        return html_table([(name, "" if term.is_meta else f"{float(term):.6g}") for name, term in terms.items()])


def quadratic_diversity(outputs: Tensor, center: Tensor, target: Tensor, loss: Loss) -> Tensor:
    """Compute ½ dᵀ D d (M, B) of each member: d = outputs - center (M, B, C), D the Hessian at `center` (B, C)."""
    return 0.5 * loss.quadratic_form(center, target, outputs - center)


def decompose(outputs: Tensor, target: Tensor, loss: Loss) -> Decomposition:
    """Compute the four terms of eq. 3 for member outputs (M, B, C), and the bound on the remainder.

    The centre is the mean of the outputs, however a method combines them: only there the linear term vanishes.
    """
    center = outputs.mean(dim=0)
    ensemble_loss = loss(center, target)
    mean_member_loss = loss(outputs, target).mean(dim=0)
    diversity = quadratic_diversity(outputs, center, target, loss).mean(dim=0)
    third = loss.third_derivative_bound(center.expand_as(outputs), outputs, target)
    bound = None
    if third is not None:
        # Taylor's remainder: |R_i| ≤ 1/6 · max|l'''| · ‖d_i‖₁³ for each member
        bound = (third / 6 * (outputs - center).abs().sum(dim=-1) ** 3).mean()
    return Decomposition(
        ensemble_loss=ensemble_loss.mean(),
        mean_member_loss=mean_member_loss.mean(),
        diversity=diversity.mean(),
        remainder=(ensemble_loss - mean_member_loss + diversity).mean(),
        remainder_bound=bound,
    )
