"""Regression with a predicted variance

Each member predicts a mean m and the logarithm s of a variance for each target, and learns the negative log-likelihood
of a normal distribution, l = w/2 (s + (y - m)² e^(-s)). With w = 1 samples that are fitted badly get a large variance
and are then hardly learned from; w = e^(βs), constant in the gradient, corrects that. The ensemble is the mixture of
the members' distributions. Its mean is m̄, the mean of the m_i, and its variance is the mean of e^(s_i) + (m_i - m̄)²:
noise in the data plus disagreement of the members. Lakshminarayanan et al. 2017, Simple and Scalable Predictive
Uncertainty Estimation Using Deep Ensembles; Seitzer et al. 2022, On the Pitfalls of Heteroscedastic Uncertainty
Estimation with Probabilistic Neural Networks (β).

```toml
[data]
name = "diabetes"

[method]
name = "gaussian_mixture"

[training.loss]
name = "beta_gaussian"
beta = 0.5
```
"""

from __future__ import annotations

import torch
from pydantic import Field

from ensemblekit import Loss, Method, hookimpl

LIMIT = 20.0  # of |s|: no exponential overflows


class BetaGaussian(Loss):
    """Negative log-likelihood of a normal distribution with a predicted mean and variance."""

    paper = "Seitzer et al. 2022, On the Pitfalls of Heteroscedastic Uncertainty Estimation"
    formula = "l = e^(βs)/2 (s + (y - m)² e^(-s)), e^(βs) constant in the gradient"
    takes = "values"

    beta: float = Field(0.0, ge=0, le=1, description="0: the likelihood; 1: means learn as from the squared error")

    def num_outputs(self, info):
        return 2 * info.num_outputs

    def slices(self, num_outputs):
        return {"mean": num_outputs // 2, "log_variance": num_outputs // 2}

    def prepare(self, outputs, target):
        return target.reshape(len(target), -1).to(outputs.dtype)

    def per_sample(self, outputs, target):
        mean, log_variance = outputs.chunk(2, dim=-1)
        log_variance = log_variance.clamp(-LIMIT, LIMIT)
        losses = 0.5 * (log_variance + (target - mean).square() * (-log_variance).exp())
        return ((self.beta * log_variance.detach()).exp() * losses).sum(dim=-1)

    def point(self, outputs):
        return outputs.chunk(2, dim=-1)[0]

    def rescale(self, outputs, convert):
        mean, log_variance = outputs.chunk(2, dim=-1)
        unit = convert(torch.ones_like(mean)) - convert(torch.zeros_like(mean))
        return torch.cat([convert(mean), log_variance + 2 * unit.log()], dim=-1)


class GaussianMixture(Method):
    """Predicts mean and variance of the mixture of the members' normal distributions."""

    paper = "Lakshminarayanan et al. 2017, Simple and Scalable Predictive Uncertainty Estimation"
    formula = "m̄ = mean of m_i, variance = mean of e^(s_i) + (m_i - m̄)²"

    def required_outputs(self):
        return ("mean", "log_variance")

    @hookimpl
    def combine(self, named):
        mean = named["mean"].mean(dim=0)
        variance = (named["log_variance"].clamp(-LIMIT, LIMIT).exp() + (named["mean"] - mean).square()).mean(dim=0)
        return torch.cat([mean, variance.log()], dim=-1)
