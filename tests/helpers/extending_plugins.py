"""Methods and models that use every extension point, each as short as it can be, with a spec for each."""

from __future__ import annotations

import torch
from torch import nn

from ensemblekit import Family, Method, Model, hookimpl


class Anchored(Method):
    """Pulls each member towards the weights it started with."""

    strength: float = 0.1

    @hookimpl
    def weight_penalty(self, weights, start):
        return self.strength * (weights - start).square().sum(dim=1)


class Sharp(Method):
    """Takes the gradient a little uphill."""

    radius: float = 0.05

    @hookimpl
    def second_weights(self, weights, gradient):
        return weights + self.radius * gradient / gradient.norm(dim=1, keepdim=True).clamp_min(1e-12)


class OwnColumns(Method):
    """Shows each member a random half of the pixels, always the same ones."""

    @hookimpl
    def member_inputs(self, inputs, uniform):
        keep = uniform(*inputs.shape[1:], fixed=True) < 0.5
        return inputs * keep.unsqueeze(1)


class Noisy(Method):
    """Adds noise to each member's inputs in training."""

    @hookimpl
    def member_inputs(self, inputs, uniform, training):
        return inputs + 0.1 * uniform(*inputs.shape) if training else None


class Gate(Method):
    """Mixes the members by the probabilities of a gate."""

    @hookimpl
    def combine(self, outputs, auxiliary):
        shares = auxiliary["gate"].mean(dim=0).softmax(dim=-1)  # (B, M)
        return (shares.T.unsqueeze(-1) * outputs).sum(dim=0)

    @hookimpl
    def ensemble_loss(self, combined, target, loss):
        return loss(combined, target)


class Student(Method):
    """Trains a student on the members' mean; it alone predicts."""

    def predictor(self):
        return "student"

    @hookimpl
    def ensemble_loss(self, outputs, auxiliary, loss):
        teacher = loss.probabilities(outputs.detach()).mean(dim=0)
        return -(teacher * loss.log_probabilities(auxiliary["student"])).sum(dim=-1).mean(dim=0)


class Features(Model):
    """A network that also gives its hidden layer."""

    hidden: int = 6

    def extra_outputs(self, input_shape):
        return {"features": self.hidden}

    def build(self, input_shape, num_outputs):
        return _Features(torch.Size(input_shape).numel(), self.hidden, num_outputs)


class _Features(nn.Module):
    def __init__(self, size, hidden, num_outputs):
        super().__init__()
        self.first, self.last = nn.Linear(size, hidden), nn.Linear(hidden, num_outputs)

    def forward(self, inputs):
        features = self.first(inputs.flatten(1)).relu()
        return torch.cat([self.last(features), features], dim=-1)


class Decorrelated(Method):
    """Punishes members whose features are alike."""

    @hookimpl
    def ensemble_loss(self, named, num_members):
        features = nn.functional.normalize(named["features"], dim=-1)
        similar = torch.einsum("ibk,jbk->ijb", features, features).sum(dim=(0, 1))
        return 0.1 * similar / num_members**2


class Heads(Family):
    """A shared layer with a head for each member."""

    def build_family(self, input_shape, num_outputs, num_members):
        return _Heads(torch.Size(input_shape).numel(), num_outputs, num_members)


class _Heads(nn.Module):
    def __init__(self, size, num_outputs, num_members):
        super().__init__()
        self.trunk = nn.Linear(size, 8)
        self.heads = nn.Parameter(torch.randn(num_members, 8, num_outputs) / 3)

    def forward(self, inputs):
        return torch.einsum("bi,kio->kbo", self.trunk(inputs.flatten(1)).relu(), self.heads)


class Weighted(Method):
    """Doubles the weights of wrong samples after each epoch, and remembers how often."""

    _rounds: int = 0

    def state(self):
        return {"rounds": self._rounds, "history": torch.arange(self._rounds, dtype=torch.float32)}

    def load_state(self, state):
        self._rounds = state["rounds"]
        assert state["history"].tolist() == list(range(self._rounds))

    @hookimpl
    def epoch_trained(self, ensemble, num_members):
        wrong = (ensemble.outputs().argmax(dim=-1) != ensemble.targets).float().T
        before = ensemble.sample_weights
        before = torch.ones(len(ensemble.targets), num_members) if before is None else before
        ensemble.set_sample_weights(before * (1 + wrong / (1 + self._rounds)))
        self._rounds += 1


class Averaged(Method):
    """Keeps a running mean of each member's weights, which predicts in the end."""

    needs_frozen_members = False

    @hookimpl
    def epoch_trained(self, ensemble, epoch, num_epochs, num_members):
        if epoch == 1:
            for member in range(num_members):
                ensemble.keep_copy(2 * member)
        for member in range(num_members):
            ensemble.blend(2 * member, 2 * member + 1, 1 / epoch)
        if epoch == num_epochs:
            for member in range(num_members):
                ensemble.drop(member + 1)
                ensemble.refresh_statistics(member)


PLUGINS = [Anchored, Sharp, OwnColumns, Noisy, Gate, Student, Features, Decorrelated, Heads, Weighted, Averaged]
GATE = {"role": "auxiliary", "name": "gate", "model": {"name": "mlp", "hidden": [4]}}
STUDENT = {"role": "auxiliary", "name": "student", "outputs": 10, "model": {"name": "mlp", "hidden": [8]}}
CASES = {
    "anchored": {"method": {"name": "anchored"}},
    "sharp": {"method": {"name": "sharp"}},
    "sharp with gncl": {"method": [{"name": "gncl"}, {"name": "sharp"}]},
    "own columns": {"method": {"name": "own_columns"}},
    "noisy": {"method": {"name": "noisy"}},
    "noisy adversarial": {"method": [{"name": "adversarial"}, {"name": "noisy"}]},
    "gate": {"method": {"name": "gate"}, "ensemble": {"members": 3, "groups": [GATE]}},
    "student": {"method": {"name": "student"}, "ensemble": {"members": 3, "groups": [STUDENT]}},
    "features": {"method": {"name": "decorrelated"}, "model": {"name": "features"}},
    "family": {"model": {"name": "heads"}, "method": {"name": "gncl"}},
    "family independent": {"model": {"name": "heads"}, "method": {"name": "bagging"}},
    "family and network": {
        "method": {"name": "gncl"},
        "ensemble": {"groups": [{"members": 2, "model": {"name": "heads"}}, {"members": 1}]},
    },
    "weighted": {"method": {"name": "weighted"}},
    "averaged": {"method": {"name": "averaged"}},
    "own settings": {
        "ensemble": {
            "groups": [
                {"members": 2, "optimizer": {"lr": 0.002}, "loss": {"label_smoothing": 0.1}},
                {"members": 1, "model": {"dropout": 0.5}},
            ]
        },
    },
}
