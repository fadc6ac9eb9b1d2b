"""Functions of scikit-learn that have other names in some of its versions since 1.4."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils import validation


def check_columns(estimator: Any, frame: Any, reset: bool) -> None:
    """Remember the columns of a frame if `reset`, else raise a `ValueError` unless it has those that are known."""
    if hasattr(validation, "validate_data"):
        validation.validate_data(estimator, frame, reset=reset, skip_check_array=True)
    else:  # before 1.6
        estimator._check_feature_names(frame, reset=reset)
        estimator._check_n_features(frame, reset=reset)


def check_inputs(estimator: Any, inputs: Any, reset: bool) -> NDArray[Any]:
    """Return inputs as an array of numbers (N, …), in which values may be nan; `reset` as for `check_columns`."""
    options = {"dtype": "numeric", "allow_nd": True, "reset": reset, "ensure_min_samples": 2 if reset else 1}
    if hasattr(validation, "validate_data"):
        array = validation.validate_data(estimator, inputs, ensure_all_finite="allow-nan", **options)
    else:  # before 1.6
        array = estimator._validate_data(inputs, force_all_finite="allow-nan", **options)
    return np.asarray(array)
