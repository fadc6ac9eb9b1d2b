"""Engines compute the outputs (M, B, C) of the members forward and the gradients back; they know no method.

Uses the layers up to `runs`. Start with `step.py`, the step algorithm, then `base.py`; `sequential.py`, `threaded.py`
and `stacked.py` are three ways to run it, and `selection.py` chooses one. The choice changes speed and memory, not
results beyond rounding. A new engine is a file here and a row in `ENGINES` of `spec/sections.py`.
"""
