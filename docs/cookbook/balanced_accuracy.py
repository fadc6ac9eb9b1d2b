"""A metric: balanced accuracy

The mean over classes of the share of samples of that class that are recognised: (1/K) sum_c P(ŷ = c | y = c). Guessing
gives 1/K whatever the frequencies of the classes are, while the accuracy of always predicting the most frequent class
may be high. A metric is named in the spec, computed for every split and compared like the built-in ones. Brodersen et
al. 2010, The Balanced Accuracy and Its Posterior Distribution.

```toml
metrics = ["balanced_accuracy"]
```
"""

from __future__ import annotations

from torch.nn.functional import one_hot

from ensemblekit import Metric


class BalancedAccuracy(Metric):
    """The mean over classes of the accuracy on the samples of a class."""

    paper = "Brodersen et al. 2010, The Balanced Accuracy and Its Posterior Distribution"
    formula = "mean over the classes c that occur of P(ŷ = c | y = c)"
    tasks = ("classification",)
    higher_is_better = True

    def compute(self, outputs, combined, target, loss):
        probabilities = loss.probabilities(combined)
        correct = (probabilities.argmax(dim=-1) == target).double()
        classes = one_hot(target, probabilities.shape[-1]).double()  # (N, K)
        counts = classes.sum(dim=0)
        return (correct @ classes)[counts > 0].div(counts[counts > 0]).mean()
