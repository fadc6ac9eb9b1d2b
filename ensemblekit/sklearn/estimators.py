"""The estimators: `EnsembleClassifier` and `EnsembleRegressor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.random import RandomState
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import assert_all_finite, check_array, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from ensemblekit.core.metrics import uncertainty
from ensemblekit.members.python_model import NetworkLike
from ensemblekit.members.python_specs import PluginLike
from ensemblekit.sklearn.estimator import EnsembleEstimator
from ensemblekit.sklearn.preparation import Scaling
from ensemblekit.sklearn.rows import class_weights

Table = str | Mapping[str, Any]
"""The name of a plugin, or a table with its name and parameters."""


class Uncertainty(NamedTuple):
    """The uncertainty of predictions and its two parts, for each row (N,) or for each row and target (N, C)."""

    total: NDArray[Any]
    """In classification the entropy of the mean of the members' probabilities, in nats; in regression a standard
    deviation."""
    aleatoric: NDArray[Any]
    """Noise of the data, as the members see it: the mean of the entropies of their probabilities; in regression the
    standard deviation that they predict, nan if the loss has none."""
    epistemic: NDArray[Any]
    """Disagreement of the members: the mutual information; in regression the standard deviation of their values."""


class EnsembleClassifier(ClassifierMixin, EnsembleEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A classifier that is an ensemble of neural networks.

    Parameters have the names that they have in specs. A plugin is given by its name or by a table with its name and its
    parameters, which are reached as `method__lambda`, `model__hidden`, `optimizer__lr` and so on.

    Args:
        method: the ensembling method, or a list of methods.
        model: the base model; or a subclass of `torch.nn.Module` or a function that builds a network, which get
            `input_shape` and `num_outputs` if they have parameters of these names.
        members: number of members. None: as many as the method implies.
        epochs: passes over the training rows.
        batch_size: rows in one step.
        loss: default: `cross_entropy`.
        optimizer: default: `adabelief`.
        schedule: of the learning rate. Default: it is constant.
        mix: how training rows are mixed with others. Default: they are not.
        combiner: how predictions combine the members' outputs. Default: as the method does.
        clip_norm: largest norm of a member's gradient.
        validation_fraction: share of the rows held out for validation, by `random_state`. Default: 0.1 if `patience`
            or `keep="best"` needs validation rows, else 0.
        patience: stop early after that many evaluations without a lower validation loss.
        keep: "last" or "best": the weights of the last epoch, or those with the lowest validation loss.
        evaluate_every: epochs between evaluations on validation rows.
        class_weight: how much rows of each class count in the objective: by the class, or "balanced".
        scaling: of columns of numbers: "standard", "quantile" or None. Not for images.
        engine: how members are computed. "auto": stacked if the model supports it, else one after the other; nothing
            is measured, so that `random_state` alone decides the result.
        n_jobs: threads of torch in training and predictions; -1: one for each core. Default: one, since small networks
            gain little by more, and searches and cross-validations use the other cores.
        plugins: plugin classes that other parameters may name, or local Python files with such classes.
        random_state: an integer, the seed of everything that is random; an instance of `RandomState`; or None for
            another seed in each fit.
        verbose: whether to show the progress of training.

    Attributes:
        classes_: the classes (C,), sorted.
        n_features_in_: number of columns.
        feature_names_in_: their names, if a frame was given and all are text.
        ensemble_: the trained `ensemblekit.Ensemble`, which takes inputs that are prepared.
        preparation_: what prepares rows: imputes, scales and encodes; None for images.
        history_: the metrics of each epoch.
        metrics_: the last metrics on the training rows, and those on the validation rows of the trained ensemble.
    """

    classes_: NDArray[Any]

    def __init__(
        self,
        method: Table | Sequence[Table] = "independent",
        model: NetworkLike = "mlp",
        members: int | None = 5,
        *,
        epochs: int = 50,
        batch_size: int = 32,
        loss: Table | None = None,
        optimizer: Table | None = None,
        schedule: Table | None = None,
        mix: Table | None = None,
        combiner: Table | None = None,
        clip_norm: float | None = None,
        validation_fraction: float | None = None,
        patience: int | None = None,
        keep: Literal["last", "best"] = "last",
        evaluate_every: int = 1,
        class_weight: Literal["balanced"] | Mapping[Any, float] | None = None,
        scaling: Scaling = "standard",
        engine: Table = "auto",
        n_jobs: int | None = None,
        plugins: Sequence[PluginLike] = (),
        random_state: int | RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        self.method = method
        self.model = model
        self.members = members
        self.epochs = epochs
        self.batch_size = batch_size
        self.loss = loss
        self.optimizer = optimizer
        self.schedule = schedule
        self.mix = mix
        self.combiner = combiner
        self.clip_norm = clip_norm
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.keep = keep
        self.evaluate_every = evaluate_every
        self.class_weight = class_weight
        self.scaling = scaling
        self.engine = engine
        self.n_jobs = n_jobs
        self.plugins = plugins
        self.random_state = random_state
        self.verbose = verbose

    def _read_targets(self, y: Any) -> NDArray[Any]:
        targets = column_or_1d(np.asarray(y), warn=True)
        assert_all_finite(targets, input_name="y")
        check_classification_targets(targets)
        return np.asarray(targets)

    def _encode(self, targets: NDArray[Any]) -> NDArray[Any]:
        self.classes_, indices = np.unique(targets, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"{type(self).__name__} needs rows of at least 2 classes, got 1 class: {self.classes_[0]!r}"
            )
        return indices.reshape(-1)

    def _class_weights(self) -> str | list[float] | None:
        return class_weights(self.class_weight, self.classes_)

    def predict(self, X: Any) -> NDArray[Any]:
        """Predict the classes of rows (N,)."""
        indices = self.predict_proba(X).argmax(axis=1)
        return self.classes_[indices]

    def predict_proba(self, X: Any) -> NDArray[np.float32]:
        """Predict the probabilities of the classes (N, C), in the order of `classes_`."""
        return self._compute(X, lambda inputs: self.ensemble_.predict_proba(inputs))

    def member_predict_proba(self, X: Any) -> NDArray[np.float32]:
        """Predict the probabilities of each member (M, N, C)."""
        return self._compute(X, self._member_probabilities, dim=1)

    def _member_probabilities(self, inputs: Tensor) -> Tensor:
        return self.ensemble_.loss.probabilities(self.ensemble_.member_outputs(inputs))

    def uncertainty(self, X: Any) -> Uncertainty:
        """Return how uncertain predictions are, in nats (N,): the total is the sum of its two parts."""
        members = torch.from_numpy(self.member_predict_proba(X)).double()
        found = uncertainty(members)
        parts = found.entropy, found.aleatoric_entropy, found.mutual_information
        return Uncertainty(*(part.numpy() for part in parts))


class EnsembleRegressor(RegressorMixin, EnsembleEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A regressor that is an ensemble of neural networks; targets may be several values (N, C).

    Parameters and attributes are those of `EnsembleClassifier`, without `class_weight` and `classes_`. The default loss
    is `mse`. Networks learn standardised targets; predictions are in the original units.
    """

    def __init__(
        self,
        method: Table | Sequence[Table] = "independent",
        model: NetworkLike = "mlp",
        members: int | None = 5,
        *,
        epochs: int = 50,
        batch_size: int = 32,
        loss: Table | None = None,
        optimizer: Table | None = None,
        schedule: Table | None = None,
        mix: Table | None = None,
        combiner: Table | None = None,
        clip_norm: float | None = None,
        validation_fraction: float | None = None,
        patience: int | None = None,
        keep: Literal["last", "best"] = "last",
        evaluate_every: int = 1,
        scaling: Scaling = "standard",
        engine: Table = "auto",
        n_jobs: int | None = None,
        plugins: Sequence[PluginLike] = (),
        random_state: int | RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        self.method = method
        self.model = model
        self.members = members
        self.epochs = epochs
        self.batch_size = batch_size
        self.loss = loss
        self.optimizer = optimizer
        self.schedule = schedule
        self.mix = mix
        self.combiner = combiner
        self.clip_norm = clip_norm
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.keep = keep
        self.evaluate_every = evaluate_every
        self.scaling = scaling
        self.engine = engine
        self.n_jobs = n_jobs
        self.plugins = plugins
        self.random_state = random_state
        self.verbose = verbose

    def _read_targets(self, y: Any) -> NDArray[Any]:
        targets = check_array(np.asarray(y), ensure_2d=False, dtype="numeric", input_name="y")
        self._has_one_target = targets.ndim == 1
        return np.asarray(targets, dtype=np.float64)

    def _encode(self, targets: NDArray[Any]) -> NDArray[Any]:
        return targets

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Predict the values of rows: (N,), or (N, C) if `fit` was given targets (N, C)."""
        found = self._compute(X, lambda inputs: torch.as_tensor(self.ensemble_.predict(inputs)))
        return found[:, 0] if self._has_one_target else found

    def member_predict(self, X: Any) -> NDArray[np.float64]:
        """Predict the values of each member: (M, N) or (M, N, C)."""
        found = self._compute(X, self._member_values, dim=1)
        return found[..., 0] if self._has_one_target else found

    def _member_values(self, inputs: Tensor) -> Tensor:
        return self.ensemble_.loss.point(self.ensemble_.member_outputs(inputs))

    def uncertainty(self, X: Any) -> Uncertainty:
        """Return how uncertain predictions are, as standard deviations in the units of the targets: (N,) or (N, C).

        The square of the total is the sum of the squares of its parts. A loss that predicts the noise of the data, such
        as `gaussian_nll`, is needed for the aleatoric part; without it the total is the epistemic part alone.
        """
        found = self._compute(X, self._deviations, dim=1)
        aleatoric, epistemic = found[..., 0] if self._has_one_target else found
        total = np.hypot(np.nan_to_num(aleatoric), epistemic)
        return Uncertainty(total, aleatoric, epistemic)

    def _deviations(self, inputs: Tensor) -> Tensor:
        """Return the aleatoric and the epistemic standard deviation (2, N, C)."""
        outputs, loss = self.ensemble_.member_outputs(inputs), self.ensemble_.loss
        epistemic = loss.point(outputs).std(dim=0, correction=0)
        own = loss.intervals(outputs).get("standard_deviation")
        aleatoric = torch.full_like(epistemic, torch.nan) if own is None else own.square().mean(dim=0).sqrt()
        return torch.stack([aleatoric, epistemic])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _more_tags(self) -> dict[str, Any]:  # scikit-learn before 1.6
        return {**super()._more_tags(), "multioutput": True}
