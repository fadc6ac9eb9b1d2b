"""Starts a plugin package for `ensemblekit new`: installable, tested and ready to train.

Uses core and runs. The files that are written come from `templates/`: `common/` has those of every kind, the other
folders those of one kind. Start with `packages.py`; `names.py` derives and checks the names.
"""
