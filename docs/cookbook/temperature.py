"""Temperature scaling

The mean output f of the members is divided by a temperature, p = softmax(f / T), where T > 0 minimises the negative
log-likelihood of the validation data. Predictions stay the same, and probabilities become calibrated: T > 1 if the
ensemble was too confident. The likelihood is concave in 1/T, so that the zero of its slope is found by bisection. Guo
et al. 2017, On Calibration of Modern Neural Networks; Rahaman and Thiery 2021, Uncertainty Quantification and Deep
Ensembles, show that outputs should be averaged first and calibrated afterwards, as here.

```toml
[method]
name = "temperature"
```
"""

from __future__ import annotations

import torch
from pydantic import Field

from ensemblekit import Method, Problem, hookimpl


class Temperature(Method):
    """Divides the mean output by a temperature that is fitted on validation data."""

    paper = "Guo et al. 2017, On Calibration of Modern Neural Networks"
    formula = "p = softmax(f / T), T = argmin of the validation data's negative log-likelihood"

    limit: float = Field(50.0, gt=1, description="largest temperature; its inverse is the smallest")

    @hookimpl
    def combine(self, outputs, fitted):
        mean = outputs.mean(dim=0)
        return mean if fitted is None else mean / fitted

    @hookimpl
    def fit_combiner(self, outputs, target):
        mean = outputs.mean(dim=0)
        true = mean.gather(1, target.unsqueeze(1)).squeeze(1)
        high = mean.new_tensor(self.limit).log()
        low = -high
        for _ in range(50):
            middle = (low + high) / 2  # a logarithm of T
            expected = ((mean / middle.exp()).softmax(dim=1) * mean).sum(dim=1)
            is_too_confident = (expected - true).mean() > 0  # the slope of the loss in 1/T
            low, high = torch.where(is_too_confident, middle, low), torch.where(is_too_confident, high, middle)
        return middle.exp()

    def check_spec(self, spec):
        if spec.loss.takes != "logits":
            yield Problem("/training.loss", "a temperature needs outputs that are logits", 'use "cross_entropy"')
