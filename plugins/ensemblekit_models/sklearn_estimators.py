"""The estimators of scikit-learn that can be members: how each is made, and how it becomes a network when fitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ensemblekit_models.fitted_networks import (
    NEVER,
    FittedGaussians,
    FittedLinear,
    FittedNeighbors,
    FittedNetwork,
    FittedTrees,
    pair,
)

Array = npt.NDArray[Any]
Learnt = dict[str, Tensor]
"""Tensors by the names of the buffers of a network."""


@dataclass(frozen=True)
class Samples:
    """The training samples that an estimator is fitted to, in NumPy's arrays."""

    inputs: Array
    """float64 (N, D)."""
    targets: Array
    """Class indices (N,), or values (N, C)."""
    weights: Array | None
    """Of the samples (N,), all positive; None: 1."""
    num_classes: int | None
    """Number of classes, also of those that no sample has; None if targets are values."""


@dataclass(frozen=True)
class EstimatorKind:
    """An entry of the list: classes of scikit-learn, and the network that stands for them."""

    convert: Callable[[Any, Samples], Learnt]
    """Turns a fitted estimator into the buffers of the network."""
    network: Callable[..., FittedNetwork]
    """Builds the network for so many inputs and outputs; it takes `network_parameters` by name."""
    classifier: str = ""
    """Location of the class for classes, such as `tree:DecisionTreeClassifier`; empty if there is none."""
    regressor: str = ""
    """Location of the class for values."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults that differ from those of scikit-learn."""
    allowed: tuple[str, ...] | None = None
    """Its parameters; None: all of the class."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Parameters that cannot be set, each with the reason."""
    network_parameters: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that the network needs too, with their defaults."""
    several_values: bool = True
    """Whether the regressor predicts several values."""
    differs_by_seed: bool = False
    """Whether members differ much if nothing but their seeds does."""

    def location(self, for_classes: bool) -> str:
        """Return the location of the class for classes or for values; empty if there is none."""
        return self.classifier if for_classes else self.regressor

    def estimator_class(self, for_classes: bool) -> Any:
        """Import the class of scikit-learn."""
        module, _, name = self.location(for_classes).partition(":")
        return getattr(import_module(f"sklearn.{module}"), name)

    def parameter_names(self, for_classes: bool) -> list[str]:
        """Return the names of the parameters that a spec may set."""
        names = signature(self.estimator_class(for_classes)).parameters
        return [
            name
            for name in (self.allowed or names)
            if name not in self.excluded and name not in EXCLUDED and name in names
        ]

    def create(self, for_classes: bool, parameters: Mapping[str, Any], seed: int) -> Any:
        """Make an estimator that is not fitted yet."""
        estimator_class = self.estimator_class(for_classes)
        random = {"random_state": seed % 2**32} if "random_state" in signature(estimator_class).parameters else {}
        return estimator_class(**{**self.defaults, **parameters, **random})


def fit_estimator(estimator: Any, samples: Samples) -> None:
    """Fit an estimator of scikit-learn with the weights of the samples, if it can use them."""
    targets = samples.targets.ravel() if samples.targets.shape[1:] == (1,) else samples.targets
    if "sample_weight" in signature(estimator.fit).parameters:
        estimator.fit(samples.inputs, targets, sample_weight=samples.weights)
    else:
        estimator.fit(samples.inputs, targets)


def estimator_predictions(estimator: Any, samples: Samples, inputs: Array) -> Array:
    """Return what a fitted estimator itself predicts: probabilities of all classes, or values, (B, …)."""
    if samples.num_classes is None:
        return np.asarray(estimator.predict(inputs)).reshape(len(inputs), -1)
    return _all_classes(estimator.predict_proba(inputs), estimator, samples, 0.0)


def _all_classes(columns: Array, estimator: Any, samples: Samples, missing: float) -> Array:
    """Place the columns (…, L) of the classes that the estimator knows among those of all classes (…, K)."""
    if samples.num_classes is None:
        return columns
    everywhere = np.full((*columns.shape[:-1], samples.num_classes), missing)
    everywhere[..., np.asarray(estimator.classes_, dtype=np.int64)] = columns
    return everywhere


def _two_columns(score: Array) -> Array:
    """Return the scores (…, 2) of two classes from that of the second (…, 1): their softmax is its sigmoid."""
    return np.concatenate([np.zeros_like(score), score], axis=-1)


def _precise(values: Array) -> Tensor:
    return pair(torch.from_numpy(np.array(values, dtype=np.float64)))


def _linear(estimator: Any, samples: Samples) -> Learnt:
    weight, bias = np.atleast_2d(estimator.coef_).T, np.atleast_1d(estimator.intercept_)
    if samples.num_classes is None:
        return {"weight": _precise(weight.T), "bias": _precise(np.broadcast_to(bias, weight.shape[1:]))}
    if len(estimator.classes_) == 2:
        weight, bias = _two_columns(weight), _two_columns(bias)
    return {
        "softmax": torch.tensor(True),
        "weight": _precise(_all_classes(weight, estimator, samples, 0.0).T),
        "bias": _precise(_all_classes(bias, estimator, samples, NEVER)),
    }


def _gaussians(estimator: Any, samples: Samples) -> Learnt:
    mean, variance = (
        _all_classes(values.T, estimator, samples, 1.0).T for values in (estimator.theta_, estimator.var_)
    )
    with np.errstate(divide="ignore"):  # a prior of 0
        prior = np.maximum(np.log(estimator.class_prior_), NEVER)
    return {
        "softmax": torch.tensor(True),
        "mean": _precise(mean),
        "variance": _precise(variance),
        "prior": _precise(_all_classes(prior, estimator, samples, NEVER)),
    }


def _neighbors(estimator: Any, samples: Samples) -> Learnt:
    """Keep the samples: scikit-learn has no weights of samples here, so that the network computes the neighbours."""
    values = samples.targets if samples.num_classes is None else np.eye(samples.num_classes)[samples.targets]
    weights = np.ones(len(values)) if samples.weights is None else samples.weights
    arrays = {"samples": samples.inputs, "values": values, "weights": weights}
    return {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}


def _single_tree(estimator: Any, samples: Samples) -> Learnt:
    return _trees([estimator.tree_], [_leaf_values(estimator, estimator, samples)])


def _forest(estimator: Any, samples: Samples) -> Learnt:
    values = [_leaf_values(tree, estimator, samples) / len(estimator.estimators_) for tree in estimator.estimators_]
    return _trees([tree.tree_ for tree in estimator.estimators_], values)


def _leaf_values(tree: Any, estimator: Any, samples: Samples) -> Array:
    """Return what each node of a tree predicts: probabilities (nodes, K), or values (nodes, C)."""
    if samples.num_classes is None:
        values: Array = tree.tree_.value[:, :, 0]
        return values
    counts = tree.tree_.value[:, 0, :]
    return _all_classes(counts / counts.sum(axis=1, keepdims=True), estimator, samples, 0.0)


def _boosting(estimator: Any, samples: Samples) -> Learnt:
    stages = estimator.estimators_  # (stages, 1), or a tree for each of more than two classes
    # the exponential loss means P(second class) = sigmoid(2 score)
    factor = 2.0 if getattr(estimator, "loss", "") == "exponential" else 1.0
    trees = [tree.tree_ for tree in stages.ravel()]
    columns = np.tile(np.eye(stages.shape[1]), (len(stages), 1))
    rate = estimator.learning_rate
    values = [rate * tree.value[:, 0] * column for tree, column in zip(trees, columns, strict=True)]
    # what all samples start with: the score of any sample without its trees
    first = samples.inputs[:1]
    score = estimator.predict if samples.num_classes is None else estimator.decision_function
    grown = sum(rate * tree.predict(first)[0] * column for tree, column in zip(stages.ravel(), columns, strict=True))
    offset = np.reshape(score(first), -1) - grown
    if samples.num_classes is None:
        return _trees(trees, values, offset)
    if stages.shape[1] == 1:
        values, offset = [_two_columns(factor * value) for value in values], _two_columns(factor * offset)
    values = [_all_classes(value, estimator, samples, 0.0) for value in values]
    learnt = _trees(trees, values, _all_classes(offset, estimator, samples, NEVER))
    return {"softmax": torch.tensor(True), **learnt}


def _trees(trees: list[Any], values: list[Array], offset: Array | None = None) -> Learnt:
    """Put the nodes of all trees in one list; a leaf is its own child."""
    first = np.cumsum([0, *(tree.node_count for tree in trees)])
    children = []
    for tree, start in zip(trees, first, strict=False):
        both = np.stack([tree.children_left, tree.children_right], axis=1)
        own = np.arange(tree.node_count)[:, None]
        children.append(start + np.where(both < 0, own, both))
    value = np.concatenate(values)
    return {
        # leaves have the feature -2
        "feature": torch.from_numpy(np.concatenate([np.maximum(tree.feature, 0) for tree in trees])),
        "threshold": torch.from_numpy(rounded_down(np.concatenate([tree.threshold for tree in trees]))),
        "child": torch.from_numpy(np.concatenate(children)),
        "value": _precise(value),
        "roots": torch.from_numpy(first[:-1].copy()),
        "levels": torch.zeros(max(1, *(tree.max_depth for tree in trees)), dtype=torch.uint8),
        "offset": _precise(np.zeros(value.shape[1]) if offset is None else offset),
    }


def rounded_down(thresholds: Array) -> Array:
    """Return the largest float32 that is not above each float64.

    A float32 is at most the one exactly if it is at most the other, so that comparisons are those of scikit-learn.
    """
    with np.errstate(over="ignore"):
        nearest = thresholds.astype(np.float32)
    return np.where(nearest > thresholds, np.nextafter(nearest, np.float32(-np.inf)), nearest)


EXCLUDED = {
    "random_state": "it is derived from the seed of the member",
    "warm_start": "a member is fitted once",
    "verbose": "the run has its own display",
}
"""Parameters that no estimator takes in a spec, each with the reason."""

KINDS: dict[str, EstimatorKind] = {
    "logistic_regression": EstimatorKind(
        _linear,
        FittedLinear,
        classifier="linear_model:LogisticRegression",
        defaults={"max_iter": 1000},
        excluded={"multi_class": "several classes have a common softmax"},
    ),
    "ridge": EstimatorKind(_linear, FittedLinear, regressor="linear_model:Ridge"),
    "decision_tree": EstimatorKind(
        _single_tree,
        FittedTrees,
        "tree:DecisionTreeClassifier",
        "tree:DecisionTreeRegressor",
    ),
    "random_forest": EstimatorKind(
        _forest, FittedTrees, "ensemble:RandomForestClassifier", "ensemble:RandomForestRegressor", differs_by_seed=True
    ),
    "extra_trees": EstimatorKind(
        _forest, FittedTrees, "ensemble:ExtraTreesClassifier", "ensemble:ExtraTreesRegressor", differs_by_seed=True
    ),
    "gradient_boosting": EstimatorKind(
        _boosting,
        FittedTrees,
        "ensemble:GradientBoostingClassifier",
        "ensemble:GradientBoostingRegressor",
        several_values=False,
    ),
    "gaussian_nb": EstimatorKind(_gaussians, FittedGaussians, classifier="naive_bayes:GaussianNB"),
    "nearest_neighbors": EstimatorKind(
        _neighbors,
        FittedNeighbors,
        "neighbors:KNeighborsClassifier",
        "neighbors:KNeighborsRegressor",
        allowed=("n_neighbors", "weights", "p"),
        network_parameters={"n_neighbors": 5, "weights": "uniform", "p": 2},
    ),
}
"""The estimators by the names that specs use."""
