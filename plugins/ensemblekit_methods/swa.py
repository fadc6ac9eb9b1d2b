"""Stochastic weight averaging: each member predicts with the mean of its weights over the end of training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field, PrivateAttr

from ensemblekit import Method, Problem, hookimpl
from ensemblekit_methods.conflicts import conflicts

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import GrowingEnsemble, Spec

CONFLICTING_HOOKS = {
    "members_at_start": "adds members during training",
    "epoch_started": "changes the ensemble during training too",
    "epoch_trained": "changes the ensemble during training too",
    "combine": "combines the members in its own way, also while both they and their averages are there",
}
"""What other methods cannot do beside this one, and why."""


class SWA(Method):
    """Averages each member's weights over the last part of training; the averages predict.

    Up to the share `start` of the epochs, members are trained as without it. Then the weights at the end of that epoch
    and of every further `every` epochs are averaged, while training goes on. The average is a frozen copy just before
    its member, and its batch-norm statistics are computed anew from the training data. As long as both are there,
    `combine` uses the copies alone; after the last epoch the members themselves are removed. The learning rate follows
    the spec's schedule: a constant or cyclic one explores, with one that falls to 0 there is little to average.
    """

    paper = "Izmailov et al. 2018, Averaging Weights Leads to Wider Optima and Better Generalization, algorithm 1"
    formula = "(1/M) sum_i l(h_i, y);  weights in predictions: (1/n) sum_t w_i(t), t = start, start + every, …"
    needs_frozen_members = False

    start: float = Field(0.75, ge=0, lt=1, description="share of the epochs after which averaging begins")
    every: int = Field(1, ge=1, description="epochs between two weights that are averaged")

    _copies: int = PrivateAttr(0)
    """The number of averages that are beside their members."""

    def state(self) -> Mapping[str, int]:
        return {"copies": self._copies}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._copies = state["copies"]

    def averaged_epochs(self, num_epochs: int) -> range:
        """Return the epochs, counted from 1, at whose end weights are averaged."""
        # rounded, since 0.55 · 100 is a little more than 55
        return range(max(1, math.ceil(round(self.start * num_epochs, 9))), num_epochs + 1, self.every)

    @hookimpl
    def combine(self, outputs: Tensor) -> Tensor | None:
        if not self._copies or len(outputs) != 2 * self._copies:
            return None  # the members in training, or the averages at the end
        return outputs[::2].mean(dim=0)

    @hookimpl
    def epoch_trained(self, ensemble: GrowingEnsemble, epoch: int, num_epochs: int, num_members: int) -> None:
        epochs = self.averaged_epochs(num_epochs)
        if epoch in epochs:
            number = epochs.index(epoch)
            for member in range(num_members):
                average = 2 * member
                if number == 0:
                    ensemble.keep_copy(average)
                else:
                    ensemble.blend(average, average + 1, 1 / (number + 1))
                ensemble.refresh_statistics(average)
            self._copies = num_members
        if epoch == num_epochs:
            for member in range(num_members):
                ensemble.drop(member + 1)
            self._copies = 0

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        epochs = spec.training.epochs
        if len(self.averaged_epochs(epochs)) < 2:
            what = f"with {epochs} epochs, weights would be taken only once, so that there is nothing to average"
            yield Problem("start", what, "train longer, or lower start or every")
        yield from conflicts(self, spec, CONFLICTING_HOOKS)
