"""What runs show together: listings, sweeps and searches, comparisons and reports, from run directories.

Uses the layers up to `inference`. Start with `run_list.py`, which describes the runs below a directory, or with
`plans.py`, which turns a spec into the runs of a sweep; `sweeps.py` keeps them, and `sweep_runner.py` runs them.
"""
