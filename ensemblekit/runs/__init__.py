"""The run directory: atomic files, checkpoints and a lock; a run can be opened and read without training it.

Uses the layers up to `members`. Start with `directory.py`, which writes and verifies the files; `run.py` reads them.
"""
