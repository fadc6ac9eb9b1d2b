"""The kinds of tasks, one object each: what targets are, what a prediction is, and what it is measured by.

A new kind is a class here, a name in `Task`, and a row in the tables of those who show predictions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ensemblekit.core.errors import DataError
from ensemblekit.core.label_losses import BCE
from ensemblekit.core.label_metrics import multilabel_metrics, predicted_labels
from ensemblekit.core.losses import MSE, CrossEntropy, Loss
from ensemblekit.core.metrics import classification_metrics, regression_metrics
from ensemblekit.core.plugin import Task
from ensemblekit.core.tensors import describe_tensor

Restore = Callable[[Tensor], Tensor] | None


class TaskKind(ABC):
    """A kind of task."""

    name: ClassVar[Task]
    default_loss: ClassVar[type[Loss]]
    has_probabilities: ClassVar[bool] = True
    """Whether outputs mean probabilities of classes or labels."""
    standardises_targets: ClassVar[bool] = False
    """Whether networks may learn standardised targets."""

    @abstractmethod
    def check_targets(self, targets: Tensor, num_outputs: int, label: str) -> Tensor:
        """Return targets as losses take them; a `DataError` names the first bad one.

        Args:
            targets: as their owner has them, at least one.
            num_outputs: the number of classes, labels or values.
            label: the name of the data, for errors.
        """

    def missing(self, targets: Tensor, num_outputs: int) -> list[int]:
        """Return the classes or labels that no sample of checked targets has."""
        return []

    @abstractmethod
    def metrics(
        self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss, restore: Restore
    ) -> dict[str, Tensor]:
        """Compute the metrics of this task by name; arguments as for `ensemblekit.core.metrics.evaluate`."""

    def target_for_metrics(self, target: Tensor, loss: Loss) -> Tensor:
        """Return the targets as metrics take them, which some losses have in another form."""
        return target

    def correct(self, combined: Tensor, target: Tensor, loss: Loss) -> Tensor | None:
        """Return whether the prediction of each sample is right (N,); None if it has no such thing."""
        return None

    @abstractmethod
    def predict(self, combined: Tensor, loss: Loss, names: Sequence[str] | None) -> Tensor | NDArray[np.str_]:
        """Return the predictions of outputs (N, C), in the original units; `names` are those of the classes."""

    def constant_outputs(self, target: Tensor, num_outputs: int, loss: Loss) -> Tensor | None:
        """Return outputs (N, C) of an ensemble that knows no inputs; None: they are fitted."""
        return None


class Classification(TaskKind):
    """One of several classes; targets are class indices (N,)."""

    name = "classification"
    default_loss = CrossEntropy

    def check_targets(self, targets: Tensor, num_outputs: int, label: str) -> Tensor:
        if targets.dim() != 1 or targets.is_floating_point() or targets.is_complex():
            what = f"expected one class index per sample, got {describe_tensor(targets[0])}"
            raise DataError(what, label, "number the classes from 0")
        classes = (targets > 0 if are_signs(targets, num_outputs) else targets).to(torch.int64)
        # One output is enough for two classes: losses on margins ±1.
        num_classes = max(2, num_outputs)
        bad = ((classes < 0) | (classes >= num_classes)).nonzero()
        if len(bad):
            what = f"expected class indices from 0 to {num_classes - 1}, got {int(classes[bad[0, 0]])}"
            raise DataError(what, f"{label} sample {int(bad[0])}", "number the classes from 0")
        return classes

    def missing(self, targets: Tensor, num_outputs: int) -> list[int]:
        present = set(targets.clamp_min(0).unique().tolist())  # with a margin loss the first of two classes may be -1
        return [index for index in range(num_outputs) if index not in present]

    def metrics(
        self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss, restore: Restore
    ) -> dict[str, Tensor]:
        return classification_metrics(outputs, combined, self.target_for_metrics(target, loss), loss)

    def target_for_metrics(self, target: Tensor, loss: Loss) -> Tensor:
        return (target.flatten() > 0 if loss.takes == "margins" else target).long()

    def correct(self, combined: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss.probabilities(combined).argmax(dim=-1) == self.target_for_metrics(target, loss)

    def predict(self, combined: Tensor, loss: Loss, names: Sequence[str] | None) -> Tensor | NDArray[np.str_]:
        indices = loss.probabilities(combined).argmax(dim=-1)
        return indices if names is None else np.array(names)[indices.cpu().numpy()]

    def constant_outputs(self, target: Tensor, num_outputs: int, loss: Loss) -> Tensor:
        share = 1 / num_outputs if loss.takes in ("values", "probabilities") else 0.0
        return torch.full((len(target), num_outputs), share)


class MultiLabel(TaskKind):
    """Any number of several labels; targets are 0 and 1, float (N, C)."""

    name = "multilabel"
    default_loss = BCE

    def check_targets(self, targets: Tensor, num_outputs: int, label: str) -> Tensor:
        if targets.dim() != 2 or targets.shape[1] != num_outputs:
            what = f"expected {num_outputs} labels of 0 or 1 per sample, got {describe_tensor(targets[0])}"
            raise DataError(what, label, "give an array (N, C) with a column for each label")
        bad = ((targets != 0) & (targets != 1)).any(dim=1).nonzero()
        if len(bad):
            what = f"expected labels of 0 or 1, got {targets[bad[0, 0]].tolist()}"
            raise DataError(f"{what:.200}", f"{label} sample {int(bad[0])}", "give 1 for a label of the sample, else 0")
        return targets.to(torch.float64)

    def missing(self, targets: Tensor, num_outputs: int) -> list[int]:
        return (~targets.bool().any(dim=0)).nonzero().flatten().tolist()

    def metrics(
        self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss, restore: Restore
    ) -> dict[str, Tensor]:
        return multilabel_metrics(outputs, combined, target, loss)

    def correct(self, combined: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return (predicted_labels(loss.probabilities(combined)) == target.bool()).all(dim=-1)

    def predict(self, combined: Tensor, loss: Loss, names: Sequence[str] | None) -> Tensor:
        return predicted_labels(loss.probabilities(combined))


class Regression(TaskKind):
    """Real values; targets are float (N, C)."""

    name = "regression"
    default_loss = MSE
    has_probabilities = False
    standardises_targets = True

    def check_targets(self, targets: Tensor, num_outputs: int, label: str) -> Tensor:
        values = targets.to(torch.float64)
        values = values.unsqueeze(1) if values.dim() == 1 else values
        if values.shape[1:] != (num_outputs,):
            what = f"expected {num_outputs} real values per sample, got shape {tuple(values.shape[1:])}"
            raise DataError(what, label, "correct the targets or the number of outputs in DataInfo")
        bad = values.isfinite().all(1).logical_not().nonzero()
        if len(bad):
            what = f"target is not finite: {values[bad[0, 0]].tolist()}"
            raise DataError(what, f"{label} sample {int(bad[0])}", "remove the sample")
        return values

    def metrics(
        self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss, restore: Restore
    ) -> dict[str, Tensor]:
        found = regression_metrics(loss.point(outputs), loss.point(combined), target, restore)
        combined, values = combined.double(), loss.prepare(combined, target).double()
        if restore is not None:
            combined, values = loss.rescale(combined, restore), restore(values)
        return found | dict(loss.metrics(combined, values))

    def predict(self, combined: Tensor, loss: Loss, names: Sequence[str] | None) -> Tensor:
        return loss.point(combined)

    def constant_outputs(self, target: Tensor, num_outputs: int, loss: Loss) -> Tensor | None:
        if target.numel() != len(target) * num_outputs:
            return None  # outputs are not values of the targets
        values = target.reshape(len(target), num_outputs).float()
        return values.mean(dim=0).expand_as(values)


TASKS: dict[Task, TaskKind] = {kind.name: kind for kind in (Classification(), MultiLabel(), Regression())}
"""The kinds of tasks by name."""


def task_of(loss: Loss, outputs: Tensor, target: Tensor) -> TaskKind:
    """Return the kind of task that outputs (..., C) and targets of a loss belong to."""
    if loss.takes == "labels":
        return TASKS["multilabel"]
    if loss.takes == "values" and (target.is_floating_point() or target.ndim > 1 or outputs.shape[-1] == 1):
        return TASKS["regression"]
    return TASKS["classification"]


def are_signs(targets: Tensor, num_outputs: int) -> bool:
    """Return whether targets are the two classes -1 and +1; a split of +1 alone has the class indices 1 either way."""
    if num_outputs > 2 or targets.is_floating_point() or targets.is_complex():
        return False
    return bool((targets == -1).any()) and bool(((targets == -1) | (targets == 1)).all())
