"""A student of the ensemble

While the members learn the labels, a student learns from the labels and from the members' mean probabilities p at a
temperature T: (1/M) sum_i l(h_i, y) + (1 - a) l(z, y) + a T² KL(p_T, softmax(z / T)) for the outputs z of the student.
Only the student is kept, and predictions cost as much as those of one network. Hinton et al. 2015, Distilling the
Knowledge in a Neural Network; Lan et al. 2018, Knowledge Distillation by On-the-Fly Native Ensemble, train teachers and
student at the same time, as here.

```toml
[method]
name = "online_student"
temperature = 2.0

[[ensemble.groups]]
members = 3

[[ensemble.groups]]
name = "student"
role = "auxiliary"
outputs = 10
model = { name = "mlp", hidden = [16] }
```
"""

from __future__ import annotations

import torch
from pydantic import Field

from ensemblekit import Method, Problem, hookimpl


class OnlineStudent(Method):
    """Trains a student on the members' predictions; it alone predicts."""

    paper = "Lan et al. 2018, Knowledge Distillation by On-the-Fly Native Ensemble"
    formula = "(1/M) sum_i l(h_i, y) + (1 - a) l(z, y) + a T² KL(p_T, softmax(z / T))"

    share: float = Field(0.5, ge=0, le=1, description="weight a of the members' predictions")
    temperature: float = Field(2.0, gt=0, description="temperature T of both distributions")

    def predictor(self):
        return "student"

    @hookimpl
    def ensemble_loss(self, outputs, auxiliary, target, loss):
        student = auxiliary["student"]  # (A, B, C)
        teacher = (outputs.detach() / self.temperature).softmax(dim=-1).mean(dim=0)
        logs = (student / self.temperature).log_softmax(dim=-1)
        divergence = (torch.special.xlogy(teacher, teacher) - teacher * logs).sum(dim=-1)
        labels = loss(student, target)
        return ((1 - self.share) * labels + self.share * self.temperature**2 * divergence).mean(dim=0)

    def check_spec(self, spec):
        if spec.loss.takes != "logits":
            yield Problem("/training.loss", "a temperature needs outputs that are logits", 'use "cross_entropy"')
