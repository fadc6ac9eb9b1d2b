"""GNCL with an adaptive λ

The objective (1 - λ)/M sum_i l(h_i, y) + λ l(f, y), with f the mean output, rewards diversity more the larger λ is. How
large λ may be depends on the data: with too much of it, members specialise on training samples and are poor by
themselves. This recipe measures, after each epoch, how much smaller the loss of the mean output is than the members'
mean loss on the training data, (L - l(f, y)) / L. If that share exceeds `share`, λ falls by `step`, else it rises. The
rule is a heuristic; λ is part of every checkpoint. The objective is that of Buschjäger et al. 2020, Generalized
Negative Correlation Learning for Deep Ensembling; the harm of too much diversity was shown by Jeffares et al. 2023,
Joint Training of Deep Ensembles Fails Due to Learner Collusion.

```toml
[method]
name = "adaptive_gncl"
share = 0.2
step = 0.1
```
"""

from __future__ import annotations

from pydantic import Field, PrivateAttr

from ensemblekit import Method, hookimpl


class AdaptiveGNCL(Method):
    """Adapts the weight of the common objective to the diversity that it causes."""

    paper = "Buschjäger et al. 2020, Generalized Negative Correlation Learning for Deep Ensembling, eq. 5"
    formula = "(1 - λ_t)/M sum_i l(h_i, y) + λ_t l(f, y)"

    share: float = Field(0.2, gt=0, lt=1, description="diversity to aim at, as a share of the members' mean loss")
    step: float = Field(0.1, gt=0, le=1, description="change of λ after an epoch")

    _weight: float = PrivateAttr(0.0)

    def state(self):
        return {"weight": self._weight}

    def load_state(self, state):
        self._weight = state["weight"]

    @hookimpl
    def epoch_trained(self, ensemble):
        outputs, loss = ensemble.outputs(), ensemble.loss
        mean_member_loss = loss(outputs, ensemble.targets).mean()
        diversity = mean_member_loss - loss(outputs.mean(dim=0), ensemble.targets).mean()
        change = -self.step if bool(diversity > self.share * mean_member_loss) else self.step
        self._weight = min(1.0, max(0.0, self._weight + change))

    @hookimpl
    def member_loss(self, outputs, target, loss, num_members):
        return (1 - self._weight) / num_members * loss(outputs, target)

    @hookimpl
    def ensemble_loss(self, combined, target, loss):
        return self._weight * loss(combined, target)
