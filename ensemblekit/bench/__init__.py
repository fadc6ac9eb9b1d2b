"""Measures the engines against hand-written training loops, for `ensemblekit bench` and `tests/benchmarks`.

Uses engines, inference and everything below them. Start with `measurement.py` (one workload from start to end);
`workloads.toml` has the workloads, `contestants.py` the ways to run them.
"""
