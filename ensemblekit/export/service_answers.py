"""The answers of the service: what `ensemblekit predict` prints for a sample, as a JSON object."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.errors import NumericError
from ensemblekit.core.label_metrics import predicted_labels
from ensemblekit.inference.answers import Answer, answers_of, numbers
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.runs.sealing import finite

Record = dict[str, Any]
UNCERTAINTY = ("entropy", "mutual_information", "agreement")


def predicted_records(ensemble: Ensemble, inputs: Tensor, top: int) -> list[Record | Exception]:
    """Predict a batch (B, *input_shape) with the `top` largest probabilities of each sample.

    Returns:
        For each sample its answer, or a `NumericError` if the outputs for it are not finite.
    """
    with torch.inference_mode():
        outputs = ensemble.network_outputs(inputs).cpu()
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        combined = ensemble.combiner.restored(ensemble.combine_networks(outputs))
        are_finite = outputs.isfinite().all(dim=-1).all(dim=0) & combined.isfinite().all(dim=-1)
        if not bool(are_finite.all()):
            outputs, combined = outputs.nan_to_num(0, 0, 0), combined.nan_to_num(0, 0, 0)
        records = _records(ensemble, inputs, outputs, combined, top)
    return [record if fine else _not_finite() for record, fine in zip(records, are_finite.tolist(), strict=True)]


def _not_finite() -> NumericError:
    return NumericError("the outputs for a sample of the request are not finite", fix="look for extreme input values")


def _records(ensemble: Ensemble, inputs: Tensor, outputs: Tensor, combined: Tensor, top: int) -> list[Record]:
    members = ensemble.combiner.restored(ensemble.predictions_of(outputs))
    plain = answers_of(ensemble, members, combined)
    if ensemble.info.task == "regression":
        return [_value_record(answer, ensemble.info.num_outputs) for answer in plain]
    probabilities = ensemble.loss.probabilities(combined)
    by_name = _by_name(ensemble, probabilities, top)
    if ensemble.info.task == "multilabel":
        names = _names(ensemble)
        labels = [
            [name for name, has in zip(names, row, strict=True) if has]
            for row in predicted_labels(probabilities).tolist()
        ]
        rows = zip(labels, by_name, plain, strict=True)
        return [{"labels": own, "probabilities": all_of, **_uncertainty(answer)} for own, all_of, answer in rows]
    records = [
        {"class": answer["class"], "probability": answer["probability"], "probabilities": some, **_uncertainty(answer)}
        for answer, some in zip(plain, by_name, strict=True)
    ]
    if ensemble.conformal is not None:
        exact = ensemble.loss.probabilities(combined.double())
        sets = ensemble.named_sets(exact, ensemble.conformal.sets(exact, ensemble.set_randomness(inputs)))
        records = [{**record, "set": own} for record, own in zip(records, sets, strict=True)]
    return records


def with_top(record: Record, top: int) -> Record:
    """Return an answer with at most `top` probabilities, which are sorted already."""
    if "probabilities" not in record or len(record["probabilities"]) <= top:
        return record
    return {**record, "probabilities": dict(islice(record["probabilities"].items(), top))}


def _names(ensemble: Ensemble) -> tuple[str, ...]:
    return ensemble.classes or tuple(map(str, range(ensemble.info.num_outputs)))


def _by_name(ensemble: Ensemble, probabilities: Tensor, top: int) -> list[dict[str, float]]:
    """The largest probabilities of each sample by the names of classes or labels, the largest first."""
    ordered, indices = (part[:, :top] for part in probabilities.sort(dim=-1, descending=True, stable=True))
    names = _names(ensemble)
    return [
        {names[index]: value for index, value in zip(row, numbers(values), strict=True)}
        for row, values in zip(indices.tolist(), ordered, strict=True)
    ]


def _uncertainty(answer: Answer) -> Record:
    return {"uncertainty": {name: answer[name] for name in UNCERTAINTY}}


def _value_record(answer: Answer, num_values: int) -> Record:
    """Group the columns of a regression; several targets become lists in the order of the targets."""
    if num_values == 1:
        columns: dict[str, Any] = dict(answer)
    else:
        names = [name.removesuffix("_0") for name in answer if name.endswith("_0")]
        columns = {name: [answer[f"{name}_{index}"] for index in range(num_values)] for name in names}
    record: Record = {"value": columns.pop("value")}
    if "low" in columns and "high" in columns:
        record["interval"] = {"low": columns.pop("low"), "high": columns.pop("high")}
    # an interval may be infinite, which JSON cannot say
    described: Record = finite({**record, "uncertainty": columns})
    return described
