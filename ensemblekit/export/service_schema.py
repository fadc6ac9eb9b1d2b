"""The answers of the service as its OpenAPI document describes them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from ensemblekit.core.plugin import Task

Number = float | None
"""None stands for infinity, which JSON does not have."""


class Problem(BaseModel):
    """Why a request was not answered."""

    error: str = Field(description="what is wrong")
    fix: str = Field(description="what to do about it")


class Uncertainty(BaseModel):
    """How sure the ensemble is."""

    entropy: float = Field(description="entropy of the members' mean probabilities, in nats")
    mutual_information: float = Field(description="the part of the entropy that is due to disagreement of the members")
    agreement: float = Field(description="share of the members that predict the same")


class _Sample(BaseModel):
    file: str | None = Field(None, description="name of the uploaded file; only for uploads")


class ClassPrediction(_Sample):
    """The prediction of a class."""

    label: str | int = Field(alias="class", description="name of the class, or its index if classes have no names")
    probability: float
    probabilities: dict[str, float] = Field(description="by class, the largest first")
    uncertainty: Uncertainty
    prediction_set: list[str | int] | None = Field(
        None, alias="set", description="classes that hold the true one with the probability of the run's sets"
    )


class LabelPrediction(_Sample):
    """The prediction of labels."""

    labels: list[str]
    probabilities: dict[str, float] = Field(description="by label, the largest first")
    uncertainty: Uncertainty


class Interval(BaseModel):
    """An interval that holds the true value with the probability of the run's intervals."""

    low: Number | list[Number]
    high: Number | list[Number]


class ValuePrediction(_Sample):
    """The prediction of a value; of a list of values if the run has several targets."""

    value: float | list[float]
    interval: Interval | None = None
    uncertainty: dict[str, Number | list[Number]] = Field(
        description="standard_deviation, and what else the loss says about the value"
    )


class ClassPredictions(BaseModel):
    """Predictions in the order of the samples."""

    predictions: list[ClassPrediction]


class LabelPredictions(BaseModel):
    """Predictions in the order of the samples."""

    predictions: list[LabelPrediction]


class ValuePredictions(BaseModel):
    """Predictions in the order of the samples."""

    predictions: list[ValuePrediction]


PREDICTIONS: dict[Task, type[BaseModel]] = {
    "classification": ClassPredictions,
    "multilabel": LabelPredictions,
    "regression": ValuePredictions,
}


class Health(BaseModel):
    """Whether the service takes requests."""

    status: str = Field(description="ready")


class ModelDescription(BaseModel):
    """What is served."""

    run: str = Field(description="name of the run directory")
    version: str = Field(description="version of ensemblekit")
    task: Task
    spec: dict[str, Any] = Field(description="data set, model, methods, members, loss, combiner and seed of the run")
    classes: list[str] | None
    metrics: dict[str, Any] = Field(description="metrics of the run on its test data, without calibration")
    calibration: str | None
    prediction_sets: str | None = Field(description="prediction sets or intervals")
    input: dict[str, Any] = Field(description="what a request has to send")
    limits: dict[str, float]
