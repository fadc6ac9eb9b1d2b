"""Estimators of scikit-learn as members: fitted once, then networks like any others."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ensemblekit import DataError, Model, PluginError, Problem, did_you_mean
from ensemblekit_models.fitted_networks import LINKS, FittedNetwork
from ensemblekit_models.sklearn_estimators import (
    EXCLUDED,
    KINDS,
    EstimatorKind,
    Samples,
    estimator_predictions,
    fit_estimator,
)

if TYPE_CHECKING:
    from ensemblekit import DataInfo, Loss, Spec

CHECKED_SAMPLES = 64
"""Training samples on which a network is compared with the estimator that it stands for."""
TOLERANCE = 1e-6

if TYPE_CHECKING:
    EstimatorName = str
else:
    EstimatorName = Literal[tuple(KINDS)]


class Sklearn(Model):
    """An estimator of scikit-learn, fitted once to the training samples with the member's weights, then frozen."""

    paper = "Pedregosa et al. 2011, Scikit-learn: Machine Learning in Python"
    fitted = True

    estimator: EstimatorName = Field("random_forest", description="the estimator, for classes or for values")
    parameters: dict[str, bool | int | float | str] = Field(
        {}, description="parameters of the estimator that differ from scikit-learn's defaults"
    )
    smoothing: float = Field(
        1e-3,
        ge=0,
        lt=1,
        description="share of the uniform distribution in the class probabilities, because log 0 is infinite",
    )
    softmax: bool = Field(False, description='outputs are probabilities, as the loss "nll" takes them')

    @property
    def estimator_kind(self) -> EstimatorKind:
        """The entry of the estimator in the list."""
        return KINDS[self.estimator]

    def gives_probabilities(self) -> bool:
        return self.softmax

    def unsupported(self) -> dict[str, str]:
        if "tree" in self.estimator or self.estimator in ("random_forest", "gradient_boosting"):
            return {"vmap": "trees of different members have different numbers of nodes"}
        if self.estimator == "nearest_neighbors":
            return {"vmap": "members may keep different numbers of samples"}
        return {}

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        if info.task == "multilabel":
            yield Problem("", f'"{self.name}" cannot predict the labels of "{spec.data.name}"', "use another model")
            return
        is_regression = info.task == "regression"
        if not self.estimator_kind.location(not is_regression):
            predicts, others = ("classes", "ridge") if is_regression else ("values", "logistic_regression")
            what = f'"{self.estimator}" predicts {predicts}, but the task of "{spec.data.name}" is {info.task}'
            yield Problem("estimator", what, f'use "{others}" or "random_forest"')
            return
        yield from self._parameter_problems(not is_regression)
        if is_regression and info.num_outputs > 1 and not self.estimator_kind.several_values:
            what = f'"{self.estimator}" predicts one value, but "{spec.data.name}" has {info.num_outputs}'
            yield Problem("estimator", what, 'use "random_forest" or "ridge"')
        elif (outputs := spec.loss.num_outputs(info)) != info.num_outputs and spec.loss.takes != "margins":
            what = f'"{spec.loss.name}" needs {outputs} outputs, but estimators predict the {info.num_outputs} targets'
            yield Problem("", what, "use another loss")

    def notes(self, spec: Spec) -> Iterable[str]:
        if sum(model.key == self.key for model in spec.member_models) > 1 and not self.estimator_kind.differs_by_seed:
            yield f'members with the estimator "{self.estimator}" hardly differ unless a method weights their samples'

    def _parameter_problems(self, for_classes: bool) -> Iterable[Problem]:
        """Yield what scikit-learn would not accept."""
        kind = self.estimator_kind
        allowed = kind.parameter_names(for_classes)
        known = {name: value for name, value in self.parameters.items() if name in allowed}
        for name in self.parameters.keys() - known.keys():
            reason = {**EXCLUDED, **kind.excluded}.get(name)
            what = f"cannot be set: {reason}" if reason else f'is not a parameter of "{self.estimator}"'
            fix = "remove it" if reason else f"{did_you_mean(name, allowed)} allowed: {', '.join(allowed)}".lstrip()
            yield Problem(f"parameters.{name}", what, fix)
        if reason := _refusal(kind.create(for_classes, known, 0)):
            yield Problem("parameters", reason, f"see {kind.location(for_classes).replace(':', '.')} of scikit-learn")

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        kind = self.estimator_kind
        own = {name: self.parameters.get(name, default) for name, default in kind.network_parameters.items()}
        network = kind.network(prod(input_shape), num_outputs, **own)
        if self.softmax:  # the uniform distribution: zeros are no probabilities
            network.store({"smoothing": torch.tensor(1.0)})
        return network

    def fit(
        self, network: nn.Module, inputs: Tensor, targets: Tensor, weights: Tensor | None, loss: Loss, seed: int
    ) -> None:
        assert isinstance(network, FittedNetwork)
        samples = _samples(inputs, targets, weights, network.num_outputs)
        for_classes = samples.num_classes is not None
        kind = self.estimator_kind
        estimator = kind.create(for_classes, self.parameters, seed)
        try:
            fit_estimator(estimator, samples)
        except ValueError as error:  # how scikit-learn reports everything, for example a single class
            what = f'scikit-learn cannot fit "{self.estimator}": {_first_line(error)}'
            raise DataError(what, f'model "{self.name}"', "change the estimator, its parameters or the data") from error
        network.store(kind.convert(estimator, samples))
        self._compare(network, estimator, samples)
        if for_classes:
            network.store({"smoothing": torch.tensor(self.smoothing), "link": _link(loss)})

    def _compare(self, network: FittedNetwork, estimator: Any, samples: Samples) -> None:
        """Raise a `PluginError` if the network does not predict what the estimator does, after whatever parameters."""
        if self.estimator == "nearest_neighbors":  # scikit-learn knows no weights there, and ties depend on the order
            return
        inputs = samples.inputs[:CHECKED_SAMPLES]
        expected = torch.from_numpy(estimator_predictions(estimator, samples, inputs)).double()
        with torch.no_grad():
            actual = copy.deepcopy(network).cpu().predictions(torch.from_numpy(inputs).float())
        if not torch.allclose(actual.double(), expected, TOLERANCE, TOLERANCE):
            what = f'the network of "{self.estimator}" differs from it by {float((actual - expected).abs().max()):.3g}'
            raise PluginError(what, f'model "{self.name}"', "use other parameters", plugin=self.name)


