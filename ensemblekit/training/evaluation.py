"""Evaluates the members in training on the validation and the test data."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.errors import NumericError
from ensemblekit.core.metrics import evaluate, flat_metrics, member_metrics
from ensemblekit.core.objective import Objective
from ensemblekit.core.out_of_fold import (
    OUT_OF_FOLD,
    combine_held_out,
    held_out_members,
    held_out_outputs,
    out_of_fold_metrics,
)
from ensemblekit.data.loading import Data
from ensemblekit.engines.base import Engine
from ensemblekit.engines.part import Samples
from ensemblekit.runs.outputs import KeptOutputs
from ensemblekit.spec.sections import Spec
from ensemblekit.training.statistics import LOWER_RATE

EVALUATION_BYTES = 2**22
"""Size of the batches in evaluation, if that is more than a training batch."""


class Evaluator:
    """The outputs of the current members for each split, and the metrics of these.

    Args:
        spec: what is trained.
        data: its validation and test data.
        objective: combines the outputs.
        engine: returns the engine of the current members.
    """

    def __init__(self, spec: Spec, data: Data, objective: Objective, engine: Callable[[], Engine]) -> None:
        self.splits = {"test": data.test}
        if data.validation is not None:
            self.splits["validation"] = data.validation
        self.train, self.num_folds = data.train, spec.data.folds
        self.objective, self.engine, self.restore = objective, engine, data.restore_targets
        self.passes, self.extra_metrics = objective.hooks.passes(spec.ensemble.members) or 1, spec.known_metrics
        self.batch_size = max(spec.training.batch_size, EVALUATION_BYTES // (4 * math.prod(data.info.input_shape)))
        self.predictions: dict[str, Tensor] = {}
        """The members' outputs for a split, by its name."""
        self._held_out: KeptOutputs | None = None
        self.seconds: dict[str, float] = {}
        """Seconds that these took."""
        self.fitted: Tensor | None = None
        """The parameters of the combiner, fitted on the validation data at the last evaluation."""
        self.where = ""
        """The epoch and the checkpoint that is kept, for errors."""
        self.before_batch: Callable[[], None] = lambda: None
        """Called before each batch; it may raise to stop."""

    def leave_out(self, split: str) -> None:
        """Evaluate the members only on the other split, if there is one."""
        del self.splits[split]

    def forget(self) -> None:
        """Compute the outputs anew: the members have learned."""
        self.predictions.clear()
        self._held_out = None

    def all_metrics(self) -> dict[str, float]:
        """Return the metrics on validation and test data."""
        metrics = {}
        if "validation" in self.splits:
            self.fit_combiner()
            metrics = self.metrics("validation")
        return (self.metrics("test") if "test" in self.splits else {}) | metrics

    def fit_combiner(self) -> None:
        """Fit on the validation data how members are combined, on the means over stochastic passes."""
        outputs = self._outputs("validation").unflatten(0, (self.passes, -1)).mean(dim=0)
        targets = self.splits["validation"].targets
        self.fitted = self.objective.fit_combiner(outputs, targets, self.members)

    def metrics(self, split: str) -> dict[str, float]:
        """Return the metrics on a split, by names that begin with the split's."""
        outputs = self._outputs(split)
        combined = self.objective.predict(outputs, self.fitted, self.passes, self.members)
        predictions, targets = self.objective.predictions(outputs, self.passes), self.splits[split].targets
        metrics = evaluate(predictions, targets, self.objective.loss, combined, self.restore, self.extra_metrics)
        return flat_metrics(metrics, split)

    @property
    def members(self) -> Tensor | None:
        """The indices of the members that predict; None if it is not the members that do."""
        return None if self.objective.predictor is not None else self.engine().predicted

    def final_metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each split; a `NumericError` if one is not finite."""
        if self.objective.final_hooks.fits_combiner:
            self.fit_combiner()
        metrics = {split: self.metrics(split) for split in self.splits}
        if (kept := self.out_of_fold()) is not None:
            metrics[OUT_OF_FOLD] = self._out_of_fold_metrics(kept)
        for split, values in metrics.items():
            check_metrics(values, f"on the {split.replace('_', ' ')} data", self.where)
        return metrics

    def out_of_fold(self) -> KeptOutputs | None:
        """Return what members answer on the training samples that they have not seen; None without folds."""
        if self.train.folds is None or self.num_folds is None:
            return None
        if self._held_out is None:
            engine, split = self.engine(), self.train
            positions, members = held_out_members(engine.predicted, self.train.folds, self.num_folds)
            parts = []
            for batch in split.batches(self.batch_size):
                self.before_batch()
                outputs = engine.predict(batch.inputs, Samples("train", batch.index))
                check_outputs(outputs, "training", len(outputs) // self.passes, self.where)
                parts.append(held_out_outputs(outputs, positions[:, batch.index], self.passes).float().cpu())
            outputs = torch.cat(parts, dim=1)
            index = torch.arange(len(split)) if split.indices is None else split.indices
            more = outputs if self.objective.combines_more else None
            predictions = self.objective.predictions(outputs, self.passes).contiguous()
            self._held_out = KeptOutputs(predictions, split.targets.cpu(), index, more, members.cpu())
        return self._held_out

    def _out_of_fold_metrics(self, kept: KeptOutputs) -> dict[str, float]:
        assert kept.members is not None
        outputs = kept.outputs if kept.networks is None else kept.networks
        # parameters of a combination that were fitted for all members have no meaning for some of them
        combined = combine_held_out(
            outputs,
            kept.members,
            lambda some, members: self.objective.predict(some, None, self.passes, members),
            self.passes,
        )
        found = out_of_fold_metrics(
            kept.outputs, combined, kept.members, kept.targets, self.objective.loss, self.restore, self.extra_metrics
        )
        return flat_metrics(found, OUT_OF_FOLD)

    def member_metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of each member, or of each pass of each network, on the test data, if there is any.

        Raises:
            NumericError: one of them is not finite.
        """
        if "test" not in self.splits:
            return []
        targets = self.splits["test"].targets
        predictions = self.objective.predictions(self._outputs("test"), self.passes)
        rows = member_metrics(predictions, targets, self.objective.loss, self.restore)
        for index, row in enumerate(rows):
            check_metrics(row, f"of member {index % (len(rows) // self.passes)} on the test data", self.where)
        return rows

    def kept_outputs(self) -> dict[str, KeptOutputs]:
        """Return the outputs of the current members as a run keeps them, by the name of the split."""
        kept = {}
        for name, split in self.splits.items():
            index = torch.arange(len(split)) if split.indices is None else split.indices
            outputs = self._outputs(name).float().cpu()
            more = outputs if self.objective.combines_more else None
            predictions = self.objective.predictions(outputs, self.passes).contiguous()
            kept[name] = KeptOutputs(predictions, split.targets.cpu(), index, more)
        held_out = self.out_of_fold()
        return kept if held_out is None else kept | {OUT_OF_FOLD: held_out}

    @property
    def milliseconds_per_1000(self) -> float | None:
        """How long 1,000 predictions of all members took on the test data, with the preparation of the inputs."""
        if "test" not in self.splits:
            return None
        return 1e6 * self.seconds["test"] / len(self.splits["test"])

    def _outputs(self, split: str) -> Tensor:
        """Return the outputs (R, N, W) of the networks that predict for a split, computed once until they learn."""
        if split not in self.predictions:
            started = time.perf_counter()
            batches = self.splits[split].batches(self.batch_size)
            outputs = self.engine().predict_split(split, batches, self.before_batch)
            check_outputs(outputs, split, len(outputs) // self.passes, self.where)
            self.predictions[split] = outputs
            self.seconds[split] = time.perf_counter() - started  # the check has waited for the device
        return self.predictions[split]


def check_metrics(metrics: Mapping[str, float], of_what: str, where: str) -> None:
    """Raise a `NumericError` that names the first of the final metrics that is nan or infinite, if there is one."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise NumericError(f"the final {name} {of_what} is not finite", where, LOWER_RATE)


def check_outputs(outputs: Tensor, split: str, num_networks: int, where: str) -> None:
    """Raise a `NumericError` that names the member whose outputs (M, N, C) for a split are not all finite."""
    finite = outputs.isfinite().flatten(1).all(dim=1)
    if not bool(finite.all()):
        member = int((~finite).nonzero()[0]) % num_networks
        what = f"the outputs of member {member} for the {split} data are nan or infinite"
        raise NumericError(what, where, LOWER_RATE)
