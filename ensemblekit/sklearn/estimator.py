"""What both estimators share: parameters of a spec, fitting in memory, pickling, and computing with the ensemble."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from math import prod
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save
from sklearn.base import BaseEstimator
from sklearn.utils import assert_all_finite, check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from ensemblekit.core.errors import NumericError
from ensemblekit.core.registry import Registry
from ensemblekit.core.threads import num_cores, threads
from ensemblekit.data.loading import Data, load_data
from ensemblekit.display.progress import EpochLines
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.inference.loading import assemble, tensors_of
from ensemblekit.members.python_specs import registry_of, spec_of
from ensemblekit.runs.in_memory import InMemoryRun
from ensemblekit.sklearn.compatibility import check_columns, check_inputs
from ensemblekit.sklearn.parameters import TABLES, nested_parameters, plain, spec_tables, with_nested
from ensemblekit.sklearn.preparation import Columns, InputPreparation, is_frame, read_array
from ensemblekit.sklearn.rows import Floats, WeightedRows, check_weights, distinct_rows
from ensemblekit.spec.reader import load_spec
from ensemblekit.spec.sections import Spec
from ensemblekit.training.only_run import between_runs
from ensemblekit.training.sessions import train_in_memory

BATCH_BYTES = 2**24
"""Size of the inputs that are computed at once in predictions."""
DEFAULT_FRACTION = 0.1
"""Share of the rows that is held out for validation if something needs it and `validation_fraction` is None."""


class EnsembleEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """An ensemble of neural networks with the interface of scikit-learn."""

    n_features_in_: int
    preparation_: InputPreparation | None
    ensemble_: Ensemble
    history_: list[dict[str, Any]]
    metrics_: dict[str, float]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters by name.

        Args:
            deep: whether to add those of tables, such as `method__lambda`.
        """
        params: dict[str, Any] = super().get_params(deep=False)
        if deep:
            for name in TABLES:
                params |= nested_parameters(name, params[name])
        return params

    def set_params(self, **params: Any) -> Self:
        """Set parameters, also those of tables, such as `method__lambda`; the table itself is not changed.

        Raises:
            ValueError: there is no such parameter.
        """
        nested = {key: value for key, value in params.items() if key.partition("__")[0] in TABLES and "__" in key}
        super().set_params(**{key: value for key, value in params.items() if key not in nested})
        for key, value in nested.items():
            name, _, path = key.partition("__")
            setattr(self, name, with_nested(getattr(self, name), path, value))
        return self

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train the ensemble.

        Args:
            X: an array (N, F) or a frame with N rows; or images (N, channels, height, width), uint8 or floating, for
                a model that takes them. Numbers may be nan.
            y: the targets (N,).
            sample_weight: how much each row counts in the objective, at least 0 (N,); only ratios matter. Rows of
                weight 0 are left out.

        Raises:
            ValueError: the data cannot be used.
            SpecError: a parameter is invalid; the error lists every problem.
            NumericError: training diverged.
        """
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        seed = self._seed()
        self.preparation_ = InputPreparation(self.scaling, seed)
        rows, targets = self._read(X, reset=True), self._read_targets(y)
        check_consistent_length(X, targets)
        weights = check_weights(sample_weight, X)
        if weights is not None and not weights.all():
            kept = weights.nonzero()[0]
            rows, targets, weights = _select(rows, kept), targets[kept], weights[kept]
        targets = self._encode(targets)
        spec, registry = self._spec(seed)
        if len(targets) <= spec.training.batch_size:
            rows, targets, weights = _distinct(rows, targets, weights)
        if isinstance(rows, Columns):
            inputs = self.preparation_.fit(rows, weights)(rows)
        else:
            inputs, self.preparation_ = rows, None
        dataset = WeightedRows.in_place_of(spec.data).of_rows(inputs, targets, weights)
        self._keep(self._train(spec, registry, load_data(dataset, seed)))
        return self

    @abstractmethod
    def _read_targets(self, y: Any) -> NDArray[Any]:
        """Return targets as an array (N, …) that has no missing values."""

    @abstractmethod
    def _encode(self, targets: NDArray[Any]) -> NDArray[Any]:
        """Return the targets of the rows that count as a run takes them, and remember what they mean."""

    def _class_weights(self) -> str | list[float] | None:
        """Return the weights of classes as a spec has them."""
        return None

    def _seed(self) -> int:
        if isinstance(self.random_state, Integral):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _num_threads(self) -> int:
        """Return how many threads to use, as scikit-learn counts jobs: -1 is all cores, -2 all but one."""
        if self.n_jobs is None:
            return 1
        if not isinstance(self.n_jobs, Integral) or self.n_jobs == 0:
            raise ValueError(f"n_jobs must be an integer other than 0, or None, got {self.n_jobs!r}")
        jobs = int(self.n_jobs)
        return jobs if jobs > 0 else max(1, num_cores() + 1 + jobs)

    def _spec(self, seed: int) -> tuple[Spec, Registry]:
        """Return the spec of the parameters, and the plugins that it may name."""
        tables = spec_tables(self.get_params(deep=False))
        fraction = self.validation_fraction
        if fraction is None:
            fraction = DEFAULT_FRACTION if self.patience is not None or self.keep == "best" else 0.0
        tables |= {"seed": seed, "data": {"validation_fraction": plain(fraction)}}
        tables["training"] |= {"keep_outputs": False}
        if (weights := self._class_weights()) is not None:
            tables["training"]["class_weights"] = weights
        network = None if isinstance(self.model, str | Mapping) else self.model
        self._python = (self.plugins, network)
        registry = registry_of(self.plugins, network)
        return spec_of(tables, None, registry, network, in_memory=True), registry

    def _train(self, spec: Spec, registry: Registry, data: Data) -> InMemoryRun:
        listeners = [EpochLines()] if self.verbose else []
        try:
            with threads(self._num_threads()):
                return train_in_memory(spec, registry, data, listeners)
        except NumericError as error:  # it names a checkpoint, and there is none
            raise NumericError(error.what, f"{type(self).__name__}.fit", error.fix) from error

    def _keep(self, run: InMemoryRun) -> None:
        """Keep the trained ensemble and what was measured in training."""
        self._metadata = run.metadata
        self.ensemble_ = self._assembled(run.spec_tables, run.tensors)
        self.history_ = run.history
        last = {name: value for name, value in run.history[-1].items() if name.startswith("train_")}
        self.metrics_ = last | run.result["validation_metrics"]

    def _assembled(self, tables: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Ensemble:
        spec = load_spec(tables, None, registry_of(*self._python), ask_plugins=False, for_training=False)
        with between_runs():
            ensemble = assemble(spec, tensors, self._metadata, Path("the estimator"))
        return ensemble if self.preparation_ is None else _precise(ensemble)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "ensemble_" in state:
            ensemble = state["ensemble_"]
            tensors = {name: _without_zeros(tensor) for name, tensor in tensors_of(ensemble).items()}
            state["ensemble_"] = (json.dumps(ensemble.spec.to_dict()), save(tensors))
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(dict(state))
        if "ensemble_" in state:
            spec, weights = state["ensemble_"]
            self.ensemble_ = self._assembled(json.loads(spec), load(weights))

    def _read(self, X: Any, reset: bool) -> Columns | NDArray[Any]:
        """Return the columns of a table, or an array of images; `reset` is true in `fit`."""
        preparation = self.preparation_
        if is_frame(X) and (reset or (preparation is not None and preparation.columns is not None)):
            assert preparation is not None
            check_columns(self, X, reset)
            if len(X) < 1 + reset or len(X.columns) == 0:
                shape = f"{len(X)} sample(s) and {len(X.columns)} feature(s)"
                raise ValueError(f"Found a frame with {shape}, while a minimum of {1 + reset} and 1 is required")
            return preparation.read_training_frame(X) if reset else preparation.read_frame(X)
        array = check_inputs(self, X, reset)
        if array.ndim > 2:
            assert_all_finite(array, input_name="X")
            return array
        if preparation is not None and preparation.category_columns:
            raise ValueError(
                f"{type(self).__name__} was fitted to a frame with categories; give a frame of its columns"
            )
        return read_array(array)

    def prepare(self, X: Any) -> NDArray[Any]:
        """Return rows as `ensemble_` takes them, (N, number of inputs), or images as they are."""
        check_is_fitted(self)
        rows = self._read(X, reset=False)
        if not isinstance(rows, Columns):
            return rows
        assert self.preparation_ is not None
        return self.preparation_(rows)

    def _compute(self, X: Any, compute: Callable[[Tensor], Tensor], dim: int = 0) -> NDArray[Any]:
        """Return what is computed from the inputs of networks, batch by batch along a dimension of the results."""
        inputs = torch.from_numpy(np.array(self.prepare(X)))
        size = max(1, BATCH_BYTES // (4 * prod(inputs.shape[1:])))
        with torch.no_grad(), threads(self._num_threads()), self.ensemble_.own_threads():
            found = torch.cat([compute(batch) for batch in inputs.split(size)], dim=dim)
        return found.cpu().numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _more_tags(self) -> dict[str, Any]:  # scikit-learn before 1.6
        return {"allow_nan": True}


def _precise(ensemble: Ensemble) -> Ensemble:
    """Return an ensemble that computes in float64, if its networks can.

    In float32 the last digits of a prediction depend on which other rows are predicted with it, and in which order.
    """
    inputs = torch.zeros(1, *ensemble.info.input_shape)
    try:
        with ensemble.double().own_threads():
            ensemble(inputs)
    except RuntimeError:  # a network with tensors of its own in float32
        ensemble.float()
    return ensemble


def _without_zeros(tensor: Tensor) -> Tensor:
    """Return a float64 tensor as float32 if that loses nothing: it was trained in float32."""
    if tensor.dtype != torch.float64 or not bool((tensor.float().double() == tensor).all()):
        return tensor
    return tensor.float()


def _select(rows: Columns | NDArray[Any], chosen: NDArray[Any]) -> Columns | NDArray[Any]:
    return rows.select(chosen) if isinstance(rows, Columns) else rows[chosen]


def _distinct(
    rows: Columns | NDArray[Any], targets: NDArray[Any], weights: Floats | None
) -> tuple[Columns | NDArray[Any], NDArray[Any], Floats | None]:
    """Merge equal rows, see `distinct_rows`."""
    codes = rows.codes() if isinstance(rows, Columns) else rows.reshape(len(rows), -1)
    merged = distinct_rows(codes, targets, weights)
    if merged is None:
        return rows, targets, weights
    kept, sums = merged
    return _select(rows, kept), targets[kept], sums
