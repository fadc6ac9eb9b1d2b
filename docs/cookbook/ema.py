"""A moving average of the weights (EMA)

Each member predicts with an exponential moving average of its weights, which is smoother than the last weights of
stochastic gradient descent: a_t = d_t a_(t-1) + (1 - d_t) w_t with d_t = min(d, 1 - 1/t), so that the first steps
count less and less. The model that is averaged is a parameter: any registered model, with its own parameters.
Polyak and Juditsky 1992, Acceleration of Stochastic Approximation by Averaging; Tarvainen and Valpola 2017, Mean
Teachers Are Better Role Models, average the weights in this form.

```toml
[model]
name = "ema"
model = { name = "mlp", hidden = [32] }
decay = 0.9
```
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn

from ensemblekit import Model


class EMA(Model):
    """A model whose predictions use a moving average of its weights."""

    paper = "Tarvainen and Valpola 2017, Mean Teachers Are Better Role Models"
    formula = "a_t = d_t a_(t-1) + (1 - d_t) w_t, d_t = min(d, 1 - 1/t)"

    model: Model = Field(description="the model whose weights are averaged")
    decay: float = Field(0.99, ge=0, lt=1, description="share d of the former average that a step keeps")

    def extra_outputs(self, input_shape):
        return self.model.extra_outputs(input_shape)

    def build(self, input_shape, num_outputs):
        return Averaged(self.model.build(input_shape, num_outputs), self.decay)


class Averaged(nn.Module):
    """A network that learns its weights and, in evaluation mode, computes with their average."""

    def __init__(self, network, decay):
        super().__init__()
        self.network, self.decay = network, decay
        self.register_buffer("steps", torch.zeros(()))
        for index, weight in enumerate(network.parameters()):
            self.register_buffer(f"average_{index}", weight.detach().clone())

    def forward(self, inputs):
        weights = dict(self.network.named_parameters())
        averages = {name: getattr(self, f"average_{index}") for index, name in enumerate(weights)}
        if not self.training:
            return torch.func.functional_call(self.network, averages, (inputs,))
        self.steps.add_(1)
        share = (1 / self.steps).clamp(min=1 - self.decay)
        for name, average in averages.items():
            average.add_(share * (weights[name].detach() - average))
        return self.network(inputs)
