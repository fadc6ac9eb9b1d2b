"""Adversarial training: members also learn from adversarial examples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from ensemblekit import Method, hookimpl

if TYPE_CHECKING:
    from torch import Tensor


class Adversarial(Method):
    """Trains every member on each batch and on an adversarial copy of it, perturbed to increase the member's loss."""

    paper = (
        "Lakshminarayanan et al. 2017, Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles, "
        "algorithm 1; Goodfellow et al. 2015, Explaining and Harnessing Adversarial Examples"
    )
    formula = "(1/M) sum_i [ l(h_i(x), y) + l(h_i(x'_i), y) ],  x'_i = x + epsilon sign(d l(h_i(x), y) / d x)"

    epsilon: float = Field(
        0.01,
        gt=0,
        description=(
            "size of the perturbation of each input value; the paper uses 1 % of the input range: 0.01 for images in "
            "[0, 1], or 0.01 / standard deviation of the channels (about 0.04) if they are normalised"
        ),
    )

    @hookimpl
    def second_inputs(self, inputs: Tensor, gradient: Tensor) -> Tensor:
        return inputs + self.epsilon * gradient.sign()
