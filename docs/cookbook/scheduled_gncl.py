"""GNCL with a scheduled λ

The weight λ of the ensemble's own loss moves linearly from `first` to `last` during training, from independent members
to end-to-end training or back: (1 - λ_t)/M sum_i l(h_i, y) + λ_t l(mean h, y). Buschjäger et al. 2020, Generalized
Negative Correlation Learning for Deep Ensembling, use a constant λ.

```toml
[method]
name = "scheduled_gncl"
first = 0.0
last = 0.8
```
"""

from __future__ import annotations

from pydantic import Field

from ensemblekit import Method, hookimpl


class ScheduledGNCL(Method):
    """Moves from independent members to a common objective."""

    paper = "Buschjäger et al. 2020, Generalized Negative Correlation Learning for Deep Ensembling, eq. 5"
    formula = "(1 - λ_t)/M sum_i l(h_i, y) + λ_t l(mean h, y)"

    first: float = Field(0.0, ge=0, le=1, description="λ at the start")
    last: float = Field(1.0, ge=0, le=1, description="λ at the end")

    def weight(self, progress):
        return self.first + (self.last - self.first) * progress

    @hookimpl
    def member_loss(self, outputs, target, loss, num_members, progress):
        return (1 - self.weight(progress)) / num_members * loss(outputs, target)

    @hookimpl
    def ensemble_loss(self, combined, target, loss, progress):
        return self.weight(progress) * loss(combined, target)
