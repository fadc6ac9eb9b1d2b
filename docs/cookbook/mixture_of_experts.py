"""A mixture of experts

A gate, which is a network of its own, says how far each member is to be trusted for an input. Members and gate together
maximise the likelihood of the mixture, so that each member becomes an expert for the inputs that the gate assigns to
it: -log sum_i g_i(x) p_i(y | x), with g the softmax of the gate's outputs. The mixture is computed in logarithms, where
small probabilities do not underflow. Jacobs et al. 1991, Adaptive Mixtures of Local Experts.

```toml
[method]
name = "mixture_of_experts"

[[ensemble.groups]]
members = 4

[[ensemble.groups]]
name = "gate"
role = "auxiliary"
model = { name = "mlp", hidden = [16] }
```
"""

from __future__ import annotations

from ensemblekit import Method, Problem, hookimpl


class MixtureOfExperts(Method):
    """Members become experts for the inputs that a gate assigns to them."""

    paper = "Jacobs et al. 1991, Adaptive Mixtures of Local Experts"
    formula = "-log sum_i g_i(x) p_i(y | x)"

    def required_groups(self):
        return {"gate": "members"}

    @hookimpl
    def combine(self, outputs, auxiliary, loss):
        shares = auxiliary["gate"].mean(dim=0).log_softmax(dim=-1)  # (B, M)
        return (shares.T.unsqueeze(-1) + loss.log_probabilities(outputs)).logsumexp(dim=0)

    @hookimpl
    def member_loss(self, outputs):
        return outputs.new_zeros(outputs.shape[:2])

    @hookimpl
    def ensemble_loss(self, combined, target, loss):
        return loss(combined, target)

    def check_spec(self, spec):
        if spec.loss.name != "cross_entropy":
            yield Problem("/training.loss", "the mixture is one of class probabilities", 'use "cross_entropy"')
