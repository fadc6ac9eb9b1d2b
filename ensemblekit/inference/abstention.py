"""Abstention: predictions of an ensemble that is not sure enough are replaced by a mark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ensemblekit.core.errors import UsageError
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.inference.prediction import Prediction

ABSTAINED = "abstained"
"""What stands in place of a class."""


def check_abstention(ensemble: Ensemble, threshold: float) -> None:
    """Raise a `UsageError` unless an ensemble's answers can be replaced by the mark of abstention."""
    where = f"--abstain-above {threshold:g}"
    if not 0 <= threshold <= 1:
        raise UsageError("expected a number from 0 to 1", where, "use, for example, --abstain-above 0.2")
    if ensemble.info.task != "classification":
        what = f"the task of the run is {ensemble.info.task}, so that there is no class to withhold"
        raise UsageError(what, where, "leave out the option, and filter by a column of the uncertainty")
    if ensemble.classes and ABSTAINED in ensemble.classes:
        raise UsageError(f'a class of the run is named "{ABSTAINED}"', where, "filter by the column probability")


def abstaining(batches: Iterator[list[Prediction]], threshold: float) -> Iterator[list[Prediction]]:
    """Yield predictions, with "abstained" as the class of those whose 1 - probability is above a threshold.

    Everything else about a prediction is kept. Classes become text, so that a column has one type.
    """
    for batch in batches:
        yield [_abstaining(prediction, threshold) for prediction in batch]


def num_abstained(batch: Sequence[Prediction]) -> int:
    """Return the number of predictions without a class."""
    return sum(prediction.answer.get("class") == ABSTAINED for prediction in batch)


def _abstaining(prediction: Prediction, threshold: float) -> Prediction:
    answer = prediction.answer
    is_sure = 1 - float(answer["probability"]) <= threshold
    return replace(prediction, answer={**answer, "class": str(answer["class"]) if is_sure else ABSTAINED})
