"""A trained ensemble: loaded from a run, it predicts, combines its members and measures their disagreement.

Uses the layers up to `training`. Start with `ensemble.py`.
"""
