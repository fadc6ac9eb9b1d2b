"""A metric: the geometric mean of the recalls

The share of the samples of a class that are recognised is its recall, P(ŷ = c | y = c). Their geometric mean is 0 as
soon as one class is never recognised, while the accuracy of always predicting the most frequent class may be high. A
metric is named in the spec, computed for every split and compared like the built-in ones. Kubat and Matwin 1997,
Addressing the Curse of Imbalanced Training Sets.

```toml
metrics = ["geometric_recall"]
```
"""

from __future__ import annotations

from torch.nn.functional import one_hot

from ensemblekit import Metric


class GeometricRecall(Metric):
    """The geometric mean over classes of the share of their samples that are recognised."""

    paper = "Kubat and Matwin 1997, Addressing the Curse of Imbalanced Training Sets"
    formula = "geometric mean over the classes c that occur of P(ŷ = c | y = c)"
    tasks = ("classification",)
    higher_is_better = True

    def compute(self, outputs, combined, target, loss):
        probabilities = loss.probabilities(combined)
        correct = (probabilities.argmax(dim=-1) == target).double()
        classes = one_hot(target, probabilities.shape[-1]).double()  # (N, K)
        counts = classes.sum(dim=0)
        recalls = (correct @ classes)[counts > 0] / counts[counts > 0]
        return recalls.prod() ** (1 / len(recalls))