def _samples(inputs: Tensor, targets: Tensor, weights: Tensor | None, num_outputs: int) -> Samples:
    """Convert the training samples, without those of weight 0."""
    is_used = torch.ones(len(targets), dtype=torch.bool) if weights is None else weights.cpu() > 0
    if not bool(is_used.any()):
        raise DataError("all sample weights of a member are 0", "fit()", "use another method or other weights")
    for_values = targets.is_floating_point()
    values = targets.cpu().reshape(len(targets), -1) if for_values else targets.cpu()
    return Samples(
        inputs.cpu().flatten(1)[is_used].double().numpy(),
        values[is_used].double().numpy() if for_values else values[is_used].numpy(),
        None if weights is None else weights.cpu()[is_used].double().numpy(),
        None if for_values else max(num_outputs, 2),
    )


def _refusal(estimator: Any) -> str:
    """Return why scikit-learn does not accept the values of an estimator's parameters; empty if it does."""
    try:
        estimator._validate_params()
    except ValueError as error:
        return _first_line(error)
    return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _link(loss: Loss) -> Tensor:
    """Find the function of `LINKS`, and the factor, with which a loss turns probabilities into outputs.

    A network cannot keep the loss itself: it is saved as tensors alone.
    """
    second = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    probabilities = torch.stack([1 - second, second], dim=-1)
    outputs = loss.from_probabilities(probabilities)
    for number, function in enumerate(LINKS, start=1):
        values = function(probabilities[:, 2 - outputs.shape[-1] :])
        factor = float((outputs * values).sum() / values.square().sum())
        if torch.allclose(factor * values, outputs):
            return torch.full((number,), factor)
    what = f'"{loss.name}" turns probabilities into outputs in a way that the model "sklearn" does not know'
    fix = "let from_probabilities() return a multiple of p, log p, logit p or probit p, or use another loss"
    raise PluginError(what, "from_probabilities", fix, plugin=loss.name)
