"""Ensembles as scikit-learn estimators: `EnsembleClassifier` and `EnsembleRegressor`.

Uses the layers up to `display`. Start with `estimators.py`; `parameters.py` turns their parameters into a spec,
`preparation.py` turns arrays and frames into inputs of networks, and `rows.py` has the weights of the training rows.
"""

from ensemblekit.sklearn.estimators import EnsembleClassifier, EnsembleRegressor, Uncertainty

__all__ = ["EnsembleClassifier", "EnsembleRegressor", "Uncertainty"]
