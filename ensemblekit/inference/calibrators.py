"""Calibrators: maps from the logits of an ensemble to calibrated ones, each with its fit. Pure functions of tensors.

Logits (N, K) are any numbers whose softmax are the class probabilities; all computations are in float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from ensemblekit.inference.minimising import Likelihood, logistic_regression, minimise_temperature

FLOOR = 1e-6
"""The least probability of an isotonic fit before it is renormalised: a step of 0 would make one mistake infinite."""
RIDGE = 1e-6
"""Weight of the squared parameters of vector scaling: it fixes the shift common to all classes, which has no effect."""


class Calibrator(ABC):
    """A map from logits (N, K) to calibrated logits (N, K)."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def fit(cls, logits: Tensor, classes: Tensor) -> Self:
        """Fit the map to logits (N, K) and the true classes (N,)."""

    @abstractmethod
    def __call__(self, logits: Tensor) -> Tensor:
        """Return the calibrated logits (N, K) of logits (N, K)."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the parameters as JSON has them."""

    @classmethod
    @abstractmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Restore a calibrator from `to_json`; a ValueError, KeyError or TypeError if the values are not its own."""

    def problem(self) -> str:
        """Say why the fit is of little use; empty if it is not."""
        return ""


@dataclass(frozen=True)
class Temperature(Calibrator):
    """One temperature T for all classes: softmax(f / T). The most probable class stays the same."""

    name = "temperature"
    temperature: float
    is_undetermined: bool = False
    """Whether the data sets no lower limit to the temperature, which then stays 1."""

    @classmethod
    def fit(cls, logits: Tensor, classes: Tensor) -> Self:
        logits = logits.double()
        return cls.minimising(lambda temperature: functional.cross_entropy(logits / temperature, classes), logits)

    @classmethod
    def minimising(cls, nll: Likelihood, logits: Tensor) -> Self:
        """Minimise a likelihood that a temperature changes; logits (..., K) say where to search."""
        spread = float(logits.double().std(dim=-1, correction=0).mean())
        temperature = minimise_temperature(nll, spread)
        return cls(1.0, is_undetermined=True) if temperature is None else cls(temperature)

    def __call__(self, logits: Tensor) -> Tensor:
        return logits / self.temperature  # in any precision: devices may have no float64

    def to_json(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "is_undetermined": self.is_undetermined}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        temperature = float(values["temperature"])
        if not 0 < temperature < float("inf"):
            raise ValueError(f"temperature is {temperature}")
        return cls(temperature, bool(values["is_undetermined"]))

    def problem(self) -> str:
        if not self.is_undetermined:
            return ""
        return (
            "the validation samples are predicted right, so that nothing limits the confidence: the temperature stays 1"
        )


@dataclass(frozen=True)
class Vector(Calibrator):
    """A factor and a shift for each class: softmax(a f + b), Guo et al. 2017."""

    name = "vector"
    factors: Tensor
    """(K,)."""
    shifts: Tensor
    """(K,)."""

    @classmethod
    def fit(cls, logits: Tensor, classes: Tensor) -> Self:
        logits, num_classes = logits.double(), logits.shape[-1]
        start = torch.cat([torch.ones(num_classes), torch.zeros(num_classes)]).double()
        parameters = start.clone().requires_grad_()
        optimizer = torch.optim.LBFGS(
            [parameters],
            max_iter=500,
            tolerance_grad=1e-10,
            tolerance_change=1e-14,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        def objective() -> Tensor:
            optimizer.zero_grad()
            factors, shifts = parameters.chunk(2)
            nll = functional.cross_entropy(logits * factors + shifts, classes)
            loss = nll + RIDGE * (parameters - start).square().sum()
            loss.backward()
            return loss

        with torch.enable_grad():
            optimizer.step(objective)
        factors, shifts = parameters.detach().chunk(2)
        return cls(factors.clone(), shifts.clone())

    def __call__(self, logits: Tensor) -> Tensor:
        return logits.double() * self.factors.to(logits.device) + self.shifts.to(logits.device)

    def to_json(self) -> dict[str, Any]:
        return {"factors": self.factors.tolist(), "shifts": self.shifts.tolist()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        factors, shifts = _numbers(values["factors"]), _numbers(values["shifts"])
        if factors.ndim != 1 or factors.shape != shifts.shape:
            raise ValueError("factors and shifts do not fit together")
        return cls(factors, shifts)


@dataclass(frozen=True)
class Isotonic(Calibrator):
    """A monotone function of each class's probability, fitted one-vs-rest, renormalised: Zadrozny and Elkan 2002."""

    name = "isotonic"
    breakpoints: tuple[tuple[Tensor, Tensor], ...]
    """Of each class: probabilities and what they become, both ascending; linear between them."""

    @classmethod
    def fit(cls, logits: Tensor, classes: Tensor) -> Self:
        from sklearn.isotonic import IsotonicRegression

        probabilities = logits.double().softmax(dim=-1)
        breakpoints = []
        for index, column in enumerate(probabilities.unbind(dim=-1)):
            model = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
            model.fit(column.numpy(), (classes == index).double().numpy())
            breakpoints.append((torch.tensor(model.X_thresholds_), torch.tensor(model.y_thresholds_)))
        return cls(tuple((before.double(), after.double()) for before, after in breakpoints))

    def __call__(self, logits: Tensor) -> Tensor:
        columns = logits.double().softmax(dim=-1).unbind(dim=-1)
        pairs = zip(columns, self.breakpoints, strict=True)
        mapped = torch.stack([_interpolate(column, *points) for column, points in pairs], dim=-1)
        # the logarithm is a logit already; a softmax renormalises it
        return mapped.clamp_min(FLOOR).log()

    def to_json(self) -> dict[str, Any]:
        return {"breakpoints": [[before.tolist(), after.tolist()] for before, after in self.breakpoints]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        points = tuple((_numbers(before), _numbers(after)) for before, after in values["breakpoints"])
        if any(before.ndim != 1 or not len(before) or before.shape != after.shape for before, after in points):
            raise ValueError("breakpoints do not fit together")
        return cls(points)


@dataclass(frozen=True)
class Beta(Calibrator):
    """Beta calibration, one-vs-rest and renormalised: logit q = a ln p - b ln(1 - p) + c, Kull et al. 2017."""

    name = "beta"
    coefficients: Tensor
    """a, b and c of each class (K, 3), a and b not negative."""

    @classmethod
    def fit(cls, logits: Tensor, classes: Tensor) -> Self:
        features = _beta_features(logits)
        fits = [_fit_beta(features[:, index], classes == index) for index in range(logits.shape[-1])]
        return cls(torch.stack(fits))

    def __call__(self, logits: Tensor) -> Tensor:
        coefficients = self.coefficients.to(logits.device)
        scores = (_beta_features(logits) * coefficients[:, :2]).sum(dim=-1) + coefficients[:, 2]
        return functional.logsigmoid(scores)

    def to_json(self) -> dict[str, Any]:
        return {"coefficients": self.coefficients.tolist()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        coefficients = _numbers(values["coefficients"])
        if coefficients.ndim != 2 or coefficients.shape[1] != 3:
            raise ValueError("coefficients are not three for each class")
        return cls(coefficients)


CALIBRATORS: Mapping[str, type[Calibrator]] = {kind.name: kind for kind in (Temperature, Vector, Isotonic, Beta)}
"""All kinds by their names."""


def _beta_features(logits: Tensor) -> Tensor:
    """Return ln p and -ln(1 - p) of each class (N, K, 2), also where p is too near to 0 or 1 for a difference."""
    logs = logits.double().log_softmax(dim=-1)
    others = [
        torch.cat([logs[:, :index], logs[:, index + 1 :]], dim=-1).logsumexp(-1) for index in range(logs.shape[-1])
    ]
    return torch.stack([logs, -torch.stack(others, dim=-1)], dim=-1)


def _fit_beta(features: Tensor, positive: Tensor) -> Tensor:
    """Return a, b and c of one class from features (N, 2); a negative coefficient is left out, as in the paper."""
    used = [0, 1]
    while True:
        weights = logistic_regression(features[:, used], positive)
        negative = [position for position in range(len(used)) if weights[position] < 0]
        if not negative:
            break
        used.pop(min(negative, key=lambda position: float(weights[position])))
    coefficients = torch.zeros(3, dtype=torch.float64)
    coefficients[[*used, 2]] = weights
    return coefficients


def _interpolate(values: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return the piecewise linear function through (before, after) at values (N,), constant beyond its ends."""
    before, after = before.to(values.device), after.to(values.device)
    if len(before) == 1:
        return after.expand_as(values)
    right = torch.searchsorted(before, values.contiguous()).clamp(1, len(before) - 1)
    left = right - 1
    width = (before[right] - before[left]).clamp_min(torch.finfo(values.dtype).tiny)
    share = ((values - before[left]) / width).clamp(0, 1)
    return after[left] + share * (after[right] - after[left])


def _numbers(values: Any) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.float64)
    if not bool(tensor.isfinite().all()):
        raise ValueError("a number is not finite")
    return tensor
