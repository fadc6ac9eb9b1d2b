"""The networks of an ensemble: built from seeds, stochastic layers, flat parameters, copies folded for prediction.

Uses `core`, `spec` and `data`. Start with `build.py`, then `growing.py`: the members of a run in training.
"""
