"""What runs show together: sweeps over specs, and searches for good values.

Uses the layers up to `inference`. Start with `plans.py`, which turns a spec into the runs of a sweep; `sweeps.py` keeps
them in a directory, and `sweep_runner.py` runs them.
"""
