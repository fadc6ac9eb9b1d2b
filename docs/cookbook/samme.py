"""AdaBoost for several classes (SAMME)

Members are trained one after the other. When one is finished, its weighted error err on the training data gives it a
vote alpha = log((1 - err) / err) + log(C - 1), and the samples that it gets wrong get more weight, w exp(alpha), for
the next one. The hook `epoch_trained` asks for the outputs on the training data and sets the weights. The votes are the
state of the method, so that they are in checkpoints and in the trained model. The built-in method `adaboost` has both
variants of the paper. Zhu et al. 2009, Multi-class AdaBoost.

```toml
[method]
name = "own_samme"

[training]
epochs = 6
```
"""

from __future__ import annotations

import torch
from pydantic import PrivateAttr

from ensemblekit import Method, Problem, hookimpl


class OwnSamme(Method):
    """Each member concentrates on the mistakes of those before it."""

    paper = "Zhu et al. 2009, Multi-class AdaBoost, algorithm 2"
    formula = "w l(h_m, y);  alpha_m = log((1 - err_m) / err_m) + log(C - 1),  w <- w exp(alpha_m 1{wrong})"
    needs_frozen_members = False
    _votes: torch.Tensor = PrivateAttr(default_factory=lambda: torch.zeros(0))

    def state(self):
        return {"votes": self._votes}

    def load_state(self, state):
        self._votes = state["votes"]

    @hookimpl
    def combine(self, outputs, loss):
        votes = self._votes[: len(outputs)].to(outputs)  # the member in training, the last one, has none
        if len(votes) < 2:
            return None
        chosen = loss.probabilities(outputs[: len(votes)]).argmax(dim=-1)
        shares = torch.einsum("m,mbc->bc", votes, torch.nn.functional.one_hot(chosen, outputs.shape[-1]).to(outputs))
        return loss.from_probabilities((shares + 1e-7) / (shares + 1e-7).sum(dim=-1, keepdim=True))

    @hookimpl
    def members_at_start(self):
        return 1

    @hookimpl
    def epoch_started(self, ensemble, epoch, num_epochs, num_members):
        if (epoch - 1) * num_members // num_epochs == len(ensemble):
            ensemble.freeze(len(ensemble) - 1)
            ensemble.grow()

    @hookimpl
    def epoch_trained(self, ensemble, epoch, num_epochs, num_members):
        if epoch * num_members // num_epochs == len(ensemble):
            outputs, before = ensemble.outputs()[-1], ensemble.sample_weights
            wrong = (outputs.argmax(dim=-1) != ensemble.targets).to(outputs)
            weights = torch.ones_like(wrong) if before is None else before[:, 0]
            error = (weights * wrong).sum() / weights.sum()
            vote = ((1 - error) / error.clamp_min(0.5 / len(wrong)) * (outputs.shape[-1] - 1)).log().clamp_min(0)
            weights = weights * (vote * wrong).exp()
            self._votes = torch.cat([self._votes, vote.cpu().view(1)])
            ensemble.set_sample_weights((weights / weights.mean()).unsqueeze(1).expand(-1, num_members))

    def check_data(self, spec, info):
        if info.task != "classification" or spec.training.epochs < spec.ensemble.members:
            yield Problem("", "needs classes, and an epoch for each member", "use other data, or train longer")
