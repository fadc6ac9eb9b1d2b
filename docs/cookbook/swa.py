"""Stochastic weight averaging (SWA)

After the share `start` of the epochs, the weights of each member at the end of every epoch are averaged, and the
average predicts: it lies in the middle of a flat region that stochastic gradient descent wanders around. The average is
a frozen copy just before its member, moved towards it by 1/n after the n-th of these epochs; at the end its batch-norm
statistics are computed anew, and the members are removed. In evaluations before that, both predict. The built-in method
`swa` has more settings. Izmailov et al. 2018, Averaging Weights Leads to Wider Optima and Better Generalization.

```toml
[method]
name = "own_swa"
start = 0.5

[training]
epochs = 4
```
"""

from __future__ import annotations

import math

from pydantic import Field

from ensemblekit import Method, hookimpl


class OwnSwa(Method):
    """Each member predicts with the mean of its last weights."""

    paper = "Izmailov et al. 2018, Averaging Weights Leads to Wider Optima and Better Generalization"
    formula = "(1/M) sum_i l(h_i, y);  weights in predictions: (1/n) sum_t w_i(t)"
    needs_frozen_members = False

    start: float = Field(0.75, ge=0, lt=1, description="share of the epochs before the weights are averaged")

    @hookimpl
    def epoch_trained(self, ensemble, epoch, num_epochs, num_members):
        number = epoch - math.floor(self.start * num_epochs)  # 1 at the end of the first epoch that counts
        for member in range(num_members if number > 0 else 0):
            if number == 1:
                ensemble.keep_copy(2 * member)
            ensemble.blend(2 * member, 2 * member + 1, 1 / number)
        for member in range(num_members if epoch == num_epochs else 0):
            ensemble.drop(member + 1)
            ensemble.refresh_statistics(member)
