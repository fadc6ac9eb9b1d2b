"""The run directory: atomic files, checkpoints and a lock; a run can be opened, verified and read without training it.

Uses the layers up to `members`. Start with `directory.py`.
"""
